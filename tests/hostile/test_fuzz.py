"""Mutated models, loaded and run: whatever a file holds, an answer or one sentence comes, soon and in little memory.

A short form runs always; `pytest -m soak` runs half an hour, by two processes, and stores its figures under benchmarks/results.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import result
import tiny_models
from good_models import GGUF, Folder, good_folder, good_gguf
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from memory_limit import limited_memory

from engine import LLM, SamplingParams
from engine.errors import EngineError

SECONDS = 1.0  # of this thread, for a file of some 300 KB
EXTRA_MEMORY = 2 << 30  # of address space
MESSAGES = [{"role": "user", "content": "hi"}]

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 7, 255, 256, 65535, 1 << 24, 2**31 - 1, 1 << 31, 2**32 - 1, 1 << 32, 2**63 - 1, 2**64 - 1]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    NUMBERS | st.none() | st.booleans() | st.floats() | st.text(max_size=9) | st.sampled_from(["F32", "BPE", "linear"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KINDS = ("u8", "i8", "u16", "u32", "i32", "u64", "i64", "f32", "f64", "bool", "str", "[u32]", "[i32]", "[f32]", "[str]")
PATCHES = st.binary(min_size=1, max_size=9) | NUMBERS.map(lambda n: (n % (1 << 64)).to_bytes(8, "little"))
TEMPLATE_PARTS = st.sampled_from(
    ["{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{{ m.content * 99999 }}", "{% set x = x ~ x %}", "{{ x }}",
     "{% macro f(a) %}", "{% endmacro %}", "{{ f(1) }}", "{{ f(f) }}", "{% if m %}", "{% endif %}", "{{ m | tojson }}",
     "{% for i in range(9999) %}", "{{ 'a'.join(x) }}", "{{ x | replace('', 'xx') }}", "{% set x = [x, x] %}", "{{ loop }}",
     "{{ namespace }}", "{{ x[::-1] }}", "{{ '%s' % x }}", "{{ x | list | sum }}", "{% set x = 'ab' %}", "{{ -", "#}", "{#"]
)  # fmt: skip


def _patched(data: st.DataObject, content: bytes) -> bytes:
    """Bytes written over, put in, taken out or repeated; near the beginning more often than elsewhere."""
    broken = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        size = len(broken)
        at = data.draw(st.integers(0, min(size, 4096)) | st.integers(0, size))
        how, patch = data.draw(st.sampled_from(["over", "in", "out", "repeat", "cut"])), data.draw(PATCHES)
        if how == "cut":
            del broken[at:]
        elif how == "repeat":
            broken[at:at] = broken[at : at + 64] * data.draw(st.integers(1, 50))
        else:
            broken[at : at + (len(patch) if how != "in" else 0)] = b"" if how == "out" else patch
    return bytes(broken)


def _altered(data: st.DataObject, value: Any) -> Any:
    """A JSON value with one node, somewhere, in another form."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(list(value)))
        changed = dict(value)
        if data.draw(st.integers(0, 5)):
            changed[key] = _altered(data, value[key])
        else:
            del changed[key]
        return changed
    if isinstance(value, list) and value and data.draw(st.integers(0, 3)):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], _altered(data, value[at]), *value[at + 1 :]]
    return data.draw(VALUES)


def _gguf_value(data: st.DataObject, kind: str) -> Any:
    if kind.startswith("["):
        return [_gguf_value(data, kind[1:-1]) for _ in range(data.draw(st.integers(0, 3)))]
    if kind == "str":
        return data.draw(st.text(max_size=9) | st.binary(max_size=9))
    if kind == "bool":
        return data.draw(st.booleans())
    if kind.startswith("f"):
        return data.draw(st.floats(width=32))
    bits = int(kind[1:])
    number = data.draw(NUMBERS) % (1 << bits)
    return number - (1 << bits) if kind[0] == "i" and number >> (bits - 1) else number


def _broken_gguf(data: st.DataObject, good: GGUF, folder: Path) -> Path:
    model = copy.deepcopy(good)
    how = data.draw(st.sampled_from(["bytes", "key", "tensor", "template"]))
    if how == "bytes":
        model.finish = lambda content: _patched(data, content)
    elif how == "key":
        for name in data.draw(st.lists(st.sampled_from([key[0] for key in model.keys]), min_size=1, max_size=3)):
            kind = data.draw(st.sampled_from(KINDS))
            model.key(name, kind, _gguf_value(data, kind))
    elif how == "template":
        model.key("tokenizer.chat_template", "str", "".join(data.draw(st.lists(TEMPLATE_PARTS, max_size=12))))
    else:
        tensor = data.draw(st.sampled_from(model.tensors))
        field = data.draw(st.sampled_from(["dims", "type", "offset", "name"]))
        if field == "dims":
            tensor[field] = data.draw(st.lists(NUMBERS.map(lambda n: n % (1 << 64)), max_size=5))
        elif field == "name":
            tensor[field] = data.draw(st.sampled_from([t["name"] for t in model.tensors]) | st.text(max_size=9))
        else:
            tensor[field] = data.draw(NUMBERS) % (1 << (32 if field == "type" else 64))
    return model.write(folder)


