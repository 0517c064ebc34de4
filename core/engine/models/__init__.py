"""Architecture families, one file each; ``load_model`` finds the one of a checkpoint."""

from .registry import FAMILIES, Model, load_model

__all__ = ["FAMILIES", "Model", "load_model"]
