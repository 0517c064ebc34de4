"""What callers in Python give wrongly is told in a sentence, ends no other request, and leaves the engine as it was."""

from __future__ import annotations

import asyncio
import gc
import queue
import re
import threading
import time
from collections.abc import Mapping

import numpy as np
import pytest

from engine import LLM, AsyncLLM, BeamSearchParams, SamplingParams, StructuredOutputs
from engine.errors import AdmissionError, ConfigError, EngineError, RequestError, UsageError

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SMALL = {"backend": "reference", "kv_cache_tokens": 1024, "kv_cache_dtype": "f32"}


@pytest.fixture(scope="module")
def llm(llama):
    with LLM(llama, **SMALL, policy="priority") as opened:
        yield opened


@pytest.fixture(autouse=True)
def sound(llm):
    """Whatever a test did: the next request gets its tokens, and nothing is left of the one before."""
    yield
    assert len(llm.generate([1, 5], GREEDY)[0].outputs[0].token_ids) == 4
    stats = llm.engine.scheduler_stats()
    assert (stats.waiting, stats.running) == (0, 0) and llm.engine.health().restarts == 0


@pytest.mark.parametrize("priority", [[1, None], [1, "x"], [1, 2.5], [True, 1], [1, 1 << 40], [1], [1, 2, 3], 1, "12"])
def test_priorities(llm, priority):
    with pytest.raises(RequestError, match="priorit"):
        llm.generate([[1, 5], [1, 6]], GREEDY, priority=priority)


def test_integers_of_numpy_are_integers(llm, llama):
    assert len(llm.generate([[1, 5], [1, 6]], GREEDY, priority=np.array([1, 2]))) == 2
    assert llm.embed([1, 5], dimensions=np.int64(8)).shape == (1, 8)
    with LLM(llama, **SMALL, max_num_seqs=np.int32(3), decode_slowdown=np.float32(2)) as opened:
        assert type(opened.loaded.config.max_num_seqs) is int


@pytest.mark.parametrize("params", [None, {}, "greedy"])
def test_parameters_of_another_kind(llm, params):
    with pytest.raises(RequestError, match="parameters are of type"):
        list(llm.stream([1, 5], params))
    asked = AsyncLLM(llm.engine)

    async def ask(call):
        return await call

    with pytest.raises(RequestError, match="parameters are of type"):
        asyncio.run(ask(asked.beam_search([1, 5], params)))
    with pytest.raises(RequestError, match="must be BeamSearchParams"):
        asyncio.run(ask(asked.beam_search([1, 5], GREEDY)))
    with pytest.raises(RequestError, match=r"await AsyncLLM\.load"):
        AsyncLLM("model.gguf")


def test_what_is_done_to_parameters_afterwards_changes_nothing(llm):
    bias, options = {5: 1.0}, {}
    params = SamplingParams(logit_bias=bias, logits_processors=options, max_tokens=2)
    bias[6], bias[7], options["none"] = "junk", float("nan"), {}
    assert params.logit_bias == {5: 1.0} and params.logits_processors == {}
    assert llm.generate([1, 5], params)[0].outputs[0].finish_reason is not None


@pytest.mark.parametrize("wrong", [{"dimensions": 1.5}, {"dimensions": True}, {"dimensions": "8"}, {"normalize": "no"}])
def test_embeddings(llm, wrong):
    (name,) = wrong
    with pytest.raises(RequestError, match=name):
        llm.embed([1, 5, 6], **wrong)


async def ended(llm, prompt, request_id):
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    outputs = [output async for output in AsyncLLM(llm.engine).generate(prompt, params, request_id=request_id)]
    return outputs[-1].outputs[0].finish_reason


async def begun(llm, request_id):
    """The task of a request that runs."""
    task = asyncio.create_task(ended(llm, [1, 5], request_id))
    while not llm.engine.scheduler_stats().running:
        await asyncio.sleep(0.001)
    return task


def test_an_id_in_use_ends_nobody_else(llm):
    async def main():
        first = await begun(llm, "job")
        with pytest.raises(RequestError, match="in use"):
            await ended(llm, [1, 6], "job")
        with pytest.raises(RequestError, match="must be a text"):
            await ended(llm, [1, 6], ["job"])
        assert await first == "length"

    asyncio.run(main())


def test_leaving_before_an_id_in_use_is_refused_ends_nobody_else(llm, monkeypatch):
    asked, held, complaints = asyncio.Event(), threading.Event(), []
    admit_soon = llm.engine.admit_soon

    def admit_when_held(request, done):
        llm.engine._core._commands.put(lambda: held.wait(10))
        admit_soon(request, done)
        asked.set()

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        first = await begun(llm, "job")
        monkeypatch.setattr(llm.engine, "admit_soon", admit_when_held)
        second = asyncio.create_task(ended(llm, [1, 6], "job"))
        await asked.wait()
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        held.set()
        assert await first == "length"
        gc.collect()

    asyncio.run(main())
    assert not complaints, "an exception that nobody took"


