"""The built-in demo model: a small Llama that ``tools/train_demo.py`` trains on text of the repository's own."""

from __future__ import annotations

from pathlib import Path

MODEL = Path(__file__).with_name("demo.gguf")
"""Q8_0, with a tokenizer and a chat template of its own."""
