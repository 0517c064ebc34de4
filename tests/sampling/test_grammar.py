"""Masks against a brute-force reading of the vocabulary, and grammars that cannot be."""

from __future__ import annotations

import json
import re
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.formats import open_checkpoint
from engine.formats.tokenizer import Tokenizer
from engine.sampling import SamplingParams, StructuredOutputs
from engine.sampling.grammar import GrammarCompiler, Matcher, _Vocabulary, json_in_lark

VOCABULARIES = ("llama-bpe", "llama-spm", "phi-3", "qwen2")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.write_llama(folder, np.random.default_rng(0))
    return open_checkpoint(folder).tokenizer()


@pytest.fixture(scope="module")
def compiler(tiny: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tiny, tiny_models.VOCAB, tiny.eos_ids)


@cache
def real(path: Path) -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = open_checkpoint(path).tokenizer()
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest, shared: Path) -> tuple[Tokenizer, GrammarCompiler]:
    return real(shared / "vocab" / f"{request.param}.gguf")


def allowed(matcher: Matcher, vocab: int) -> set[int]:
    mask = np.full((vocab + 31) // 32, 0xA5A5A5A5, np.uint32)
    matcher.fill(mask)
    found: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return set(found)


def matcher_of(compiler: GrammarCompiler, ignore_eos: bool = False, **wanted: object) -> Matcher:
    return compiler.matchers(StructuredOutputs(**wanted), 1, ignore_eos)[0]  # type: ignore[arg-type]


WORDS = st.text(st.sampled_from('abe "\\\n\u00e9\U0001f642/'), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, min_size=1, max_size=5, unique=True), data=st.data())
def test_choice_allows_what_begins_a_choice(
    tiny: Tokenizer, compiler: GrammarCompiler, words: list[str], data: st.DataObject
) -> None:
    matcher = matcher_of(compiler, choice=words)
    texts, written = [word.encode() for word in words], b""
    spelled = {token: tiny.token_bytes(token) for token in range(tiny.vocab_size) if tiny.token_bytes(token)}
    while True:
        got = allowed(matcher, tiny_models.VOCAB)
        left = [text for text in texts if text.startswith(written)]
        fits = {token for token, piece in spelled.items() if any(t.startswith(written + piece) for t in left)}
        assert bool(got & tiny.eos_ids) == (written in texts)
        assert got - tiny.eos_ids <= fits
        if len({text[len(written) : len(written) + 1] for text in left}) > 1:  # no byte is forced
            assert got - tiny.eos_ids == fits
        token = data.draw(st.sampled_from(sorted(got)))
        if token in tiny.eos_ids:
            assert written in texts
            break
        written += spelled[token]
        if matcher.advance(token):
            assert written in texts
            break


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), cut=st.integers(0, 3))
def test_any_bytes_are_spelled(vocabulary: tuple[Tokenizer, GrammarCompiler], text: str, cut: int) -> None:
    """What the parser asks to be tokenized may end within a character, and has no space before it."""
    tokenizer, _ = vocabulary
    data = text.encode()[: len(text.encode()) - cut]
    spelling = spelling_of(tokenizer)
    assert b"".join(spelling.tokens[token] for token in spelling(data)) == data
    assert all(token not in tokenizer.control_ids for token in spelling(data))


@cache
def spelling_of(tokenizer: Tokenizer) -> _Vocabulary:
    return _Vocabulary(tokenizer, tokenizer.vocab_size, sorted(tokenizer.eos_ids))


def test_forced_texts_are_the_models_own_tokens(vocabulary: tuple[Tokenizer, GrammarCompiler]) -> None:
    tokenizer, compiler = vocabulary
    text = "the only possible answer, 42 \u00e9"
    matcher, ids, complete = matcher_of(compiler, choice=[text]), [], False
    while not complete:
        token = min(allowed(matcher, tokenizer.vocab_size))
        ids.append(token)
        complete = matcher.advance(token)
    assert ids == spelling_of(tokenizer)(text.encode())
    assert tokenizer.detokenizer().push(ids[0]) == text[: len(tokenizer.token_bytes(ids[0]))]


