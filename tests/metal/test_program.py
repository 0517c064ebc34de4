"""A whole model whose kernels run through the shim, beside MLX's own operations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.testing.checkpoints import write_checkpoint
from engine.testing.models import answers, compare_answers

SHIMMED = """
import sys
from pathlib import Path

from engine.backend.v1 import API, Manifest, Probe


def open_device(index, options):
    sys.path.insert(0, {here!r})
    from engine_metal.device import MetalDevice
    from shim import Shim

    return MetalDevice({{"kernels": Shim(Path({folder!r}))}})


manifest = Manifest("shimmed", API, lambda: Probe(True, "Metal's kernels on the CPU.", -20), open_device, automatic=False)
"""


@pytest.mark.parametrize("kv_dtype", ["f16", "int8"])
def test_a_model_s_answers_by_kernels(kv_dtype, tmp_path, shim_folder, install):
    folder = shim_folder / kv_dtype
    folder.mkdir()
    source = SHIMMED.format(here=str(Path(__file__).parent), folder=str(folder))
    install("engine.backends", "shimmed", f"shimmed_{kv_dtype}:manifest", source)
    model = write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())
    prompts = [np.random.default_rng().integers(3, 200, n).tolist() for n in (1, 7)]
    settings = {"kv_cache_dtype": kv_dtype, "block_size": 4, "max_model_len": 32}
    got, want = (answers(model, backend, prompts, 4, **settings) for backend in ("shimmed", "metal"))
    # A stored number may be rounded otherwise, by as much as the kit allows for.
    compare_answers(got, want, 0.1 if kv_dtype == "int8" else 2e-2)
    built = [path.read_text() for path in folder.glob("*.cpp")]
    for kernel in ("paged_attention", "rope_rows"):
        assert any(f"{kernel}.metal" in text for text in built), f"{kernel} was not launched."
