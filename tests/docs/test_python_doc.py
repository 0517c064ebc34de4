"""docs/python.md is true: its blocks of code run as they stand there, one after the other in one namespace, and each ``print``
with a comment prints just that; its tables have each setting and each parameter once, with its default and its option."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from engine import CompletionOutput, RequestOutput, SamplingParams
from engine import errors as engine_errors
from engine.backend import joining
from engine.console.options import EngineOptions
from engine.runtime.config import USUAL_POOL_TOKENS, EngineConfig
from engine.sampling import BeamSearchParams
from engine.serve.settings import LoadOptions

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "python.md"
TEXT = PAGE.read_text()
LINES = TEXT.splitlines()


def _section(name: str) -> str:
    return TEXT.split(f"\n## {name}\n")[1].split("\n## ")[0]


def _words(text: str) -> str:
    """The text as one line, however it is wrapped."""
    return " ".join(text.split())


def _rows(name: str) -> list[list[str]]:
    """The cells of the last table of a section."""
    table = re.findall(r"(?:^\|.*\n)+", _section(name), re.M)[-1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def _names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _default(field: Any) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()


def _blocks() -> Iterator[str]:
    """Each block, below as many empty lines as there are above it, so that its lines have their numbers of the page."""
    for found in re.finditer(r"```python\n(.*?)```", TEXT, re.DOTALL):
        yield "\n" * TEXT[: found.start(1)].count("\n") + found[1]


def _checked_print(*values: Any, **options: Any) -> None:
    _, comment, wanted = LINES[sys._getframe(1).f_lineno - 1].partition("  # ")
    if comment:
        assert " ".join(map(str, values)) == wanted
    builtins.print(*values, **options)


def test_the_code_runs_and_prints_what_it_says(monkeypatch, unavailable):
    monkeypatch.setenv("ENGINE_BACKEND", "reference" if unavailable["cpu"] else "cpu")
    namespace = {"print": _checked_print}
    for code in _blocks():
        exec(compile(code, str(PAGE), "exec"), namespace)
    assert TEXT.count("```") == 2 * len(list(_blocks()))


def test_the_settings_are_those_of_the_code(monkeypatch):
    monkeypatch.setattr(joining, "check_name", lambda name: None)
    rows = _rows("Settings")
    assert [name for name, *_ in rows] == [f"`{field.name}`" for field in fields(EngineConfig)]
    defaults = {field.name: field.default for field in fields(EngineConfig) if field.name != "model"}
    assert {_names(name)[0]: _names(default) for name, default, *_ in rows} == {
        "model": [],
        **{name: [repr(default)] for name, default in defaults.items()},
    }
    options = {"model": "`MODEL`"}
    for group, mark in ((EngineOptions, ""), (LoadOptions, " *serve*")):
        usual = group().settings()
        for field in fields(group):
            given = group(**{field.name: ["given"]}).settings()
            (setting,) = (name for name in given if given[name] != usual[name])
            options[setting] = f"`--{field.name.replace('_', '-')}`{mark}"
    assert {_names(name)[0]: option for name, _, option, _ in rows if option} == options


def test_where_the_commands_have_another_default_is_said():
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    shared, serving = EngineOptions().settings(), LoadOptions().settings()
    assert {name: value for name, value in shared.items() if value != defaults[name]} == {
        "kv_cache_tokens": USUAL_POOL_TOKENS
    }
    assert {name: value for name, value in serving.items() if value != defaults[name]} == {"decode_slowdown": 2.5}
    last = _words(_section("Settings").rpartition("|\n")[2])
    assert "`decode_slowdown` 2.5" in last and f"`kv_cache_tokens` {USUAL_POOL_TOKENS}" in last


def test_the_parameters_are_those_of_the_code():
    said = [
        pair for names, defaults, _ in _rows("Sampling") for pair in zip(_names(names), _names(defaults), strict=True)
    ]
    assert sorted(said) == sorted((field.name, repr(_default(field))) for field in fields(SamplingParams))
    beams = {field.name: _default(field) for field in fields(BeamSearchParams)}
    assert (beams["beam_width"], beams["max_tokens"], beams["num_return_sequences"]) == (4, 16, None)
    assert beams["length_penalty"] == 1.0


def test_the_fields_of_outputs_are_those_of_the_code():
    text = _section("Load and generate")
    of_request, _, of_completion = text.partition("`CompletionOutput`:")
    own = [field.name for field in fields(RequestOutput) if field.name != "embedding"]  # which ``embed`` takes out
    assert not [name for name in own if f"`{name}`" not in of_request]
    said = re.findall(r"(?:^- |; )`(\w+)`: ", of_completion.replace("\n  ", " "), re.M)
    assert sorted(said) == sorted(field.name for field in fields(CompletionOutput))


def test_the_exceptions_are_those_of_the_code():
    named = [name for row in _rows("Errors") for name in _names(row[0])]
    found = {
        name
        for name, kind in vars(engine_errors).items()
        if isinstance(kind, type) and issubclass(kind, engine_errors.EngineError)
    }
    # the base of all, and what only a wrong kernel or op raises
    assert sorted(named) == sorted(found - {"EngineError", "OpError"})


def test_what_is_said_not_to_be_there_is_not():
    (said,) = re.findall(r"^- \*Not there.*?(?=^- )", _section("Coming from vLLM"), re.M | re.DOTALL)
    sampling, _, constructor = _words(said).partition("; of the constructor ")
    of_sampling = _names(sampling.partition("of sampling ")[2])
    of_constructor = [name for name in _names(constructor) if name != "kv_cache_"]
    assert len(of_sampling) > 3 and len(of_constructor) > 3
    for name in of_sampling:
        with pytest.raises(TypeError):
            SamplingParams(**{name: None})
    for name in of_constructor:
        with pytest.raises(TypeError):
            EngineConfig(model=Path("model.gguf"), **{name: None})


def test_the_readme_names_the_page():
    assert "(docs/python.md)" in (ROOT / "README.md").read_text()
