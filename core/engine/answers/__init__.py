"""What a model's text says: reasoning, content and tool calls, taken apart while it comes."""

from .calls import TAG, marks_are_special, read_calls
from .harmony import HarmonyReading, speaks_harmony
from .json_parts import PartialCall
from .reader import Parts, Reader, Reading
from .reasoning import CLOSE, OPEN, split_reasoning

__all__ = [
    "CLOSE",
    "OPEN",
    "TAG",
    "HarmonyReading",
    "PartialCall",
    "Parts",
    "Reader",
    "Reading",
    "marks_are_special",
    "read_calls",
    "speaks_harmony",
    "split_reasoning",
]
