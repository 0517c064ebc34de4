"""Sampling and beam-search parameters, the search itself, and logits processors."""

from .beam import BeamSearchParams
from .params import SamplingParams
from .structured import StructuredOutputs

__all__ = ["BeamSearchParams", "SamplingParams", "StructuredOutputs"]
