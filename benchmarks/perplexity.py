"""Perplexity of `engine perplexity` beside transformers' in f32, on the same windows of the same text.

usage: perplexity.py MODEL.gguf HF_FOLDER TEXT [--context 512] [--characters N] [--kv f32,f16,int8]
HF_FOLDER holds the same model with its tokenizer, for transformers, which needs torch. --characters: the text's beginning
only. Windows do not overlap, and the first token of each is not predicted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from result import write

BATCH = 16


def engine(model: Path, text: Path, context: int, kv: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "engine.cli.main", "perplexity", model, text, "--context", context]
    command += ["--kv-dtype", kv, "--json"]
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def transformers_perplexity(folder: Path, text: Path, context: int) -> tuple[float, int]:
    """The perplexity, and how many tokens were predicted; sums of logarithms in f64."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text.read_text(encoding="utf-8")).input_ids
    windows = [ids[i : i + context] for i in range(0, len(ids), context)]
    total, count = 0.0, 0
    for _, same in itertools.groupby(windows, len):
        equal = list(same)
        for start in range(0, len(equal), BATCH):
            rows = torch.tensor(equal[start : start + BATCH])
            with torch.no_grad():
                logprobs = torch.log_softmax(model(rows).logits[:, :-1].double(), -1)
            total -= float(logprobs.gather(2, rows[:, 1:, None]).sum())
            count += rows[:, 1:].numel()
    return math.exp(total / count), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--characters", type=int)
    parser.add_argument("--kv", default="f32,f16,int8")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / args.text.name
        text.write_text(args.text.read_text(encoding="utf-8")[: args.characters], encoding="utf-8")
        theirs, tokens = transformers_perplexity(args.folder, text, args.context)
        print(f"transformers: {theirs:.6f}", flush=True)
        cases = []
        for kv in args.kv.split(","):
            ours = engine(args.model, text, args.context, kv)
            if ours["tokens"] != tokens:
                raise SystemExit(f"The engine predicted {ours['tokens']} tokens, transformers {tokens}.")
            cases.append({"kv": kv, "engine": ours["perplexity"], "difference": ours["perplexity"] / theirs - 1})
            print(json.dumps(cases[-1]), flush=True)
    settings = {"model": args.model.name, "text": args.text.name, "context": args.context, "tokens": tokens}
    print(write("perplexity", {**settings, "transformers": theirs, "cases": cases}))


if __name__ == "__main__":
    main()
