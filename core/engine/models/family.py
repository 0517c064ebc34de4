"""What sets an architecture family apart before its file is read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """``gguf`` and ``hf`` are the names that the formats give the architecture; ``interleaved`` tells how GGUF files pair
    rotary dimensions (Hugging Face files pair halves)."""

    name: str
    gguf: tuple[str, ...]
    hf: tuple[str, ...]
    interleaved: bool = False
    acts: tuple[str, ...] = ("silu",)
    """The activations that it may have; GGUF files, most of which do not name one, have the first."""
    eps: float = 1e-6
    """Of its norms, where config.json does not say."""
    rotary: bool = True
    windowed: bool = False
    """Whether some or all of its layers may attend to a sliding window."""
    window: int = 0
    """The window of GGUF files that name none."""
    full_every: int = 0
    """Each so many-th layer attends to everything where the others have a window; 0: all have it."""
    full_first: bool = False
    """Whether config.json's max_window_layers counts first layers without a window; others ignore the key."""
