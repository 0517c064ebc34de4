"""What the demo knows of the engine: topics with the ways to ask and the answer, from README.md, docs/ and --help.

Patterns are those of ``spin``. Each topic's answers carry the same facts, so that any of them is right.
"""

from __future__ import annotations

from dataclasses import dataclass

PULL = "`engine pull OWNER/REPO` [downloads|fetches|gets] a real model[| from the hub], and `engine chat MODEL.gguf` [talks with|opens|runs] one [you have|that you have|on your disk]."


@dataclass(frozen=True)
class Topic:
    """Questions in full, what the question is about in a few words, and answers."""

    name: str
    questions: tuple[str, ...]
    subjects: tuple[str, ...]
    answers: tuple[str, ...]


WRAPPERS = (
    "[how about|what about|tell me about|explain|help with|a question about|I have a question about|what can you say about|what do you know about|info on] SUBJECT[|?| please]",
    "SUBJECT[?|]",
    "[could|can|would] you [tell me [something|more|] about|explain|describe|show me] SUBJECT[?|]",
    "[I am looking for|I need [help with|]|I wonder about|I'd like to know about|I want|give me|show me|where [is|are|do I find]] SUBJECT[?|]",
)

HOW = "[how [do|can|could|would|should|to] [I|we|you|one|]|what do I [do|type|need] to|what is the [command|way] to|show me how to|which command [lets me|do I use to]|I [want|need|would like] to|can I|can you|is it possible to|help me|let me|where can I|how might I|is there a way to]"

