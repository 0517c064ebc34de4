"""Sampling parameters, and what they become in a step's arrays."""

from .params import SamplingParams

__all__ = ["SamplingParams"]
