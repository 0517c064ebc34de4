"""docs/write-a-backend.md is true: its code runs as it stands there, stage by stage, and is what ``plugin new`` writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.cli.plugin import starter
from engine.testing.checkpoints import write_checkpoint

GUIDE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"
BLOCK = re.compile(r"```(?:toml|python)\n# (?P<path>[\w./]+)(?P<added>, added)?\n(?P<code>.*?)```", re.DOTALL)
STAGES = ("## The kit", "## Second rung", "## Third rung")
ANSWER = """
import sys
from engine import LLM, SamplingParams
from engine.backend.registry import open_device
from engine.ops import OPS
from engine.testing.checks import check_op, ops_of
import numpy as np
model, ops = sys.argv[1], sys.argv[2].split(",")
def answer(backend, kv_dtype="auto"):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(model, backend=backend, kv_cache_dtype=kv_dtype, max_model_len=96) as llm:
        places = {p.call.op: p.place for p in llm.loaded.placement.calls}
        tokens = [o.outputs[0].token_ids for o in llm.generate([[5, 6, 7], [9] * 30], params)]
        return tokens, places, llm.loaded.config.kv_cache_dtype
got, places, kv_dtype = answer("mydev")
assert got == answer("reference", kv_dtype)[0], got
assert {op for op, place in places.items() if place == "device"} == (set(ops) if ops != [""] else set(places)), places
device = open_device("mydev", {})
assert list(ops_of(device)) == [op for op in OPS if op in ops]
for op in ops_of(device):
    assert check_op(device, OPS[op], np.random.default_rng()).ran
"""


def written(folder: Path, text: str) -> Path:
    """The files that the blocks of a text make, as an installed distribution."""
    found: dict[str, str] = {}
    for block in BLOCK.finditer(text):
        path = block["path"]
        found[path] = f"{found[path].rstrip()}\n\n{block['code']}" if block["added"] else block["code"]
    for path, code in found.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(code)
    entry = re.search(r"\[project.entry-points.\"engine.backends\"\]\nmydev = \"(.*)\"", found["pyproject.toml"])
    assert entry
    info = folder / "engine_mydev-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-mydev\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[engine.backends]\nmydev = {entry[1]}\n")
    return folder


@pytest.mark.parametrize(
    ("stage", "ops"), list(zip(STAGES, ("", "linear", "linear,kv_write,kv_copy,attention"), strict=True)), ids=str
)
def test_each_stage_answers_as_the_reference_does(stage, ops, tmp_path):
    folder = written(tmp_path / "site", GUIDE.read_text().split(stage)[0])
    model = write_checkpoint("llama", tmp_path / "llama", np.random.default_rng(2))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", ANSWER, model, ops],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_first_token_takes_at_most_eighty_lines():
    blocks = BLOCK.findall(GUIDE.read_text().split(STAGES[0])[0])
    assert {path for path, _, _ in blocks} == {"pyproject.toml", "engine_mydev/__init__.py", "engine_mydev/device.py"}
    assert sum(len(code.splitlines()) for _, _, code in blocks) <= 80


def test_the_starter_project_is_the_guide_s(tmp_path):
    folder = written(tmp_path, GUIDE.read_text().split(STAGES[1])[0])
    for path in ("pyproject.toml", "engine_mydev/__init__.py", "engine_mydev/device.py", "engine_mydev/providers.py"):
        assert (folder / path).read_text().rstrip() == starter(Path(path).name, "mydev").rstrip(), path


def test_every_block_of_code_is_tried():
    text = GUIDE.read_text()
    assert len(BLOCK.findall(text)) == text.count("```python") + text.count("```toml")
