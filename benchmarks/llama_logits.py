"""Logits of llama.cpp for token-id prompts; runs in the peer's environment.

usage: llama_logits.py MODEL.gguf PROMPTS.json OUT.npz THREADS [KV_TYPE] [prefill]
PROMPTS.json is a list of lists of ids. OUT holds prefill_N and decode_N, f32 [tokens, vocabulary]: all tokens in one batch,
and one at a time (not with "prefill").
"""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main(model: str, prompts: str, out: str, threads: str, kv: str = "f16", parts: str = "both") -> None:
    ids = json.loads(Path(prompts).read_text())
    kind = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0, "f32": llama_cpp.GGML_TYPE_F32}[kv]
    llm = llama_cpp.Llama(
        model,
        n_ctx=512,
        n_batch=512,
        n_ubatch=512,
        n_threads=int(threads),
        n_threads_batch=int(threads),
        logits_all=True,
        verbose=False,
        type_k=kind,
        type_v=kind,
        flash_attn=kv == "q8_0",
    )
    found = {}
    for n, prompt in enumerate(ids):
        llm.reset()
        llm.eval(prompt)
        found[f"prefill_{n}"] = llm.scores[: len(prompt)].copy()
        if parts == "prefill":
            continue
        llm.reset()
        for token in prompt:
            llm.eval([token])
        found[f"decode_{n}"] = llm.scores[: len(prompt)].copy()
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
