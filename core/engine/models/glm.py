"""GLM 4 of 2024 (arXiv 2406.12793): what GLM 4 of 2025 is, without norms after attention and feed-forward."""

from __future__ import annotations

from .glm4 import HF_DEFAULTS, HF_NAMES, build, configure

__all__ = ["HF_DEFAULTS", "HF_NAMES", "build", "configure"]
