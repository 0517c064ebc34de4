"""The stored tensors of a checkpoint while weights are composed of them: taken out by name, with dtype and shape checked."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import FormatError
from engine.formats.checkpoint import Tensor

Shape = tuple[int | None, ...]
_OF_THE_CACHE = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")


@dataclass(frozen=True)
class Parts:
    """tensors: what is there under each name: as stored, or composed already."""

    tensors: dict[str, Tensor]

    def stems(self, ending: str) -> list[str]:
        """The beginnings of the names with this ending."""
        return [name.removesuffix(ending) for name in self.tensors if name.endswith(ending)]

    def drop_cache_scales(self) -> None:
        """Takes out what is of a quantized KV cache, which is kept in the precision that the user asks for."""
        for name in [name for name in self.tensors if name.endswith(_OF_THE_CACHE)]:
            del self.tensors[name]

    def take(self, name: str, formats: tuple[str, ...], *shapes: Shape) -> Tensor:
        """Takes a tensor of one of the formats and shapes (None: any size but 0) out; FormatError for another, or for none."""
        tensor = self.maybe(name, formats, *shapes)
        if tensor is None:
            raise FormatError(
                f"The checkpoint lacks the tensor {name}, without which its quantized weight has no values."
            )
        return tensor

    def maybe(self, name: str, formats: tuple[str, ...], *shapes: Shape) -> Tensor | None:
        """The same for a tensor that may be absent."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            return None
        if tensor.format.name not in formats or not any(_fits(tensor.shape, shape) for shape in shapes):
            wanted = " or ".join(str([size or "any" for size in shape]).replace("'", "") for shape in shapes)
            raise FormatError(
                f"The tensor {name} is {tensor.format.name} {list(tensor.shape)}; it must be {' or '.join(formats)} {wanted}."
            )
        return tensor

    def put(self, tensor: Tensor) -> None:
        """Adds a composed weight; FormatError if there is a tensor of this name."""
        if tensor.name in self.tensors:
            raise FormatError(f"The checkpoint holds the weight {tensor.name} twice, quantized and not.")
        self.tensors[tensor.name] = tensor


def _fits(shape: tuple[int, ...], wanted: Shape) -> bool:
    return len(shape) == len(wanted) and all(
        s == w if w is not None else s > 0 for s, w in zip(shape, wanted, strict=True)
    )
