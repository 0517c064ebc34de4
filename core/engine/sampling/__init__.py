"""Sampling parameters, and what they become in a step's arrays."""

from .params import SamplingParams
from .structured import StructuredOutputs

__all__ = ["SamplingParams", "StructuredOutputs"]
