"""Trains the built-in demo model on text that tools/demo makes, and writes it as a Q8_0 GGUF.

usage: python tools/train_demo.py [--work FOLDER] [--steps N] [--threads N] [--quick]

A checkpoint is written every 50 steps and taken up again. The learning rate is constant until 30 % before the end, so a
run that is taken up with fewer --steps, before it falls, is the same as one that had them from the beginning.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from datetime import date
from pathlib import Path
from typing import Any

import tokenizers
import torch
from demo.corpus import Course, conversation
from demo.export import write_gguf
from demo.model import Demo, Shape
from demo.tokens import Rows, rows_of, train_tokenizer
from torch.nn import functional

SEED = 20261121
HELD_OUT_SEED = SEED + 1  # conversations that training never sees
CONVERSATIONS = 40  # a step
STEPS = 4400
CLOSING = 400  # steps more
LONGEST = 768  # most tokens of a conversation
RATE, MUON_RATE = 4e-3, 8e-3
TOKENIZER_CONVERSATIONS = 20_000
MEASURE_EVERY = 50
ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "core/engine/demo/demo.gguf"
CURVE = ROOT / "tools/demo/training.json"


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate: up over 50 steps, then 1, then down to 0 over the last 30 %; in what follows
    from a quarter down again."""
    if step >= steps:
        return 0.25 * max(0.05, 1 - (step - steps) / CLOSING)
    return min(1.0, (step + 1) / 50, max(0.02, (steps - step) / (0.3 * steps)))


class Training:
    """The network, its optimizers, and how far they have come."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, steps: int, closing: int = CLOSING) -> None:
        torch.manual_seed(SEED)
        self.tokenizer = tokenizer
        self.steps = steps
        self.course = Course(SEED, steps, CONVERSATIONS, closing=closing)
        self.model = Demo(Shape(tokenizer.get_vocab_size()))
        inner = [p for name, p in self.model.named_parameters() if p.ndim == 2 and name != "embedding"]
        others = [p for name, p in self.model.named_parameters() if p.ndim != 2 or name == "embedding"]
        self.optimizers: list[tuple[float, torch.optim.Optimizer]] = [
            (MUON_RATE, torch.optim.Muon(inner, lr=MUON_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")),
            (RATE, torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)),
        ]
        self.step = 0
        self.history: list[dict[str, float]] = []
        self.seconds = 0.0

    def advance(self) -> float:
        """One step; its loss."""
        groups = rows_of(self.tokenizer, self.course.step(self.step), LONGEST)
        learned = sum(int(rows.learned[:, 1:].sum()) for rows in groups)
        total = 0.0
        for rows in groups:
            loss = loss_sum(self.model, rows) / learned
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        share = schedule(self.step, self.steps)
        for rate, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return total

    @torch.no_grad()
    def held_out(self) -> float:
        """Loss a token of answers in 128 conversations that training never sees."""
        groups = rows_of(self.tokenizer, [conversation(HELD_OUT_SEED, i) for i in range(128)], LONGEST)
        total = sum(float(loss_sum(self.model, rows)) for rows in groups)
        return total / sum(int(rows.learned[:, 1:].sum()) for rows in groups)

    def state(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("step", "history", "seconds")}
        return kept | {"model": self.model.state_dict(), "optimizers": [o.state_dict() for _, o in self.optimizers]}

    def restore(self, state: dict[str, Any]) -> None:
        for name in ("step", "history", "seconds"):
            setattr(self, name, state[name])
        self.model.load_state_dict(state["model"])
        for (_, optimizer), kept in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)


def loss_sum(model: Demo, rows: Rows) -> torch.Tensor:
    """Sum of the losses of what is learned, f32."""
    ids, learned = torch.from_numpy(rows.ids), torch.from_numpy(rows.learned)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids[:, :-1], learned[:, 1:])
    return functional.cross_entropy(logits, ids[:, 1:][learned[:, 1:]], reduction="sum")


def train(training: Training, checkpoint: Path) -> None:
    """Steps to the end, with a line, a point of the curve and a checkpoint now and then."""
    window: list[float] = []
    began, kept = time.process_time(), training.seconds
    while training.step < training.course.total:
        window.append(training.advance())
        training.seconds = kept + time.process_time() - began
        if training.step % MEASURE_EVERY == 0 or training.step == training.course.total:
            point = {
                "step": training.step,
                "loss": round(sum(window) / len(window), 4),
                "held_out": round(training.held_out(), 4),
                "cpu_s": round(training.seconds),
            }
            window.clear()
            training.history.append(point)
            print(json.dumps(point), flush=True)
            torch.save(training.state(), checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").rename(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="folder of tokenizer and checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", type=Path, default=TARGET, help="the GGUF to write")
    parser.add_argument("--curve", type=Path, default=CURVE, help="the JSON of losses to write")
    parser.add_argument("--quick", action="store_true", help="three steps, to see that all works")
    options = parser.parse_args()
    for folder in (options.work, options.target.parent):
        folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    tokenizer_file, checkpoint = options.work / "tokenizer.json", options.work / "checkpoint.pt"
    if tokenizer_file.exists():
        tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    else:
        tokenizer = train_tokenizer(SEED, 500 if options.quick else TOKENIZER_CONVERSATIONS)
        tokenizer.save(str(tokenizer_file))
    training = Training(tokenizer, 3, 0) if options.quick else Training(tokenizer, options.steps)
    if checkpoint.exists():
        training.restore(torch.load(checkpoint, weights_only=True))
    train(training, checkpoint)
    write_gguf(training.model, tokenizer, options.target)
    write_curve(training, options)


def write_curve(training: Training, options: argparse.Namespace) -> None:
    curve = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}, bfloat16 products",
        "seed": SEED,
        "steps": training.steps,
        "conversations_a_step": CONVERSATIONS,
        "cpu_s": round(training.seconds),
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "curve": training.history,
    }
    options.curve.write_text(json.dumps(curve, indent=1) + "\n")


if __name__ == "__main__":
    main()
