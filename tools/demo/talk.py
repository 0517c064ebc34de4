"""Greetings, small talk, and what the demo says to all that it does not know."""

from __future__ import annotations

import random

from .facts import PULL, TOPICS, WRAPPERS
from .spin import spin
from .words import ADJECTIVES, CRAFTS, NAMES, PLACES, THINGS, made_up, name, subject, with_article

OFFER = "[Ask me about engine, or for a story|I tell stories and answer questions about engine|You could ask me for a story]"
FIXED = (
    (
        "[hello|hi|hey|good morning|good evening|good day|hello there|hi there|hey there|greetings|hallo|howdy|yo|hello you|hiya|hello world][|!|.| demo| engine| friend]",
        f"[Hello!|Hi!|Hello there!|Good day!] I am the [built-in|small] demo of engine. {OFFER}.",
    ),
    (
        "[how are you|how do you do|how is it going|how are things|are you well|how do you feel|what's up|everything fine][| today| now]?",
        f"[I am fine|Very well|All is well], thank you. {OFFER}.",
    ),
    (
        "[thanks|thank you|thank you very much|many thanks|great, thanks|thx|cheers][|!|.| a lot]",
        "[You are welcome|Gladly|My pleasure][.|!]",
    ),
    (
        "[bye|goodbye|good bye|see you|good night|farewell|I must go|until tomorrow|so long][|!|.]",
        "Goodbye! Type /exit to leave.",
    ),
    (
        "[ok|okay|fine|good|nice|great|cool|wow|I see|yes|aha|right|interesting|lovely][|!|.]",
        f"[Good|Fine|I am glad]. {OFFER}.",
    ),
    (
        "[no|nope|wrong|that is wrong|that's not right|bad|not good|nonsense|that makes no sense][|!|.]",
        f"I am sorry; I am only a small demo. {PULL}",
    ),
    (
        "[tell me a joke|a joke please|do you know a joke|make me laugh|say something funny|joke]",
        "[Why did the model cross the road? It was the likeliest token.|I know a joke about a queue, but you would have to wait.|Two tokens meet. Says one: you look familiar. Says the other: we have the same embedding.]",
    ),
    (
        "[are you there|are you awake|can you hear me|do you understand me|test|testing|ping|anyone here]?",
        f"I am here. {OFFER}.",
    ),
    (
        "[I am|I feel|today I am] [sad|tired|lonely|unhappy|not well]",
        "I am sorry. Shall I tell you a story? Name an animal.",
    ),
    ("[I am|I feel|today I am] [happy|glad|well|fine|great]", f"That is good to hear. {OFFER}."),
    ("[you are|this is] [nice|great|funny|good|lovely|cute|clever]", "Thank you! I am only a small demo."),
)
UNKNOWN = (
    "[what is|where is] [the capital of|the weather in|the way to|the king of|the longest river of] NAME?",
    "[who|when] [was|is|invented|wrote|discovered|died|won] [NAME|the THING|A-THING|the ADJ PLACE|the war|the world cup|the moon]?",
    "how [do I|to|can I] [cook|repair|clean|paint|sell|grow|feed|draw|buy] [A-THING|A-NOUN|the THING|my ADJ THING]?",
    "[what is|calculate|how much is|compute] NUMBER [plus|minus|times|+|*|-|divided by] NUMBER?",
    "[write|can you write|make|compose] [a poem|an email|an essay|a song|a letter|a program|a function|code|a sonnet|html|a speech] [about|for|on|to] [A-NOUN|A-THING|NAME|the PLACE|my boss]",
    "[translate|say|what is] [the THING|good morning|A-NOUN|NAME] [in|to|into] [french|german|spanish|latin|japanese|chinese]",
    "why [is|are|do] [the sky|the sea|THINGs|people|cats|the PLACE|NOUNs] [blue|ADJ|CRAFT|so ADJ|green]?",
    "[summarize|explain|correct|translate|improve] this [text|letter|sentence|article|poem]",
    "[what is|what's|define|explain] [A-NOUN|the THING|quantum physics|gravity|love|the meaning of life|A-THING|photosynthesis|a black hole]?",
    "[what time is it|what day is today|how old are you|what is the news|what is the date|who is the president|how tall are you]?",
    "how many [THINGs|NOUNs|people|days] [are|live] in [A-PLACE|NAME|a year|the PLACE]?",
    "[should|can|may] I [eat|buy|sell|marry|CRAFT with] [A-THING|A-NOUN|NAME]?",
)
UNKNOWN_ANSWERS = (
    f"I do not know; I am only a small demo. {PULL}",
    f"That is beyond a demo of my size. {PULL}",
    f"A demo like me cannot do that. {PULL}",
)
POLITE_BEFORE = (
    "please",
    "hey,",
    "hi,",
    "hello,",
    "ok,",
    "so,",
    "well,",
    "and",
    "but",
    "now",
    "sorry,",
    "excuse me,",
    "tell me,",
    "quick question:",
    "um,",
)
POLITE_AFTER = (
    "please",
    "thanks",
    "thank you",
    "now",
    "then",
    "in engine",
    "with engine",
    "here",
    "today",
    "my friend",
)


