"""Memory mapped to a cache's addresses on a GPU, by its driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

ON_A_GPU = """
import gc, json, sys
from pathlib import Path
import numpy as np
import torch
from engine import LLM, SamplingParams
from engine.backend.registry import open_device
from engine.backend.v1 import virtual_memory_of
from engine.testing import models
from engine.testing.checkpoints import write_checkpoint
from engine.testing.memory import check_virtual_memory

device = open_device("cuda", {})
memory = virtual_memory_of(device)
assert memory is not None, "cuda-bindings is not installed, or the GPU has no virtual memory management"
check_virtual_memory(device, np.random.default_rng())

free = lambda: (gc.collect(), torch.cuda.synchronize(), torch.cuda.empty_cache(), torch.cuda.mem_get_info()[0])[3]
mib, before = 1 << 20, free()
state = memory.reserve((1 << 16, 8 * mib), "u8")  # half a tebibyte
address, reserved = state.data_ptr(), free()
memory.map(state, 5, 64)
mapped = free()
device.fence()
memory.unmap(state, 5, 64)
unmapped = free()
memory.map(state, 60_000, 4)
assert state.data_ptr() == address and not state[60_003].any()
state[60_003] = 7
assert int(state[60_003].sum(dtype=torch.int64)) == 7 * 8 * mib
del state
sizes = [before - reserved, before - mapped, before - unmapped, before - free()]

folder, rng = write_checkpoint("llama", Path(sys.argv[1]), np.random.default_rng()), np.random.default_rng()
prompts, params = models.random_prompts(rng, (20, 3, 33, 50)), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
found = {}
for kv_allocator in ("paged", "virtual"):
    with LLM(folder, backend="cuda", kv_allocator=kv_allocator, max_num_seqs=4) as llm:
        found[kv_allocator] = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
        graphs = llm.loaded.device.describe().details["graphs"]
print(json.dumps({"sizes": sizes, "graphs": graphs, **found}))
"""


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_gpus_memory_is_mapped_and_taken_away(tmp_path):
    """In a process of its own, since in this one kernels are interpreted: memory follows what is mapped, addresses stay, and the
    tokens are those of paging, decode steps that are captured as graphs included."""
    pytest.importorskip("torch")
    pytest.importorskip("cuda.bindings")
    from engine.backend.registry import discover

    if not next(b for b in discover() if b.name == "cuda").probe.available:
        pytest.skip("no GPU is here")
    run = subprocess.run(
        [sys.executable, "-c", ON_A_GPU, str(tmp_path / "llama")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    reserved, mapped, unmapped, freed = found["sizes"]
    some = 64 << 20  # what the driver and torch keep for themselves
    assert abs(mapped - reserved - (512 << 20)) <= some and abs(unmapped - reserved) <= some, found["sizes"]
    assert max(reserved, freed) <= some, found["sizes"]
    assert found["paged"] == found["virtual"] and "CUDA graphs" in found["graphs"]