def test_leaving_many_requests_takes_no_step_each(llm):
    """An exception in ``on_output`` ends all of them in one turn of the loop."""

    def leave(output):
        raise KeyboardInterrupt

    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    before = llm.engine.health().steps
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 5 + n] for n in range(120)], params, on_output=leave)
    assert llm.engine.health().steps - before < 30


@pytest.mark.clock
def test_thousands_of_prompts_are_admitted_at_once(llm):
    """32 times as many take some 45 times as long; with a look at all others for each it is far more than 120."""

    def seconds(count: int) -> float:
        prompts = [[1, 5 + n % 300] for n in range(count)]
        requests = [llm.engine.request(None, prompt, GREEDY, lambda output: None) for prompt in prompts]
        start = time.monotonic()
        llm.engine.admit(*requests)
        taken = time.monotonic() - start
        llm.engine.abort(*(request.request_id for request in requests))
        return taken

    few = min(seconds(250) for _ in range(5))
    assert min(seconds(8000) for _ in range(3)) < 120 * few


class Leaving:
    def __init__(self, vocab_size):
        pass

    def __call__(self, prompt_ids, output_ids):
        raise SystemExit(3)


class Odd(Leaving):
    def __call__(self, prompt_ids, output_ids):
        return {5.7: 1.0}


@pytest.mark.parametrize(("processor", "said"), [(Leaving, "SystemExit"), (Odd, r"5\.7 in the place of a token id")])
def test_logits_processors_that_leave_or_name_no_token(llm, monkeypatch, processor, said):
    class Point:
        name = "odd"

        @staticmethod
        def load():
            return processor

    monkeypatch.setattr("engine.sampling.processors.entry_points", lambda group: [Point])
    output = llm.generate([1, 5], SamplingParams(max_tokens=3, logits_processors={"odd": {}}))[0].outputs[0]
    assert output.finish_reason == "error"
    assert re.search(said, str(output.stop_reason))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"decode_slowdown": float("inf")}, "decode_slowdown"),
        ({"watchdog_s": 0}, "watchdog_s"),
        ({"watchdog_s": float("nan")}, "watchdog_s"),
        ({"watchdog_s": "x"}, "watchdog_s is 'x'; it must be a number"),
        ({"max_num_seqs": "4"}, "max_num_seqs is '4'; it must be an integer"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_model_len": 10.5}, "max_model_len is 10.5; it must be an integer or None"),
        ({"strict": "no"}, "strict is 'no'; it must be true or false"),
        ({"without": "attention"}, "without"),
        ({"without": (5,)}, "tuple of texts"),
        ({"speculate": 1.5}, "speculate"),
        ({"threads": 1.5}, "threads"),
        ({"place": 5}, "place"),
    ],
)
def test_settings(llama, settings, said):
    with pytest.raises(ConfigError, match=said):
        LLM(llama, **(SMALL | settings))


@pytest.mark.parametrize("model", [None, 5, b"/x", ""])
def test_what_is_no_model(model):
    with pytest.raises(UsageError, match="model"):
        LLM(model)


@pytest.mark.parametrize("place", ["rest: reference", "layers 0-0: reference; rest: reference", "rest: cpu"])
def test_places_that_name_one_device(llama, llm, place):
    with LLM(llama, place=place, kv_cache_tokens=512, kv_cache_dtype="f32") as placed:
        got = placed.generate([1, 5, 6], GREEDY)[0].outputs[0].token_ids
    assert got == llm.generate([1, 5, 6], GREEDY)[0].outputs[0].token_ids


@pytest.mark.parametrize("prompt", [None, 5, b"abc", {}, np.array(5), [True, False], [b"abc"], [None]])
def test_prompts(llm, prompt):
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompt, GREEDY)


def test_tensors_are_prompts(llm):
    torch = pytest.importorskip("torch")
    assert llm.generate(torch.tensor([1, 5, 6]), GREEDY)[0].prompt_token_ids == (1, 5, 6)
    several = llm.generate(torch.tensor([[1, 5], [1, 6]]), GREEDY)
    assert [output.prompt_token_ids for output in several] == [(1, 5), (1, 6)]


def test_an_error_says_of_which_prompt_it_is(llm):
    room = llm.loaded.max_model_len
    for wrong, kind, said in (
        ([5] * (room + 1), AdmissionError, "tokens"),
        ([1, 1 << 20], RequestError, "token id"),
        ([1, None], RequestError, "in the place of a token id"),
    ):
        with pytest.raises(kind, match=rf"^Prompt 2 of 3: .*{said}"):
            llm.generate([[1, 5], wrong, [1, 6]], GREEDY)
        with pytest.raises(kind, match=r"^(?!Prompt 1 of)"):
            llm.generate([wrong], GREEDY)
        with pytest.raises(kind, match=rf"^Prompt 2 of 2: .*{said}"):
            llm.embed([[1, 5], wrong])


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_names_the_parameter(llm, count):
    with pytest.raises(RequestError, match="does not exist") as caught:
        llm.generate([[1, 5]] * count, SamplingParams(stop_token_ids=[1 << 20]))
    assert caught.value.field == "stop_token_ids"