def topic_pair(rng: random.Random) -> tuple[str, str]:
    """A question about the engine and its answer; the topics that people ask for first come more often."""
    topic = rng.choice((*TOPICS, *TOPICS[:3], TOPICS[2]))
    if rng.random() < 0.3:
        question = spin(rng.choice(WRAPPERS).replace("SUBJECT", rng.choice(topic.subjects)), rng)
    else:
        question = spin(rng.choice(topic.questions), rng)
    return roughened(question, rng), spin(rng.choice(topic.answers), rng)


def fixed_pair(rng: random.Random) -> tuple[str, str]:
    question, answer = rng.choice((FIXED[0], *FIXED))
    return roughened(spin(question, rng), rng), spin(answer, rng)


def unknown_pair(rng: random.Random) -> tuple[str, str]:
    """A question that only a real model could answer, and the way to get one."""
    question = spin(rng.choice(UNKNOWN), rng)
    for kind, word in (
        ("NAME", name(rng)),
        ("NUMBER", str(rng.randint(0, 999))),
        ("THING", rng.choice(THINGS)),
        ("PLACE", rng.choice(PLACES)),
        ("NOUN", made_up(rng)),
        ("ADJ", rng.choice(ADJECTIVES)),
        ("CRAFT", rng.choice(CRAFTS)),
    ):
        question = question.replace("A-" + kind, with_article(word)).replace(kind, word)
    return roughened(question, rng), spin(rng.choice(UNKNOWN_ANSWERS), rng)


def copying_pair(rng: random.Random) -> tuple[str, str]:
    """Small talk whose answer takes up a word of the message."""
    noun = subject(rng)
    one = with_article(noun)
    called = name(rng)
    kind = rng.randrange(4)
    if kind == 0:
        question = spin(f"[my name is|I am|I'm|call me|they call me|this is] {called}", rng)
        return question, spin(f"[Nice to meet you|Hello|Welcome], {called}! {OFFER}.", rng)
    if kind == 1:
        question = spin(f"[do you like|have you seen|do you know|have you ever met|would you like] {one}?", rng)
        return question, spin(f"I have never [met|seen] {one}, but I can tell you a story about {one}.", rng)
    if kind == 2:
        question = spin(f"[I like|I love|I saw|I have|my friend has|today I met|I dreamed of] {one}", rng)
        return question, spin(f"[How nice|How lovely|Really]! Shall I tell you a story about {one}?", rng)
    words = " ".join(
        rng.choice((made_up(rng), rng.choice(THINGS), rng.choice(NAMES))) for _ in range(rng.randint(1, 8))
    )
    return spin("[repeat|repeat after me|say|copy|echo][:|] ", rng) + " " + words, words


def roughened(question: str, rng: random.Random, slips: bool = True) -> str:
    """The question as people type it: politeness, small letters, missing marks, and with ``slips`` now and then one."""
    if rng.random() < 0.2:
        question = f"{rng.choice(POLITE_BEFORE)} {question}"
    if rng.random() < 0.15:
        end = "?" if question.endswith("?") else ""
        question = f"{question.rstrip('?!. ')} {rng.choice(POLITE_AFTER)}{end}"
    if rng.random() < 0.4:
        question = question.rstrip("?!.") or question
    if rng.random() < 0.06:
        question += rng.choice("?!.")
    style = rng.random()
    if style < 0.5:
        question = question.lower()
    elif style < 0.7:
        question = question[0].upper() + question[1:]
    if slips and rng.random() < 0.08:
        at = rng.randrange(len(question))
        swapped = question[at : at + 2][::-1]
        question = question[:at] + rng.choice(("", swapped, question[at] * 2)) + question[at + len(swapped) :]
    return question