def _broken_folder(data: st.DataObject, good: Folder, folder: Path) -> Path:
    model = copy.deepcopy(good)
    model.write(folder)
    name = data.draw(
        st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "template"])
    )
    if name == "template":
        model.files["chat_template.jinja"] = "".join(data.draw(st.lists(TEMPLATE_PARTS, max_size=12))).encode()
    elif name == "model.safetensors" or data.draw(st.integers(0, 3)) == 0:
        model.files[name] = _patched(data, (folder / name).read_bytes())
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            model.files[name] = _altered(data, model.files[name])
    return model.write(folder)


def _use(path: Path, backend: str) -> str:
    """Load, answer a message, complete a text: "ran", or the class of the sentence that came instead."""
    try:
        with LLM(path, backend=backend, threads=1, kv_cache_tokens=64, max_num_seqs=1) as llm:
            template = llm.loaded.checkpoint.chat_template()
            params = SamplingParams(max_tokens=2)
            if template is not None:
                template.render(MESSAGES)
            output = llm.generate(["hi there"], params)[0].outputs[0]
            return "a request failed" if output.finish_reason == "error" else "ran"
    except EngineError as error:
        sentence = str(error)
        assert sentence.endswith(".") and "\n" not in sentence, sentence
        return type(error).__name__


def fuzz(
    llama: Path, folder: Path, backend: str, examples: int, until: float, phases: tuple[Phase, ...]
) -> Counter[str]:
    """Counts what became of each broken model; stops at the first that ends otherwise, or is slow."""
    folder_model = good_folder(llama)
    gguf_model = good_gguf(tiny_models.to_gguf(llama, folder / "good.gguf"))
    counts: Counter[str] = Counter()
    slowest = 0.0

    def one(data: st.DataObject) -> None:
        nonlocal slowest
        where = folder / "broken"
        where.mkdir(exist_ok=True)
        for file in where.iterdir():
            file.unlink()
        if data.draw(st.booleans()):
            path = _broken_gguf(data, gguf_model, where)
        else:
            path = _broken_folder(data, folder_model, where)
        start = time.thread_time()
        counts[_use(path, backend)] += 1
        took = time.thread_time() - start
        slowest = max(slowest, took)
        assert took < SECONDS, f"{took:.2f} s"

    number = 0
    while number == 0 or time.monotonic() < until:
        number += 1
        run = settings(
            max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
        )(seed(time.time_ns())(given(st.data())(one)))
        run()
    assert threading.active_count() < 20, "models leave threads behind"
    counts["slowest_ms"] = round(slowest * 1000)
    return counts


@pytest.fixture
def bounded_memory():
    """So that a file cannot take all."""
    with limited_memory(EXTRA_MEMORY):
        yield


ALL = (Phase.generate, Phase.shrink)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="bounds its memory by /proc, which Linux has")
def test_mutated_models(llama, cpu, tmp_path, bounded_memory):
    counts = fuzz(llama, tmp_path, cpu, 40, 0.0, ALL)
    assert sum(counts.values()) >= 40


def _share(number: int, llama: Path, folder: Path, backend: str, seconds: float) -> Counter[str]:
    own = folder / str(number)
    own.mkdir()
    return fuzz(llama, own, backend, 500, time.monotonic() + seconds, ALL)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_mutated_models_for_half_an_hour(llama, cpu, tmp_path, bounded_memory):
    processes, seconds = 2, 900
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        each = list(
            pool.map(partial(_share, llama=llama, folder=tmp_path, backend=cpu, seconds=seconds), range(processes))
        )
    slowest = max(counts.pop("slowest_ms") for counts in each)
    outcomes = sum(each, Counter[str]())
    figures = {
        "processes": processes,
        "seconds_each": seconds,
        "models": sum(outcomes.values()),
        "outcomes": dict(outcomes),
    }
    result.write("soak-fuzz", {**figures, "slowest_ms": slowest})
    print(json.dumps(figures))