def test_every_form_of_grammar(vocabulary: tuple[Tokenizer, GrammarCompiler]) -> None:
    """Random walks through each form end in texts of it, with the same masks whatever the vocabulary."""
    tokenizer, compiler = vocabulary
    walk = np.random.default_rng()
    for wanted, pattern in (
        ({"regex": r"[a-c]{2}-[0-9]{1,3}"}, r"[a-c]{2}-[0-9]{1,3}"),
        ({"grammar": 'start: "x" LETTER{2,4}\nLETTER: /[pq]/'}, "x[pq]{2,4}"),
        (
            {"grammar": 'root ::= "a" rest{1,3} "\\u00e9\\u005d"\nrest ::= [\\u0030-\\u0032] | "-"'},
            "a[0-2-]{1,3}\u00e9\\]",
        ),
        ({"grammar": 'root ::= n "b"\nn ::= [a-b]{1,2}'}, "[ab]{1,2}b"),  # as a terminal alone, n would take the b
        ({"json": {"enum": ["u", 1, None]}}, '"u"|1|null'),
    ):
        matcher, ids, complete = matcher_of(compiler, **wanted), [], False
        while not complete:
            token = int(walk.choice(sorted(allowed(matcher, tokenizer.vocab_size))))
            if token in tokenizer.eos_ids:
                break
            ids.append(token)
            complete = matcher.advance(token)
        text = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert re.fullmatch(pattern, text), (wanted, text)


def test_rows_beyond_the_vocabulary_are_never_allowed(tiny: Tokenizer) -> None:
    """A model may have more logits than its tokenizer has tokens."""
    vocab = tiny.vocab_size + 77
    wider = GrammarCompiler(tiny, vocab, [*tiny.eos_ids, vocab + 5])
    got = allowed(matcher_of(wider, regex="(?s).*"), vocab)
    assert max(got) < tiny.vocab_size and tiny.eos_ids <= got
    assert not got & (tiny.control_ids - tiny.eos_ids)


def test_ends_that_are_to_be_ignored(tiny: Tokenizer, compiler: GrammarCompiler) -> None:
    for ignored in (False, True):
        matcher = matcher_of(compiler, ignored, regex="a+")
        matcher.advance(tiny.encode("a")[0])
        assert bool(allowed(matcher, tiny_models.VOCAB) & tiny.eos_ids) is not ignored


def test_a_state_at_fault_allows_nothing_and_says_why(tiny: Tokenizer, compiler: GrammarCompiler) -> None:
    matcher = matcher_of(compiler, regex="a+")
    assert matcher.error is None
    assert not matcher.advance(tiny.encode("b")[0])
    assert allowed(matcher, tiny_models.VOCAB) == set()
    assert matcher.error and matcher.error.startswith("The grammar has failed: ") and "\n" not in matcher.error


