"""Model files as they lie on disk: tensors, quantized formats, tokenizers and chat templates, from GGUF and HF."""

from engine.formats.checkpoint import Checkpoint, ComposedTensor, InputSpec, Tensor, open_checkpoint
from engine.formats.quantformats import FORMATS, Format

__all__ = ["FORMATS", "Checkpoint", "ComposedTensor", "Format", "InputSpec", "Tensor", "open_checkpoint"]
