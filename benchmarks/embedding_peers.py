"""Encoders beside llama.cpp on the CPU: the same file, the same threads, in turn in one run.

usage: embedding_peers.py PEER_DIR MODEL.gguf [MODEL.gguf ...] [--threads 2] [--rounds 5] [--tokens 512]
PEER_DIR is what build_llama_cpp.sh made. A MODEL is an encoder, such as `engine quantize` makes of a folder; random weights do.
llama-bench computes one text at a time (-embd 1), with flash attention and without, and the faster counts; the engine is given
eight texts, which run in turn where a step has room for one. A ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from bars import Work
from result import write
from sides import LlamaCpp

from engine import LLM

TEXTS = 8


class LlamaEmbeddings(LlamaCpp):
    """llama-bench of a model without a head."""

    def _single(self, works: Any) -> list[Any]:
        return [*super()._single(works), "-embd", "1"]


def engine_rate(llm: LLM, texts: list[list[int]]) -> float:
    start = time.perf_counter()
    llm.embed(texts, "mean")
    return sum(map(len, texts)) / (time.perf_counter() - start)


def measure(model: Path, peer: LlamaEmbeddings, args: argparse.Namespace) -> dict[str, Any]:
    rng, work = np.random.default_rng(0), Work(1, 0, args.tokens, 0)
    settings = {setting: 0.0 for setting in peer.settings()}
    ours, theirs = [], []
    with LLM(model, backend="cpu", threads=args.threads) as llm:
        vocab = llm.engine.loaded.program.vocab
        texts = [rng.integers(0, vocab, args.tokens).tolist() for _ in range(TEXTS)]
        llm.embed(texts[:1], "mean")
        for _ in range(args.rounds):
            ours.append(engine_rate(llm, texts))
            found = {setting: peer.rates(model, [work], setting)[work] for setting in settings}
            theirs.append(max(found.values()))
            print(f"{model.name}: engine {ours[-1]:.0f} tok/s, llama.cpp {theirs[-1]:.0f}", flush=True)
    return {
        "model": model.stem,
        "engine": statistics.median(ours),
        "llama.cpp": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    peer = LlamaEmbeddings(args.peer, args.threads, 1)
    cases = [measure(model, peer, args) for model in args.models]
    shared = {"threads": args.threads, "rounds": args.rounds, "tokens": args.tokens}
    print(write("embedding-peers", {**shared, "cases": cases}))


if __name__ == "__main__":
    main()
