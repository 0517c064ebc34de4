"""Model files as they lie on disk: tensors, quantized formats, tokenizers and chat templates, from GGUF and HF."""

from engine.formats.checkpoint import ANY_INPUT, Checkpoint, ComposedTensor, InputSpec, Tensor, open_checkpoint
from engine.formats.quantformats import FORMATS, Format

__all__ = ["ANY_INPUT", "FORMATS", "Checkpoint", "ComposedTensor", "Format", "InputSpec", "Tensor", "open_checkpoint"]
