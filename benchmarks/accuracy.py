"""Error of the CPU backend's logits, and of llama.cpp's, against f32 arithmetic on the dequantized weights.

usage: accuracy.py PEER_DIR MODEL.gguf [MODEL.gguf ...] [--prompts 20] [--length 16] [--threads 2] [--kv f16,int8]
The measure: root mean square over a prompt's logits of the difference, median over the prompts; all tokens in one batch
(prefill) and one at a time (decode). Beside int8 KV stands llama.cpp's q8_0 KV. PEER_DIR is what build_llama_cpp.sh made.
The exact logits are those of the reference backend, with an f32 KV cache, on a copy of the model in F32, which takes four
bytes a weight of the temporary folder for a while. A model of 600 million weights takes a minute and a half.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from result import write

from engine.evaluate.forward import Forward
from engine.runtime.config import EngineConfig
from engine.runtime.load import load

BAR = 1.05
"""The most that the error may be, as a multiple of llama.cpp's."""
PEER_KV = {"f16": "f16", "f32": "f32", "int16": "f16", "int8": "q8_0"}
Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 16


class Runner:
    """Feeds chosen tokens through a session and takes the logits of every one."""

    def __init__(self, model: Path, backend: str, kv: str, threads: int, length: int) -> None:
        self._forward = Forward(load(
            EngineConfig(model=model, backend=backend, kv_cache_dtype=kv, threads=threads, max_model_len=length + BLOCK,
                         max_num_seqs=length, block_size=BLOCK, keep=("logits",))
        ))  # fmt: skip

    def chunk(self, ids: list[int], start: int) -> Array:
        """Logits f32 [tokens, vocabulary] of ids at positions ``start`` and on."""
        return self._forward.run(ids, start, np.arange(len(ids), dtype=np.int32))["logits"]

    def both(self, ids: list[int]) -> tuple[Array, Array]:
        whole = self.chunk(ids, 0).copy()
        return whole, np.concatenate([self.chunk([token], n) for n, token in enumerate(ids)])

    def close(self) -> None:
        self._forward.close()


def rms(a: Array, b: Array) -> float:
    return float(np.sqrt(np.mean((a.astype(np.float64) - b) ** 2)))


def exact_logits(model: Path, prompts: list[list[int]], threads: int) -> list[Array]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "f32.gguf"
        subprocess.run(
            [sys.executable, "-m", "engine.cli.main", "quantize", model, copy, "-t", "F32"],
            check=True,
            capture_output=True,
        )
        reference = Runner(copy, "reference", "f32", threads, max(map(len, prompts)))
        found = [reference.chunk(ids, 0).copy() for ids in prompts]
        reference.close()
    return found


def measure(
    model: Path, prompts: list[list[int]], exact: list[Array], peer: Path, threads: int, kv: str
) -> dict[str, Any]:
    ours = Runner(model, "cpu", kv, threads, max(map(len, prompts)))
    mine = [ours.both(ids) for ids in prompts]
    ours.close()
    theirs = peer_logits(model, prompts, peer, threads, PEER_KV[kv])
    vocab = exact[0].shape[-1]
    found: dict[str, Any] = {
        "model": model.name,
        "kv": kv,
        "logits_rms": float(np.median([rms(e, np.zeros_like(e)) for e in exact])),
    }
    for n, part in enumerate(("prefill", "decode")):
        own = float(np.median([rms(pair[n], e) for pair, e in zip(mine, exact, strict=True)]))
        other = float(np.median([rms(theirs[f"{part}_{i}"][:, :vocab], e) for i, e in enumerate(exact)]))
        found[part] = {"engine": own, "llama.cpp": other, "ratio": own / other, "met": own <= BAR * other}
    return found


def peer_logits(model: Path, prompts: list[list[int]], peer: Path, threads: int, kv: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        listed, out = Path(folder) / "prompts.json", Path(folder) / "logits.npz"
        listed.write_text(json.dumps(prompts))
        script = Path(__file__).parent / "llama_logits.py"
        command: list[str | Path] = [peer / "venv/bin/python", script, model, listed, out, str(threads), kv]
        subprocess.run(
            command, check=True, env={**os.environ, "LLAMA_CPP_LIB_PATH": str(peer / "bin"), "PYTHONPATH": ""}
        )
        return {name: array for name, array in np.load(out).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", default="f16,int8")
    args = parser.parse_args()
    rng = np.random.default_rng(1)
    cases = []
    for model in args.models:
        prompts = [rng.integers(1000, 30000, args.length).tolist() for _ in range(args.prompts)]
        exact = exact_logits(model, prompts, args.threads)
        for kv in args.kv.split(","):
            cases.append(measure(model, prompts, exact, args.peer, args.threads, kv))
            print(json.dumps(cases[-1]), flush=True)
    print(write("accuracy", {"prompts": args.prompts, "length": args.length, "bar": BAR, "cases": cases}))


if __name__ == "__main__":
    main()
