"""What a request asks for is what it gets: lengths, ends, streams, samples."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from itertools import pairwise

import gguf
import numpy as np
import pytest
import tiny_models
import tokenizers

from engine import LLM, AsyncLLM, SamplingParams
from engine.errors import AdmissionError, RequestError, TokenizerError

PROMPT = "The quick brown"
IDS = (1, 40, 50, 60, 70)


def greedy(**params):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | params))


def one(llm, params, prompt=PROMPT):
    return llm.generate(prompt, params)[0].outputs[0]


def token(llm, text):
    found = llm.get_tokenizer().token_id(text)
    assert found is not None
    return found


def forced(*tokens):
    """A bias so great that only these tokens come."""
    return {t: 1000.0 for t in tokens}


# -- prompts and outputs ---------------------------------------------------------------------------------------------


def test_prompts_of_any_form(llm):
    ids = tuple(llm.get_tokenizer().encode(PROMPT, add_special=True))
    by_text, by_ids, by_array = (llm.generate(p, greedy()) for p in (PROMPT, list(ids), np.array(ids)))
    assert by_text[0].prompt == PROMPT and by_ids[0].prompt is None
    assert by_text[0].prompt_token_ids == by_ids[0].prompt_token_ids == by_array[0].prompt_token_ids == ids
    assert by_text[0].outputs == by_ids[0].outputs == by_array[0].outputs
    several = llm.generate([PROMPT, list(ids), "Once"], greedy())
    assert [out.outputs for out in several[:2]] == [by_text[0].outputs] * 2
    assert llm.generate([], greedy()) == []


def test_control_tokens_are_read_in_a_prompt_and_none_is_put_before_it_twice(llm):
    plain, begun, within = (llm.generate(text, greedy())[0].prompt_token_ids for text in ("a", "<s>a", "a</s>b"))
    assert begun.count(1) == 1 and begun[0] == plain[0] == within[0] == 1
    assert within.count(2) == 1 and within[: len(plain)] == plain
    assert llm.generate({"prompt": "<s>"}, greedy())[0].prompt_token_ids == (1,)


def test_outputs_come_in_the_order_of_the_prompts_each_with_its_parameters(llm):
    prompts = [[1, 5], [1, 6], [1, 7]]
    params = [greedy(max_tokens=n) for n in (9, 1, 4)]
    outputs = llm.generate(prompts, params)
    assert [out.prompt_token_ids for out in outputs] == [(1, 5), (1, 6), (1, 7)]
    assert [len(out.outputs[0].token_ids) for out in outputs] == [9, 1, 4]
    assert all(out.finished and out.outputs[0].finish_reason == "length" for out in outputs)
    with pytest.raises(RequestError, match="given 2 times for 3 prompts"):
        llm.generate(prompts, params[:2])


def test_the_text_is_that_of_the_tokens(llm):
    out = one(llm, greedy(max_tokens=40))
    pieces = llm.get_tokenizer().detokenizer()
    assert out.text == "".join(map(pieces.push, out.token_ids)), "a character that max_tokens cuts is left out"


def test_metrics(llm):
    before = time.monotonic()
    metrics = llm.generate(PROMPT, greedy())[0].metrics
    assert before <= metrics.arrival <= metrics.first_token <= metrics.last_token <= time.monotonic()


# -- how it ends -----------------------------------------------------------------------------------------------------


def test_max_tokens_none_fills_the_context(open_llm, backend):
    llm = open_llm(backend, max_model_len=64)
    out = one(llm, greedy(max_tokens=None), list(range(1, 41)))
    assert (len(out.token_ids), out.finish_reason) == (24, "length")


def test_end_of_sequence_ends_it(llm):
    out = one(llm, greedy(ignore_eos=False, logit_bias=forced(2)))
    assert (out.token_ids, out.finish_reason, out.stop_reason, out.text) == ((2,), "stop", 2, "")
    out = one(llm, greedy(logit_bias=forced(2)))
    assert out.token_ids == (2,) * 12 and out.finish_reason == "length"


def test_stop_token_ids(llm):
    whole = one(llm, greedy()).token_ids
    stop = next(t for t in whole[3:] if t not in whole[:3])
    at = whole.index(stop)
    out = one(llm, greedy(stop_token_ids=[stop]))
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (whole[: at + 1], "stop", stop)
    assert out.text == llm.get_tokenizer().decode(whole[:at]), "the stop token's own text is not shown"


def test_min_tokens_bans_the_ends_before(llm):
    stop = token(llm, "z")
    ends = forced(2, stop)
    for least in (0, 1, 5):
        out = one(llm, greedy(ignore_eos=False, stop_token_ids=[stop], logit_bias=ends, min_tokens=least))
        assert out.finish_reason == "stop" and len(out.token_ids) == least + 1
        assert not {2, stop} & set(out.token_ids[:-1])


@pytest.mark.parametrize("beyond", [tiny_models.VOCAB, 40_000_000, 1 << 33])
def test_an_end_that_the_model_does_not_have_is_none(llama, tmp_path, backend, beyond):
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.CONFIG | {"eos_token_id": [2, beyond]}))
    with LLM(tmp_path, backend=backend, threads=2, kv_cache_tokens=512) as llm:
        assert llm.engine.eos_ids() == {2}
        out = one(llm, greedy(ignore_eos=False, min_tokens=2, logit_bias=forced(2)))
        assert (len(out.token_ids), out.finish_reason, out.stop_reason) == (3, "stop", 2)
        assert 2 not in out.token_ids[:2] and llm.engine.health().restarts == 0


def test_a_gguf_whose_end_is_beyond_its_vocabulary(llama, tmp_path, backend, monkeypatch):
    """It gives no tokenizer, and its metadata names the end none the less."""
    add = gguf.GGUFWriter.add_eos_token_id
    monkeypatch.setattr(gguf.GGUFWriter, "add_eos_token_id", lambda writer, _: add(writer, 40_000_000))
    path = tiny_models.to_gguf(llama, tmp_path / "model.gguf")
    with LLM(path, backend=backend, threads=2, kv_cache_tokens=512) as llm:
        assert not llm.engine.has_tokenizer and llm.engine.eos_ids() == set()
        assert len(one(llm, greedy(ignore_eos=False, min_tokens=1), list(IDS)).token_ids) == 12


def test_stop_strings_across_the_borders_of_tokens(llm):
    t = token(llm, "Ġt")
    plain = one(llm, greedy(logit_bias=forced(t)))
    assert plain.text == " t" * 12
    out = one(llm, greedy(logit_bias=forced(t), stop=["nothing", "t t t"]))
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == (" ", (t,) * 3, "stop", "t t t")
    out = one(llm, greedy(logit_bias=forced(t), stop="t t", include_stop_str_in_output=True))
    assert out.text == " t t"
    out = one(llm, greedy(logit_bias=forced(t), stop="t t", min_tokens=6))
    assert len(out.token_ids) == 7


# -- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_grows_to_the_whole(llm):
    whole = llm.generate(PROMPT, greedy(max_tokens=30))[0]
    outputs = list(llm.stream(PROMPT, greedy(max_tokens=30)))
    assert [len(out.outputs[0].token_ids) for out in outputs] == list(range(1, 31))
    assert [out.finished for out in outputs] == [False] * 29 + [True]
    for earlier, later in pairwise(outputs):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)
    assert outputs[-1].outputs == whole.outputs


def test_generate_shows_every_output_on_the_way(llm):
    seen = []
    outputs = llm.generate([[1, 8], [1, 9]], greedy(max_tokens=5), on_output=seen.append)
    assert len(seen) == 10
    assert [out for out in seen if out.finished and out.request_id == outputs[0].request_id] == [outputs[0]]


def test_a_stream_tells_how_far_the_prompt_has_been_read(llama, backend, slowly, monkeypatch):
    monkeypatch.setattr("engine.runtime.llm._READING_S", 0.002)
    read = []
    settings = {"threads": 2, "kv_cache_tokens": 512, "max_num_seqs": 8, "max_num_batched_tokens": 16}
    with LLM(llama, backend=backend, **settings) as llm:
        prompt = [1, *range(20, 120)] * 2
        for _ in llm.stream(prompt, greedy(), reading=lambda done, total: read.append((done, total))):
            count = len(read)  # it has ended by the first output
        assert count == len(read)
    assert {total for _, total in read} == {len(prompt)}
    done = [each for each, _ in read]
    assert done == sorted(done) and len(set(done)) > 3 and 0 < done[-1] < len(prompt)
    assert all(each % 16 == 0 for each in done)


def test_leaving_a_stream_aborts_the_request(llm):
    stream = llm.stream(PROMPT, greedy(max_tokens=200))
    next(stream)
    stream.close()
    assert llm.engine._core.scheduler.stats().running == 0


def test_an_async_engine(llama, backend, slowly):
    async def main():
        llm = await AsyncLLM.load(llama, backend=backend, threads=2, kv_cache_dtype="f32", kv_cache_tokens=1024)

        async def collect(prompt, n):
            return [out async for out in llm.generate(prompt, greedy(max_tokens=n))]

        many = await asyncio.gather(*(collect([1, 10 + i], 5 + i) for i in range(6)))
        # A reader that comes late finds the latest output alone.
        counts = [[len(out.outputs[0].token_ids) for out in outs] for outs in many]
        assert all(seen == sorted(set(seen)) for seen in counts)
        assert [seen[-1] for seen in counts] == [5, 6, 7, 8, 9, 10]
        assert all(outs[-1].finished for outs in many)

        first = await anext(aiter(llm.generate(PROMPT, greedy(max_tokens=200), request_id="mine")))
        assert first.request_id == "mine"
        begun = asyncio.Event()

        async def watch():
            async for _ in llm.generate(PROMPT, greedy(max_tokens=200)):
                begun.set()

        task = asyncio.create_task(watch())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        outs = []
        async for out in llm.generate(PROMPT, greedy(max_tokens=200), request_id="other"):
            outs.append(out)
            if len(outs) == 3:
                await llm.abort("other")
        assert outs[-1].outputs[0].finish_reason == "abort"
        assert llm.health().alive
        assert (llm.health().waiting, llm.health().running) == (0, 0), "every abort has taken effect"
        await llm.close()
        return many[0][-1].outputs[0].token_ids

    tokens = asyncio.run(main())
    with LLM(llama, backend=backend, threads=2, kv_cache_dtype="f32", kv_cache_tokens=1024) as llm:
        assert llm.generate([1, 10], greedy(max_tokens=5))[0].outputs[0].token_ids == tokens


def test_two_requests_of_one_id(llama, slowly):
    async def main():
        llm = await AsyncLLM.load(llama, backend="reference", kv_cache_tokens=1024)
        stream = llm.generate(PROMPT, greedy(max_tokens=100), request_id="same")
        await anext(stream)
        with pytest.raises(RequestError, match="'same' is in use"):
            await anext(llm.generate(PROMPT, greedy(), request_id="same"))
        await anext(stream)
        await stream.aclose()
        await anext(llm.generate(PROMPT, greedy(max_tokens=1), request_id="same"))
        await llm.close()

    asyncio.run(main())


# -- parallel samples ------------------------------------------------------------------------------------------------


def test_samples_differ_and_come_again_with_the_seed(llm):
    params = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True, "n": 4}
    first, again = (llm.generate(PROMPT, SamplingParams(**params, seed=11))[0].outputs for _ in range(2))
    other = llm.generate(PROMPT, SamplingParams(**params, seed=12))[0].outputs
    assert [out.index for out in first] == [0, 1, 2, 3]
    assert len({out.token_ids for out in first}) == 4
    assert [out.token_ids for out in first] == [out.token_ids for out in again]
    assert {out.token_ids for out in first}.isdisjoint(out.token_ids for out in other)


def test_branch_zero_is_the_single_sample(llm):
    params = {"temperature": 0.9, "max_tokens": 16, "seed": 5, "ignore_eos": True}
    assert one(llm, SamplingParams(**params)).token_ids == one(llm, SamplingParams(**params, n=3)).token_ids


def test_without_a_seed_requests_differ(llm):
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    assert one(llm, params).token_ids != one(llm, params).token_ids


@pytest.mark.parametrize("prompt", [[7], [1, 7, 9], list(range(3, 20)), list(range(3, 35))])
def test_greedy_samples_are_all_the_same(llm, prompt):
    """Whatever part of a block the branches share."""
    outputs = llm.generate(prompt, greedy(n=5, max_tokens=20))[0].outputs
    assert {out.token_ids for out in outputs} == {one(llm, greedy(max_tokens=20), prompt).token_ids}


def test_more_samples_than_slots(open_llm, backend):
    llm = open_llm(backend, max_num_seqs=3)
    params = {"temperature": 1.0, "max_tokens": 6, "seed": 3, "ignore_eos": True, "n": 8}
    few = llm.generate(PROMPT, SamplingParams(**params))[0].outputs
    many = open_llm(backend).generate(PROMPT, SamplingParams(**params))[0].outputs
    assert [out.token_ids for out in few] == [out.token_ids for out in many]


def test_samples_that_wait_for_a_slot_do_not_count_the_prompt_as_cached(open_llm, backend):
    llm = open_llm(backend, max_num_seqs=3)
    llm.engine._core.scheduler.allocator.forget()
    first, again = (llm.generate(list(range(3, 60)), greedy(n=8))[0].num_cached_tokens for _ in range(2))
    assert (first, again) == (0, 48)


def test_samples_end_each_by_itself(llm):
    stop = [token(llm, c) for c in "abcdefghijklmnopqrstuvwxyz"] + list(range(200, 260))
    params = SamplingParams(temperature=1.5, max_tokens=30, seed=1, n=6, stop_token_ids=stop)
    outputs = llm.generate(PROMPT, params)[0].outputs
    assert len({len(out.token_ids) for out in outputs}) > 1
    for out in outputs:
        assert not set(stop) & set(out.token_ids[:-1])
        assert (out.finish_reason == "stop") == (out.token_ids[-1] in {*stop, 2})


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_too_long(llm):
    with pytest.raises(AdmissionError, match="256") as caught:
        llm.generate([IDS, list(range(1, 251))], greedy(max_tokens=12))
    assert "\n" not in str(caught.value) and "shorten the prompt or lower max_tokens" in str(caught.value)
    with pytest.raises(AdmissionError, match="256"):
        llm.generate([[3] * 256], greedy(max_tokens=None))
    assert len(one(llm, greedy(max_tokens=None), [3] * 255).token_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([[]], {}, AdmissionError, "no tokens"),
        ([1, tiny_models.VOCAB], {}, RequestError, "320.*0 to 319"),
        ([1, -1], {}, RequestError, "-1.*0 to 319"),
        ([1, 2], {"stop_token_ids": [320]}, RequestError, "320.*0 to 319"),
        ([1, 2], {"logit_bias": {-4: 1.0}}, RequestError, "-4.*0 to 319"),
        ("lone \ud800 surrogate", {}, TokenizerError, "surrogate"),
    ],
)
def test_requests_that_cannot_be_served(llm, prompt, params, error, words):
    with pytest.raises(error, match=words):
        llm.generate(prompt, greedy(**params))
    assert len(one(llm, greedy()).token_ids) == 12


def test_a_text_with_a_token_that_the_model_has_no_row_for(llama, tmp_path):
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(llama / "tokenizer.json"))
    spare = [f"<spare {n}>" for n in range(tiny_models.VOCAB - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([*spare, "[PAD]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = "token id 320 does not exist; .* from 0 to 319"
    with LLM(tmp_path, backend="reference", kv_cache_tokens=512) as llm:
        with pytest.raises(RequestError, match=words):
            llm.generate("a[PAD]b", greedy())
        with pytest.raises(RequestError, match=words):
            next(llm.stream("[PAD]", greedy()))
        with pytest.raises(RequestError, match=words):
            llm.embed("[PAD]")
        assert len(one(llm, greedy()).token_ids) == 12


def test_without_a_tokenizer_ids_go_in_and_out(llama, tmp_path, backend):
    path = tiny_models.to_gguf(llama, tmp_path / "bare.gguf", vocab=False)
    with LLM(path, backend=backend, threads=2, kv_cache_tokens=512) as llm:
        out = llm.generate(list(IDS), greedy())[0].outputs[0]
        assert len(out.token_ids) == 12 and out.text == ""
        with pytest.raises(TokenizerError):
            llm.generate(PROMPT, greedy())
        with pytest.raises(RequestError, match="Stop strings need a tokenizer"):
            llm.generate(list(IDS), greedy(stop=["a"]))
        assert llm.generate(list(IDS), greedy(stop_token_ids=[out.token_ids[0]]))[0].outputs[0].finish_reason == "stop"


# -- conversations ---------------------------------------------------------------------------------------------------

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ extra or '' }}"


@pytest.fixture
def chatty(request, llama, tmp_path):
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(getattr(request, "param", TEMPLATE))
    with LLM(tmp_path, backend="reference", kv_cache_tokens=512) as llm:
        yield llm


def test_chat_is_the_rendered_prompt_with_its_tokens_parsed(chatty):
    hello = [{"role": "user", "content": "Once upon a time"}]
    out = chatty.chat(hello, greedy(), extra="bot:")[0]
    text = "<s>user: Once upon a time\nbot:"
    assert chatty.render(hello, extra="bot:") == text
    ids = chatty.get_tokenizer().encode(text, parse_special=True)
    assert list(out.prompt_token_ids) == ids and ids.count(1) == 1, "one beginning of sequence, the template's"
    assert out.outputs == chatty.generate([ids], greedy())[0].outputs
    again = [chatty.generate(text, greedy())[0], list(chatty.stream(text, greedy()))[-1]]
    assert all(each.prompt_token_ids == out.prompt_token_ids and each.outputs == out.outputs for each in again)
    both = chatty.chat([hello, [*hello, {"role": "bot", "content": "The end"}]], greedy(), extra="bot:")
    assert both[0].outputs == out.outputs and len(both) == 2
    assert len(both[1].prompt_token_ids) > len(ids)


@pytest.mark.parametrize("chatty", [TEMPLATE, TEMPLATE.removeprefix("{{ bos_token }}")], indirect=True)
def test_an_async_chat_is_the_same(chatty):
    async def main():
        llm = AsyncLLM(chatty.engine)
        assert llm.default_sampling_params == chatty.default_sampling_params
        assert llm.render(hello, extra="bot:") == chatty.render(hello, extra="bot:")
        for other in ([hello, hello], [], "Once"):
            with pytest.raises(RequestError, match="conversation"):
                await anext(llm.chat(other, greedy()))
        with pytest.raises(RequestError, match="does not read tools"):
            await anext(llm.chat(hello, greedy(), tools=[{}]))
        return [out async for out in llm.chat(hello, greedy(), "mine", extra="bot:")]

    hello = [{"role": "user", "content": "Once upon a time"}]
    outs, (alone,) = asyncio.run(main()), chatty.chat(hello, greedy(), extra="bot:")
    assert {out.request_id for out in outs} == {"mine"} and outs[-1].finished
    assert (outs[-1].prompt, outs[-1].prompt_token_ids) == (alone.prompt, alone.prompt_token_ids)
    assert outs[-1].outputs == alone.outputs


def test_chat_without_a_template(open_llm):
    with pytest.raises(RequestError, match="no chat template; use generate"):
        open_llm("reference").chat([{"role": "user", "content": "Hello"}])
