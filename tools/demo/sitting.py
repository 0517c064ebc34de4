"""The demo model on the CPU, and its answers to questions asked alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from engine import LLM, SamplingParams
from engine.demo import MODEL


class Sitting:
    """A loaded demo; calls answer each question in a conversation of its own."""

    def __init__(self, model: Path = MODEL) -> None:
        self.llm = LLM(model, backend="cpu")

    def __enter__(self) -> Sitting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.llm.close()

    def __call__(self, questions: Sequence[str], temperature: float = 0.0, seed: int = 0) -> list[str]:
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=300)
        talks = [[{"role": "user", "content": question}] for question in questions]
        return [output.outputs[0].text for output in self.llm.chat(talks, params)]