TOPICS = (
    Topic(
        "self",
        (
            "[what|who] [are|is] [you|this|that][| exactly| really| anyway]?",
            "[so|and] [who|what] are you?",
            "[what|which] [model|AI|program|bot|machine|thing] [are you|is this|am I using|do I talk to|answers me here]?",
            "are you [a|an|the|some] [AI|robot|human|person|real person|chatbot|demo|big model|good model|toy|language model|GPT|ChatGPT|machine|program]?",
            "[tell me|say something|talk|speak] about yourself",
            "[introduce|describe|explain] yourself",
            "[what is|what's|tell me] your [name|purpose|job]",
            "[who|what] [am I|are we] [talking|speaking|chatting|writing] [to|with][| here| now]?",
            "do you have a name?",
            "are you [real|alive|smart|clever|intelligent|conscious|any good]?",
            "is [this|it] a [real|proper|big|toy] [model|AI|bot] or [a|just a] [toy|demo|test]?",
        ),
        ("yourself", "you", "this [demo|model|bot]", "the demo"),
        (
            "I am the [built-in|small built-in|tiny built-in] demo model of engine[| here]. [I tell small stories and answer questions about engine|I know a few things about engine and tell small stories].",
            "I am a demo: a [tiny|very small] language model that [comes with|is built into] engine. [I tell stories and know a little about engine.|Ask me about engine, or for a story.]",
        ),
    ),
    Topic(
        "ability",
        (
            "what [can|could|do] you do[| for me| all day]?",
            "what [can|should|may] I ask[| you]?",
            "[what are you|what is this] [good|useful|made] for?",
            "[how can you help|can you help me|help|help me|help me please|I need help]",
            "what [do you know|are your skills|things can you do]?",
        ),
        ("your [skills|talents|abilities]", "what you can do"),
        (
            "I tell [small|short] stories and answer questions about engine. [Try: tell me a story about a fox.|Ask for a story about any animal.] I am only a demo.",
            "I am a demo, so not much: [small|short] stories about anything you name, and questions about engine.",
        ),
    ),
    Topic(
        "model",
        (
            f"{HOW} [use|get|run|try|load|download|fetch|find|install|open|start|choose|pick|take|have|add|put in] [another|a different|a real|a bigger|a larger|a better|a smarter|my own|some other|a new|one more|a good|a proper|a stronger|a full] [model|one|LLM|network|AI]?",
            f"{HOW} [change|switch|replace|swap|exchange|upgrade] [the|your|this|that] [model|AI|demo|bot][| for [another|a bigger one|a better one|something [better|bigger|stronger]]]?",
            f"{HOW} [use|get|run|try|load|download|fetch|chat with|talk to|have] [llama|qwen|gemma|mistral|phi|gpt-oss|deepseek|falcon|mixtral|llama 3|qwen3|gemma 3|a hugging face model|a model from the hub|something [better|smarter|bigger]|a gguf][| here| instead| instead of you]?",
            "[where|how] [do I|can I|to] [find|get|download] [more|other|better|bigger|real|good|new] [models|ones]?",
            "[you are|this is|this model is|you seem|your answers are] [too|so|very] [small|stupid|weak|slow|silly|tiny|bad|limited|simple|dumb][|, what now?|, give me a [better|bigger|real] [one|model]|. how do I get a [better|real|bigger] one?|, where is a better one?]",
            "[can|could|may] I [replace|swap|exchange|change] you [for|with|by] [a better one|another|something else|a real model|a bigger model|qwen|llama]?",
            "[what|which] command [gets|downloads|fetches|pulls|loads] [a|another|a real] model?",
            "I [have|got|downloaded] a [gguf|model|file|model file], [what now|how do I use it|can you open it|how do I run it]?",
        ),
        (
            "[using|getting|downloading|running] [another|other|real|bigger] [model|models]",
            "[other|another|real|bigger|better|more] [models|model]",
            "[downloading|pulling|switching] [a model|models]",
            "engine pull",
        ),
        (PULL[0].upper() + PULL[1:], "I am only the demo. " + PULL, "[Sure|Yes|Gladly]: " + PULL),
    ),
    Topic(
        "formats",
        (
            "[which|what] [model|file|weight|checkpoint|] [formats|files|types|file types|kinds of files|sorts of files|extensions] [do you|can you|does engine|can engine|can I|does it] [read|load|open|support|use|run|take|know|understand]?",
            "[can|does|will|could] [you|it|engine|this] [read|load|open|support|run|take|understand|handle] [gguf|safetensors|awq|gptq|a folder|hugging face folders|fp8|mxfp4|quantized models|q4_k_m|model files|bitsandbytes|pytorch files|this file type]?",
            "[is|are] [gguf|safetensors|gptq|awq|hugging face folders|nf4] [supported|ok|readable|possible|allowed]?",
            "what [does|must|should] a model [file|] look like?",
            "[what|which] [format|type|kind] [must|should|does] [a model|the model|my model|a file|the file] [have|be]?",
        ),
        (
            "[the|] [model|file|] formats",
            "[supported|model|] [files|file types|formats]",
            "gguf",
            "safetensors",
            "gguf [and|or] safetensors",
        ),
        (
            "Engine reads GGUF files and Hugging Face folders with safetensors[|, also GPTQ, AWQ and FP8].",
            "[Two kinds|Both]: GGUF files, and Hugging Face folders with config.json and safetensors.",
        ),
    ),
    Topic(
        "devices",
        (
            "[which|what] [devices|backends|hardware|chips|GPUs|accelerators|machines] [do you|does engine|can engine|can it|can I|does it|are] [use|support|run on|there|have|see|find|work with|supported]?",
            "[does|can|will|could] [it|engine|this|you] [use|run on|work with|see|find|need|support] [my|a|the|an] [gpu|graphics card|nvidia card|cuda|mac|amd card|metal|device|accelerator|opencl|vulkan|rocm|npu]?",
            "[do I|does one|does it] need a [gpu|graphics card|big machine]?",
            "[is|why is|why isn't] [my|the|a] [gpu|graphics card|card|device|cuda|accelerator] [used|found|seen|working|detected|not used|not found|idle|being used|running]?",
            f"{HOW} [see|list|find|check|show|choose|know] [the|my|all|which] [devices|backends|hardware|gpus|device][| are there| you found| are used| you have]?",
            "what [are you|is it|is this|does it] running on?",
            "[something|it] [is broken|does not work|is slow|is wrong|fails], [what now|how do I find out|help]?",
        ),
        (
            "[the|] [devices|backends|hardware|backend]",
            "[cuda|gpus|metal|opencl|rocm|jax]",
            "[my|the] [gpu|graphics card|hardware]",
            "engine doctor",
        ),
        (
            "`engine doctor` shows [the|all] devices it finds and the backend it takes; the CPU [always works|is always there].",
            "The CPU always works[|, and backends are plugins]. `engine doctor` [lists|shows|names] [the devices|all devices] and what is used[| and why].",
        ),
    ),
    Topic(
        "server",
        (
            "[where|how] is [the|a|your] [server|api|http server|web server|endpoint|rest api]?",
            f"{HOW} [start|run|use|open|get|launch|find|have|host] [a|the|an|your] [server|api|http server|rest api|openai api|openai server|web page|http api|endpoint|openai compatible server|web interface]?",
            "[is|do you have|does engine have|have you got] [there|] [a|an] [server|api|http api|openai api|web page|endpoint|rest interface]?",
            f"{HOW} serve [a|my|the|this] model[| over http| to others| on the network| to my team]?",
            "[can|could] [others|my program|my friends|other programs|clients] [use|reach|call|talk to] [it|you|this] [over http|over the network|by http|]?",
        ),
        ("[the|an|] [http|openai|web|rest|] [server|api|endpoint]", "serving [models|a model|]", "engine serve"),
        (
            "The server is `engine serve MODEL`, where your release has it; `engine --help` lists the commands.",
            "That is `engine serve MODEL`, [for|with] the OpenAI API; `engine --help` [tells|shows] whether your release has it.",
        ),
    ),
    Topic(
        "quantize",
        (
            f"{HOW} [quantize|shrink|compress|convert|pack|make smaller|squeeze] [a|my|the|this] [model|folder|file|checkpoint|weights][| to [q4_k_m|q8_0|gguf|4 bits|nf4|int8]]?",
            f"{HOW} make [a|my|the|this] [model|file|checkpoint|folder] [smaller|q4_k_m|a gguf|use less memory|fit into memory]?",
            "[can|does] [you|engine|it] [quantize|convert|shrink|compress|write gguf|make ggufs]?",
            "[my|the] model [is too big|does not fit|needs too much memory], [what now|help|what can I do]?",
            f"{HOW} [make|write|get|create] [a|an] [gguf|q8_0|q4_k_m|quantized model|nf4 folder|smaller file]?",
        ),
        (
            "[quantization|quantizing|quantize|q4_k_m|q8_0|smaller models|compression]",
            "[converting|shrinking] [a model|models|folders]",
            "engine quantize",
        ),
        (
            "`engine quantize folder/ model.gguf -t Q4_K_M` makes a [smaller|quantized] model[|, from a folder or a GGUF].",
            "Use `engine quantize folder/ model.gguf -t Q4_K_M`; [Q8_0 and other types work, too|it also reads a GGUF].",
        ),
    ),
    Topic(
        "bench",
        (
            "how [fast|quick|slow|speedy] [is|are|can] [it|you|engine|this|be]?",
            f"{HOW} [measure|test|check|benchmark|see|find] [the|its|your|my] [speed|rates|performance|throughput|tokens per second|machine]?",
            "[is there|have you|do you have] [a|any] [benchmark|speed test|measurement|benchmarks]?",
            "how many tokens [per|a] second [can you do|does it make|do you reach|is that]?",
        ),
        (
            "[speed|performance|benchmarks|the benchmark|throughput|rates|tokens per second|a speed test]",
            "[measuring|testing] [speed|it]",
            "engine bench",
        ),
        (
            "`engine bench MODEL.gguf` measures [how fast|prompt and decode rates, so how fast] a model runs[| here| on your machine].",
            "Measure it with `engine bench MODEL.gguf`: [it shows|you get] tokens a second for prompt and answer.",
        ),
    ),
    Topic(
        "tokenize",
        (
            f"{HOW} [tokenize|count|see|show|print|get|find] [a text|the tokens|tokens|token ids|the ids|my text|the tokens of a file|how many tokens a text has]?",
            "[how many|which] tokens [does|has|are in|make] [a|my|this] [text|file|prompt|sentence][| have]?",
            "[is there|where is] [a|the] tokenizer?",
        ),
        ("[tokens|tokenizing|the tokenizer|token ids|tokenize|tokenization|counting tokens]", "engine tokenize"),
        (
            "`engine tokenize MODEL.gguf --file text.txt` prints the token ids[| of a text].",
            "Use `engine tokenize MODEL.gguf --file text.txt`; it [prints|shows] the ids on one line.",
        ),
    ),
    Topic(
        "perplexity",
        (
            f"{HOW} [measure|compute|get|find|calculate|check|compare] [the|a|my|] [perplexity|quality|accuracy|kl divergence|perplexity of a model|loss][| of [a|my|the] model| of two models]?",
            "how [good|accurate|bad] is [a|my|the] [model|quantized model|quantization]?",
            "[what|where] is [the|] perplexity?",
        ),
        ("[the|] perplexity", "[kl divergence|model quality|the quality of a model]", "engine perplexity"),
        (
            "`engine perplexity MODEL.gguf text.txt` measures it[|; --kl OTHER compares two models].",
            "Use `engine perplexity MODEL.gguf text.txt`, and --kl OTHER to compare two models.",
        ),
    ),
    Topic(
        "imatrix",
        (
            f"{HOW} [make|compute|collect|get|create|use] [an|the] [imatrix|importance matrix]?",
            "what is [an|the] [imatrix|importance matrix]?",
        ),
        ("[an|the|] [imatrix|importance matrix]", "importance matrices", "engine imatrix"),
        (
            "`engine imatrix model.gguf text.txt -o imatrix.gguf` collects one; give it to `engine quantize` with --imatrix.",
        ),
    ),
    Topic(
        "json",
        (
            f"{HOW} [get|force|make|have|ask for|enforce|guarantee|produce] [json|valid json|structured output|structured outputs|json output|a schema|a fixed form|output by a schema|an answer in json|a regex|a grammar]?",
            "[can|does|will] [it|you|engine] [answer in|write|give|output|follow|obey|return] [json|valid json|a schema|a json schema|a grammar|a regex|structured output]?",
            "[which|what] [option|flag] [gives|is for|makes|forces] [json|structured output|a schema|a grammar|a regex]?",
        ),
        ("[json|structured output|structured outputs|json schemas|grammars|a regex|a json schema|the schema option]",),
        (
            "Add `--schema FILE`: the answer is then JSON of that schema. `--regex` and `--grammar` [work|exist|are there], too.",
            "With `--schema person.json` the answer is JSON of that schema; there are `--regex` and `--grammar`, too.",
        ),
    ),
    Topic(
        "python",
        (
            f"{HOW} [use|call|run|start|import|drive|control] [it|engine|this|you|a model] [from|in|with|by] [python|a python program|my python code|python code|a script|my own code|my program]?",
            "[is there|do you have|where is] [a|the|an] [python|] [api|library|package|module|interface] [for python|in python|to import|]?",
            "[what|how] [do I|to] import[| in python]?",
            "[show|give] me [some|the|a] python [code|example]",
        ),
        ("[python|the python api|python code|the library|a python example|using python|importing engine]",),
        (
            'In Python: `from engine import LLM, SamplingParams`, then `LLM("model.gguf").generate(["Hello"])`.',
            'Write `from engine import LLM, SamplingParams` and call `LLM("model.gguf").generate(["Hello"])`.',
        ),
    ),
    Topic(
        "plugin",
        (
            f"{HOW} [write|make|build|create|add|develop|start] [a|an|my own|my|a new|another] [backend|plugin|device|backend plugin][| for [a new device|my chip|my hardware|an accelerator]]?",
            f"{HOW} [support|add|use] [a new|my own|another|an unusual] [device|chip|accelerator|processor]?",
            "what [is|does|must|needs] a backend[| have| do]?",
        ),
        (
            "[plugins|writing a backend|backend plugins|my own backend|new devices|a plugin|writing plugins]",
            "engine plugin",
        ),
        (
            "`engine plugin new mydev` makes a project for [a backend of your own|your own backend]; read docs/write-a-backend.md.",
            "Start with `engine plugin new mydev`, and read docs/write-a-backend.md: eight methods are enough.",
        ),
    ),
    Topic(
        "leave",
        (
            f"{HOW} [leave|exit|quit|stop|end|close|get out of|go out of|finish] [this|the|] [chat|program|conversation|here|now|you|session|]?",
            "[how|what] [do I|to] [type|press] to [leave|exit|quit|stop|end]?",
            f"{HOW} [stop|interrupt|cancel|cut] [you|an answer|your answer|the answer|the text]?",
            "[exit|quit|leave|stop|close]",
        ),
        ("[leaving|quitting|the exit|stopping|how to leave|exit]",),
        (
            "Type /exit or press Ctrl-D to leave; Ctrl-C stops an answer.",
            "With /exit, or Ctrl-D. Ctrl-C only stops an answer.",
        ),
    ),
    Topic(
        "license",
        (
            "[what|which] [is the|is your|is its|] [license|licence][| is it| do you have| does engine have| has it| is this under| applies]?",
            "[is|are] [engine|it|this|you] [free|open source|free software|open|commercial]?",
            "[may|can] I [use|sell|change|copy|share] [it|engine|this] [at work|in my company|for free|freely|in a product|commercially|]?",
            "[how much|what] does [it|engine|this] cost?",
            "[under|by] [what|which] [license|terms|licence] [is it|is engine|may I use it|can I use this|was it published|do you come]?",
        ),
        ("[the|your|its|] [license|licence|price|terms|copyright]", "open source"),
        ("Engine is free software under the Apache-2.0 license.", "It is open source: the license is Apache-2.0."),
    ),
    Topic(
        "private",
        (
            "[do|does|are|is] [you|it|engine|my text|my words|my data] [send|sent|upload|go|store|share|stored|shared|log] [anything|my data|my words|to a server|to the cloud|to someone|over the internet|what I write|what I say|]?",
            "[do you|does it|does engine|do I|must I] need [the internet|a network|internet|to be online|an account|wifi|the net|a connection]?",
            "[is|are] [it|this|you|my data|the chat] [private|safe|secret|secure|local|offline|online]?",
            "[can|does|will] [it|this|you|engine] [work|run] [offline|without internet|without a network|on a plane|with no connection]?",
            "[who|can anybody|can somebody|does anyone] [reads|read|see|sees|hear] [this|what I write|my messages|my words|our chat]?",
            "where [do you run|are you|do you live|does this run|does my data go|does it go]?",
        ),
        ("[privacy|my data|the internet|the network|offline use|the cloud|safety|my privacy|data protection]",),
        (
            "I run on your own machine, offline; nothing you write [leaves it|is sent anywhere].",
            "Everything runs on your own machine, with no network, and nothing you write leaves it.",
        ),
    ),
    Topic(
        "beams",
        (
            f"{HOW} [use|turn on|do|run|switch on|enable|get] [beam search|beams|a beam search|several beams|four beams]?",
            "[which|what] [option|flag] [is for|does|gives|turns on|makes|has] [beam search|beams]?",
            "[is there|do you have|does engine have|can engine do|what is] beam search?",
        ),
        ("[beam search|beams|a search with beams]",),
        (
            '`engine generate MODEL.gguf "Text" --beams 4` searches with four beams.',
            "Add `--beams 4` to `engine generate` for beam search.",
        ),
    ),
    Topic(
        "place",
        (
            f"{HOW} [share|split|spread|put|divide|place|run|distribute] [a|one|the|my] model [over|on|between|across|among|to|onto] [two|several|many|more|different|both] [devices|gpus|cards|backends|machines]?",
            f"{HOW} [put|run|keep|place] [some|half of the|a few|the first] layers on [the gpu|another device|the cpu|opencl]?",
            "[can|does|may|could] [a|one|the] model [use|run on|be on|be shared by|be shared over|be spread over|be put on|be divided over] [two|several|many|more than one] [devices|gpus|cards|backends]?",
        ),
        (
            "[several|two|many] [devices|gpus]",
            "[placement|splitting a model|mixed placement|sharing layers|the layers]",
        ),
        (
            'Yes, with `--place`: for example `--place "layers 0-9: opencl; rest: cpu"` shares the layers out.',
            'Use `--place "layers 0-9: opencl; rest: cpu"`; each layer then runs where you say.',
        ),
    ),
    Topic(
        "seed",
        (
            f"{HOW} [get|have|see|make|repeat|reproduce] [the same|an identical|the very same|a reproducible] [answer|text|tokens|result|output|story][| twice| again| every time| always]?",
            "[why|are|is] [is|] [the answer|your answer|the text|the output|it] [different|always different|random|deterministic|reproducible|the same][| each time| every time]?",
            f"{HOW} [set|give|choose|fix|use] [a|the] [seed|random seed|temperature]?",
        ),
        (
            "[the|] [seed|seeds|randomness|temperature|sampling]",
            "reproducible [text|answers|results]",
            "the same [answer|text]",
        ),
        (
            "Give `--seed 1`, and you get the same [text|tokens|answer] again; `--temperature 0` always takes the likeliest token.",
            "The same `--seed` gives the same [text|tokens|answer]; with `--temperature 0` no seed is needed.",
        ),
    ),
    Topic(
        "trained",
        (
            "[how|where|when|on what|by whom|with what] [were|was] [you|this model|the demo|it] [trained|made|built|taught|created|born|written]?",
            "who [made|trained|built|wrote|created|taught] [you|this|the demo]?",
            "[what|which] [text|texts|data|books|corpus|data set|training data] [did|do] you [learn from|read|train on|see|know]?",
            "[where|how] did you [learn|learn this|learn to talk|learn to write|come from]?",
            "[where|what] [is|was|are] your training [data|text|script|set]?",
        ),
        (
            "your [training|origin|makers|teacher|training data|history|birth]",
            "how you [were made|were trained|learned]",
        ),
        (
            "I was trained by `tools/train_demo.py`, on text that the repository itself makes: small stories and questions about engine.",
            "`tools/train_demo.py` trained me[| on two cores], on stories and questions that the repository makes.",
        ),
    ),
    Topic(
        "size",
        (
            "how [big|large|small|heavy] [are you|is this model|is the demo|is your network|are you really|is your file]?",
            "how many [parameters|weights|layers|numbers|neurons|megabytes] [do you have|have you|are there|are you|has this model|does the demo have|has it|are in you]?",
            "[what is|what's|tell me] your [size|parameter count|number of parameters|number of weights]",
        ),
        ("your [size|parameters|weights|parameter count|layers]", "the [size|parameters] of [the demo|this model]"),
        (
            "I have [about|] one million parameters: a [very|] small model, a demo.",
            "About one million parameters, so I am [tiny|very small] for a language model.",
        ),
    ),
    Topic(
        "architectures",
        (
            "[which|what] [architectures|families|model families|kinds of models|models] [do you|does engine|can engine|can it|are] [support|supported|know|run|read|there]?",
            "[does|can|will] [engine|it|you] [support|run|know|do] [llama|qwen|gemma|mistral|phi3|deepseek|gpt-oss|mixtral|cohere|falcon|olmo] models?",
            "[is|are] [llama|qwen3|gemma 3|mistral|deepseek|gpt-oss|mixtral|falcon|phi3] supported?",
        ),
        ("[supported|the|] [architectures|model families|families]", "supported models", "the architecture"),
        (
            "Llama, Mistral, Mixtral, Qwen, Gemma, Phi, DeepSeek, GPT-OSS and [others|more]; the README lists all.",
            "Engine runs Llama, Qwen, Gemma, Mistral, Phi, DeepSeek, Falcon and [others|more]; see the README.",
        ),
    ),
    Topic(
        "processors",
        (
            "[which|what] [processors|cpus|processor|cpu|cpu types] [do I need|does it need|does it run on|are supported|does engine support|can it use|work]?",
            "[does|will|can] [it|engine|this] [run|work|start] on [arm|an arm cpu|x86|intel|amd|a raspberry pi|apple silicon|an old cpu|my laptop|avx2|avx-512]?",
            "[is|are] [arm|x86|avx-512|avx2|amx|neon|arm cpus] [supported|used|needed|fine]?",
        ),
        (
            "[the|] [processors|cpus|processor|cpu]",
            "[arm|x86|avx-512|avx2|amx|neon|intel|amd]",
            "[arm|intel] [processors|cpus]",
        ),
        (
            "The CPU backend runs on x86-64, with AVX2, AVX-512 or AMX where there is one, and on 64-bit Arm.",
            "Any x86-64 [processor|CPU], best with AVX-512 or AMX, and 64-bit Arm.",
        ),
    ),
    Topic(
        "install",
        (
            f"{HOW} [install|build|set up|compile|update] [it|engine|this][| from source| on another machine| again]?",
            "[what|which] [packages|compiler|python|tools] [do I need|does it need|are needed|is needed]?",
        ),
        ("[the|] [installation|install|building|setup]", "[installing|building] [it|engine]"),
        (
            "With a C++17 compiler and Python 3.11: `pip install .` in the repository.",
            "Run `pip install .` in the repository; it needs Python 3.11 and a C++17 compiler.",
        ),
    ),
    Topic(
        "docs",
        (
            "[where|what] [is|are] [the|your] [documentation|docs|manual|handbook|guide|readme|instructions|help pages]?",
            f"{HOW} [read|find|learn|get|see|know] [more|the manual|documentation|the docs|the options|all commands|more about engine|a guide]?",
            "[which|what] [commands|options|other commands] [are there|do you have|exist|does engine have|can I use]?",
            "[what is|tell me about|explain|what does] engine[| do| for]?",
        ),
        ("[the|] [documentation|docs|manual|guide|readme|commands|handbook]", "engine"),
        (
            "Engine runs large language models on any device. Read README.md and docs/; `engine --help` lists the commands.",
            "See README.md, the folder docs/ and `engine --help`: engine runs large language models on [any|your] device.",
        ),
    ),
)
