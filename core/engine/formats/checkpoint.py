"""A checkpoint: a model's tensors and description as they lie on disk, memory-mapped, in one shape for GGUF and HF."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from engine.errors import FormatError
from engine.formats.mapping import POINTER_BYTES, read_errors, refuse_pointer, release
from engine.formats.quantformats import Bytes, Floats, Format

if TYPE_CHECKING:
    from engine.formats.chat_template import ChatTemplate
    from engine.formats.pooling import Embedding
    from engine.formats.ranking_files import RankingFiles
    from engine.formats.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class InputSpec:
    """What a matrix [N, K] asks of the rows that it multiplies.

    columns: i32 [K], a permutation: k of the matrix stands for this column of the input; None for their own order.
    quantized: whether the input may be rounded to 8 bits ("forbidden", "allowed"), also to E4M3 ("fp8"), or must be to
    integers ("required").
    scale: the step of that rounding where the checkpoint fixes it; 0.0 where it is found for each row.
    """

    columns: npt.NDArray[np.int32] | None = None
    quantized: Literal["forbidden", "allowed", "fp8", "required"] = "allowed"
    scale: float = 0.0


ANY_INPUT = InputSpec()


@dataclass(frozen=True, eq=False)
class Tensor:
    """A stored tensor.  shape: row-major, outermost first; data: read-only uint8 [nbytes], mapped from the file."""

    name: str
    shape: tuple[int, ...]
    format: Format
    data: Bytes
    input: InputSpec = ANY_INPUT

    def rows(self, start: int = 0, stop: int | None = None) -> Bytes:
        """uint8 [rows, row_bytes] of the flattened leading axes, a view of the mapping."""
        count = math.prod(self.shape[:-1])
        rows = self.data.reshape(count, self.format.row_bytes(self.shape[-1] if self.shape else 1))
        return rows[start:stop]

    def dense(self) -> Floats:
        """f32 of `shape`, decoded: a copy."""
        return self.format.decode(self.rows()).reshape(self.shape)

    def release(self) -> None:
        """The tensor has been read: its pages need not stay in memory."""
        release(self.data)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.data.nbytes


@dataclass(frozen=True, eq=False, kw_only=True)
class ComposedTensor(Tensor):
    """A weight that several stored tensors make: codes, scales, zero points. It is read as rows of blocks like any other.

    parts: what it is made of.  read: (start, stop) -> uint8 [stop - start, row_bytes] in blocks of `format`, made anew
    each time.  `data` is empty.
    """

    data: Bytes = field(default_factory=lambda: np.empty(0, np.uint8), init=False, repr=False)
    parts: tuple[Tensor, ...]
    read: Callable[[int, int], Bytes] = field(repr=False)

    def rows(self, start: int = 0, stop: int | None = None) -> Bytes:
        """uint8 [rows, row_bytes] of the flattened leading axes: a copy."""
        start, stop, _ = slice(start, stop).indices(math.prod(self.shape[:-1]))
        return self.read(start, stop)

    def release(self) -> None:
        for part in self.parts:
            part.release()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened model.

    architecture: GGUF's general.architecture or the model_type of config.json.
    metadata: GGUF's keys, read when asked for (number arrays as NumPy arrays, others as lists), or config.json.
    tensors: by name, in the file's order; empty for a GGUF that holds a vocabulary only.
    eos_ids: ids that end a generation as the model's files list them (the tokenizer may know more).
    sampling: parameters that the makers recommend, by the names of SamplingParams.
    """

    path: Path
    kind: Literal["gguf", "hf"]
    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    eos_ids: frozenset[int]
    sampling: Mapping[str, float]
    load_tokenizer: Callable[[], Tokenizer]
    load_chat_template: Callable[[], ChatTemplate | None]
    load_embedding: Callable[[], Embedding]
    load_ranking: Callable[[], RankingFiles]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.load_tokenizer()

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        return self.load_chat_template()

    @cached_property
    def _embedding(self) -> Embedding:
        return self.load_embedding()

    @cached_property
    def _ranking(self) -> RankingFiles:
        return self.load_ranking()

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, built once; TokenizerError if the files describe none."""
        return self._tokenizer

    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, or None if it has none."""
        return self._chat_template

    def embedding(self) -> Embedding:
        """How the files would have texts embedded; FormatError where they want what is not there."""
        return self._embedding

    def ranking(self) -> RankingFiles:
        """How the files would have a query and a document scored; FormatError where they are damaged."""
        return self._ranking


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a GGUF file (any part of a split one) or a Hugging Face folder; FormatError if it is neither or damaged."""
    from engine.formats.gguf import MAGIC, open_gguf
    from engine.formats.hf import open_folder

    path = Path(path)
    wanted = "give a GGUF file or a folder with config.json and safetensors"
    with read_errors(path):
        if path.is_dir():
            return open_folder(path)
        if not path.is_file():
            raise FormatError(f"{path} is neither a file nor a folder; {wanted}.")
        with path.open("rb") as file:
            beginning = file.read(POINTER_BYTES)
    if not beginning.startswith(MAGIC):
        refuse_pointer(path, beginning)
        raise FormatError(f"{path} is not a GGUF file; {wanted}.")
    return open_gguf(path)
