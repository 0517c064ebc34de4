"""What a model's text says: reasoning, content and tool calls, taken apart while it comes."""

from .calls import PartialCall, read_calls
from .reader import Parts, Reader
from .reasoning import CLOSE, OPEN, split_reasoning

__all__ = ["CLOSE", "OPEN", "PartialCall", "Parts", "Reader", "read_calls", "split_reasoning"]