def test_more_tokens_than_there_is_room_for(llm):
    room = llm.loaded.max_model_len
    with pytest.raises(AdmissionError, match=r"100 more are wanted at least"):
        llm.generate([[5] * (room - 20)], SamplingParams(max_tokens=None, min_tokens=100))
    with pytest.raises(AdmissionError, match=rf"has {room} tokens, and 1 more"):
        llm.generate([[5] * room], SamplingParams(max_tokens=None))


def test_a_stop_token_is_in_the_text_where_stops_are(llm):
    plain = llm.generate([1, 5], GREEDY)[0].outputs[0]
    end = plain.token_ids[2]
    for include in (False, True):
        params = SamplingParams(temperature=0.0, stop_token_ids=[end], include_stop_str_in_output=include)
        output = llm.generate([1, 5], params)[0].outputs[0]
        count = output.token_ids.index(end) + include
        pieces = llm.get_tokenizer().detokenizer()
        assert output.text == "".join(map(pieces.push, output.token_ids[:count])) + pieces.flush()


def test_too_many_stop_strings():
    with pytest.raises(RequestError, match="at most 1024"):
        SamplingParams(stop=[f"s{n}" for n in range(2000)])


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams])
def test_stop_strings_that_are_too_long(kind):
    kind(stop=["a" * 1024] * 8)
    with pytest.raises(RequestError, match="A stop string has 1025 characters; it must have 1024 of them at most"):
        kind(stop=["a", "b" * 1025])
    with pytest.raises(RequestError, match="have 8193 characters; together they must have 8192 at most"):
        kind(stop=[*["a" * 1024] * 8, "b"])


def test_choices_of_any_number_and_kind(llm):
    for choices in ([f"w{n}" for n in range(3000)], ["\x7f"], ["a", "ab"], ["a\nb\"'\\", "[x]*"], ["\U0001f642"]):
        params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputs(choice=choices))
        assert llm.generate([1, 5], params)[0].outputs[0].text in choices


def test_closing_in_the_middle_of_a_stream(llama):
    opened = LLM(llama, **SMALL)
    stream = opened.stream([1, 5], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    opened.close()
    stream.close()
    with pytest.raises(EngineError):
        opened.generate([1, 5], GREEDY)


def test_what_is_handed_in_while_it_closes_ends_as_well(llama):
    opened = LLM(llama, **SMALL)
    core, told, closing = opened.engine._core, queue.SimpleQueue(), threading.Event()
    core._commands.put(closing.wait)
    request = opened.engine.request(None, (1, 5), GREEDY, told.put)
    opened.engine.admit_soon(request, lambda _: None)
    core._stopping = True
    closing.set()
    assert told.get(timeout=1).outputs[0].finish_reason == "abort"
    opened.close()
    health = opened.engine.health()
    assert (health.waiting, health.running, health.stalled_s) == (0, 0, 0)


def test_chats(chatting):
    messages = [{"role": "user", "content": "hi"}]
    for wrong in ({"tools": [{}]}, {"enable_thinkin": False}, {"chat_template": "x"}):
        with pytest.raises(RequestError, match=f"does not read {next(iter(wrong))}"):
            chatting.chat(messages, GREEDY, **wrong)
    nothing = [{"role": "user", "content": None}]
    for odd in (None, 5, "hi", {"role": "user", "content": "x"}, [], [1], [messages, None], nothing):
        with pytest.raises(RequestError, match=r"conversation|message"):
            chatting.chat(odd, GREEDY)
    for odd in (None, 5, "hi", messages[0], [], [1]):
        with pytest.raises(RequestError, match=r"is a list of messages, and not|A message is a mapping"):
            chatting.render(odd)
    with pytest.raises(RequestError, match=r"is a list of messages, and not \[\]"):
        chatting.chat([messages, []], GREEDY)
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert chatting.chat(parts, GREEDY)[0].prompt == chatting.chat(messages, GREEDY, tools=None)[0].prompt
    assert chatting.render([{**parts[0], "content": tuple(parts[0]["content"])}]) == chatting.render(messages)
    image: Mapping[str, object] = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(RequestError, match="text alone"):
        chatting.chat([image], GREEDY)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    import tiny_models

    with LLM(tiny_models.write_talker(tmp_path_factory.mktemp("talker")), **SMALL, max_model_len=512) as opened:
        yield opened


def test_threads_that_fail_beside_each_other(llm):
    """Refusals in one thread take nothing from the requests of another."""
    failed = []

    def refuse():
        for _ in range(50):
            try:
                llm.generate([[1, 5], [1] * 10_000], GREEDY)
            except EngineError as error:
                failed.append(error)

    thread = threading.Thread(target=refuse)
    thread.start()
    while thread.is_alive():
        assert len(llm.generate([1, 7], GREEDY)[0].outputs[0].token_ids) == 4
    assert len(failed) == 50
    with pytest.raises(RequestError):
        llm.beam_search([1, 5], GREEDY)
    assert llm.beam_search([1, 5], BeamSearchParams(beam_width=2, max_tokens=3))[0].outputs
