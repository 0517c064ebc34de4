"""What a model's text says: reasoning, content and tool calls, taken apart while it comes."""

from .calls import TAG, marks_are_special, read_calls
from .harmony import FINAL, HarmonyReading, speaks_harmony
from .json_parts import PartialCall, Tools
from .reader import Parts, Reader, Reading
from .reasoning import MARKS as REASONING
from .reasoning import closes_reasoning, open_mark, reasons, split_reasoning, thoughts_are_special
from .tagged_calls import MINIMAX, SEED, typed, types_of

__all__ = [
    "FINAL",
    "MINIMAX",
    "REASONING",
    "SEED",
    "TAG",
    "HarmonyReading",
    "PartialCall",
    "Parts",
    "Reader",
    "Reading",
    "Tools",
    "closes_reasoning",
    "marks_are_special",
    "open_mark",
    "read_calls",
    "reasons",
    "speaks_harmony",
    "split_reasoning",
    "thoughts_are_special",
    "typed",
    "types_of",
]
