"""After a load each weight is in memory once: packed, its file's pages let go."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_models import CONFIG, llama_tensors, to_gguf, write_llama

pytest.importorskip("engine_cpu._native", reason="the native library is not built")

STATUS = Path("/proc/self/status")
MEASURED = """
import json, sys
from engine import LLM, SamplingParams

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

before = resident()
with LLM(sys.argv[1], backend="cpu", max_num_seqs=1, max_model_len=64) as llm:
    loaded = resident()
    llm.generate([[1, 5, 9]], SamplingParams(max_tokens=4, temperature=0))
    print(json.dumps([llm.loaded.memory.weights, loaded - before, resident() - before]))
"""


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")
def test_weights_are_resident_once(tmp_path):
    config = CONFIG | {"intermediate_size": 98304}
    write_llama(tmp_path, np.random.default_rng(), llama_tensors(np.random.default_rng(), config), **config)
    model = to_gguf(tmp_path, tmp_path / "model.gguf", np.float16)
    run = subprocess.run([sys.executable, "-c", MEASURED, str(model)], capture_output=True, text=True, check=True)
    weights, loaded, used = json.loads(run.stdout)
    assert weights > 70e6
    assert 0.9 * weights < loaded < 1.5 * weights
    assert used < 1.7 * weights
