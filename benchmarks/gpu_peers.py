"""The continuous batching of Hugging Face's transformers on the benchmark's model: what a card's decode rates stand beside."""

from __future__ import annotations

import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.cli.measure import Case

ATTENTION = {"flash_attention_2": "flash_attn", "sdpa": "torch"}
"""Implementations, best first, and the module that each needs."""


def decode_rates(
    folder: Path, cases: list[Case], where: torch.device, dtype: torch.dtype
) -> dict[Case, dict[str, Any]]:
    """Tokens a second of all sequences together, from the last one's first token to the last token, with the setting that is
    the fastest for each case: CUDA graphs as it decides, or always. One that fails says so on stderr and takes nothing from
    the others."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig

    attention = next(name for name, module in ATTENTION.items() if find_spec(module))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    model.to(where)
    found: dict[Case, dict[str, Any]] = {}
    # It would fill most of a host's memory, and of a GPU's so much that its own graphs have no room.
    gpu = where.type == "cuda"
    memory: dict[str, Any] = {"max_memory_percent": 0.5} if gpu else {"num_blocks": 16, "max_batch_tokens": 256}
    for case in cases:
        for graphs in (None, True) if gpu else (None,):
            try:
                rate = _rate(model, case, ContinuousBatchingConfig(use_cuda_graph=graphs, **memory))
            except Exception:
                traceback.print_exc()
                continue
            if case not in found or rate > found[case]["tok_s"]:
                found[case] = {"tok_s": rate, "setting": f"{attention}, use_cuda_graph={graphs}"}
    return found


def _rate(model: Any, case: Case, how: Any) -> float:
    from transformers import GenerationConfig

    prompts = np.random.default_rng().integers(3, 300, (case.batch, case.depth)).tolist()
    wanted = GenerationConfig(max_new_tokens=case.decode + 1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch(prompts, wanted, continuous_batching_config=how, record_timestamps=True)
    times = [output.timestamps for output in outputs.values()]
    if len(times) != case.batch or any(len(each) != case.decode + 1 for each in times):
        raise RuntimeError(f"transformers gave {[len(each) for each in times][:8]} tokens for {case}")
    return case.batch * case.decode / (max(each[-1] for each in times) - max(each[0] for each in times))