def test_a_grammar_that_is_too_slow_fails(
    tiny: Tokenizer, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = matcher_of(compiler, regex="a+")
    seconds = iter(range(0, 1000, 3))
    monkeypatch.setattr(time, "thread_time", lambda: next(seconds))
    assert allowed(matcher, tiny_models.VOCAB) == set()
    assert matcher.error and "too slow: 0 tokens took 3.0 s" in matcher.error


def test_states_are_apart(tiny: Tokenizer, compiler: GrammarCompiler) -> None:
    first, second = compiler.matchers(StructuredOutputs(choice=["ab", "cd"]), 2, False)
    first.advance(tiny.encode("a")[0])
    assert tiny.encode("c")[0] in allowed(second, tiny_models.VOCAB)
    assert tiny.encode("c")[0] not in allowed(first, tiny_models.VOCAB)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({}, "has nothing; give exactly one"),
        ({"regex": "a", "json": "{}"}, "has json, regex; give exactly one"),
        ({"json": "{"}, "is no JSON schema"),
        ({"json": "[1]"}, "must be a JSON schema: an object"),
        ({"json": '{"a":' * 5000 + "1" + "}" * 5000}, "is no JSON schema: maximum recursion"),
        ({"json": {"a": float("nan")}}, "is no JSON schema"),
        ({"json": {"a": {1, 2}}}, "is no JSON schema"),
        ({"json": {"properties": {str(n): {} for n in range(1001)}}}, "an object of 1001 keys; at most 1000"),
        ({"json": {"description": "a" * 200_000}}, "at most 131072 are taken"),
        ({"regex": ""}, "must be a text that is not empty"),
        ({"regex": 7}, "must be a text that is not empty"),
        ({"grammar": "a" * 200_000}, "at most 131072 are taken"),
        ({"choice": "ab"}, "must be a list of texts"),
        ({"choice": ["a", ""]}, "must be a list of texts"),
        ({"choice": ["a" * 200_000]}, "more than 131072 characters"),
        ({"json_object": False}, "must be true"),
    ],
)
def test_forms_that_are_wrong(wanted: dict[str, object], reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        StructuredOutputs(**wanted)  # type: ignore[arg-type]
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"json": {"type": "intger"}}, "Invalid type: intger"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "greater than maximum"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/$defs/none"}}, "does not exist"),
        ({"json": {"$ref": "https://example.com/schema.json"}}, "does not fetch"),
        ({"json": {"$ref": "#"}}, "no text fits it"),
        ({"json": json.loads('{"items":' * 200 + "1" + "}" * 200)}, "recursion limit"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(" * 50_000 + ")" * 50_000}, "cannot be used"),
        ({"grammar": "hello"}, "neither Lark nor GBNF"),
        ({"grammar": "start: unknown"}, "unknown name"),
        ({"grammar": "root ::= unknown"}, "neither Lark nor GBNF"),
        ({"grammar": "root ::= " + "(" * 50_000}, "neither Lark nor GBNF"),
        ({"grammar": "start: " + "(" * 50_000}, "cannot be used"),
        ({"grammar": 'root ::= root "a"'}, "no text fits it"),
        ({"grammar": "start: A0\n" + "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(60)) + 'A60: "x"'}, "too big"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_grammars_that_cannot_be(compiler: GrammarCompiler, wanted: dict[str, object], reason: str) -> None:
    start = time.process_time()
    with pytest.raises(RequestError, match=reason) as caught:
        matcher_of(compiler, **wanted)
    assert time.process_time() - start < 2
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value) and len(str(caught.value)) < 300


PATTERNS = [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in range(5, 40)]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PATTERNS},
        {"allOf": [{"type": "object", "properties": {"x": pattern}, "required": ["x"]} for pattern in PATTERNS]},
        {"$defs": {f"d{n}": pattern | {"$ref": f"#/$defs/d{n + 1}"} for n, pattern in enumerate(PATTERNS)}
         | {f"d{len(PATTERNS)}": {}}, "$ref": "#/$defs/d0"},
        {"type": "integer", "multipleOf": 1_000_003},
        {"allOf": [{"type": "integer", "multipleOf": n} for n in (3, 7, 11, 13, 17, 19, 23)]},
    ],
    ids=["allOf", "properties", "$ref", "multiple", "multiples"],
)  # fmt: skip
def test_conditions_that_are_too_many_to_combine(compiler: GrammarCompiler, schema: dict[str, object]) -> None:
    """They cost a process of their own some seconds, and this one nothing."""
    start, own = time.monotonic(), time.process_time()
    with pytest.raises(RequestError, match="more conditions on one value than can be combined"):
        matcher_of(compiler, json=schema)
    assert time.monotonic() - start < 10 and time.process_time() - own < 1


def test_conditions_in_a_schema_within_a_grammar(compiler: GrammarCompiler) -> None:
    schema = StructuredOutputs(json={"type": "integer", "multipleOf": 1_000_003})
    with pytest.raises(RequestError, match="more conditions on one value than can be combined"):
        matcher_of(compiler, grammar=f"start: {json_in_lark(schema)}")


def test_conditions_that_can_be_combined(compiler: GrammarCompiler) -> None:
    name = {"allOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "string", "maxLength": 3}]}
    matcher_of(
        compiler, json={"type": "object", "properties": {"pattern": name, "n": {"type": "integer", "multipleOf": 5}}}
    )


def test_a_model_without_an_end(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="needs a model that has an end of sequence"):
        matcher_of(GrammarCompiler(tiny, tiny_models.VOCAB, []), regex="a")


def test_params_take_nothing_else() -> None:
    with pytest.raises(RequestError, match="must be a StructuredOutputs"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_equal_forms_are_equal() -> None:
    assert StructuredOutputs(json='{"type": "null"}') == StructuredOutputs(json={"type": "null"})
    assert hash(StructuredOutputs(choice=["a"])) == hash(StructuredOutputs(choice=("a",)))


def test_what_is_refused_is_refused_at_once_again(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had too little time alone is tried again."""
    wrong = StructuredOutputs(json={"allOf": PATTERNS[1:]})
    monkeypatch.setattr("engine.sampling.grammar._TRIAL_SECONDS", 0.01)
    with pytest.raises(RequestError, match="more conditions"):
        compiler.compile(wrong)
    assert not compiler.knows(wrong)
    unlike = StructuredOutputs(grammar='root ::= root "b"')
    with pytest.raises(RequestError) as first:
        compiler.compile(unlike)
    assert compiler.knows(unlike)
    monkeypatch.setattr("engine.sampling.grammar._compile", None)
    with pytest.raises(RequestError, match=re.escape(str(first.value))):
        compiler.compile(unlike)
