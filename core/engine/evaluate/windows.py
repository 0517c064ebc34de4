"""How a long text is cut into windows that a model's context holds, and its logits for them.

The definition is that of the transformers documentation ("Perplexity of fixed-length models"): windows of ``context`` tokens
begin every ``stride`` tokens; each predicts its tokens that no window before it held, all from what the window has before them.
A window's first token has nothing before it, and is predicted by none but a window that overlaps. By default windows do not
overlap (stride = context). The text is one stream, with what the tokenizer puts around a text at its beginning and end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backend.v1 import Array
from ..errors import RequestError, UsageError
from ..formats import open_checkpoint
from ..models import load_model
from ..runtime.config import EngineConfig
from ..runtime.load import Loaded, Progress, load
from .forward import Forward

DEFAULT_CONTEXT = 512
_LOGIT_BYTES = 64 << 20
"""Memory for the logits of a chunk."""


@dataclass(frozen=True)
class Window:
    """Tokens ``begin`` .. ``end`` of the text, of which ``first`` .. ``end`` are predicted."""

    begin: int
    end: int
    first: int


def windows(count: int, context: int, stride: int) -> Iterator[Window]:
    """The windows over ``count`` tokens; see above."""
    seen = 0
    for begin in range(0, count, stride):
        end = min(begin + context, count)
        yield Window(begin, end, max(seen, begin + 1))
        seen = end
        if end == count:
            return


def choose_context(model: Path, context: int | None) -> int:
    """The tokens of a window: as asked for, or 512 or what the model has if that is less."""
    most = load_model(open_checkpoint(model)).config.max_context
    if context is not None and not 2 <= context <= most:
        raise UsageError(f"Windows of {context} are asked for, but the model allows 2 to {most} tokens.")
    return context or min(DEFAULT_CONTEXT, most)


def load_for_logits(model: Path, context: int, progress: Progress | None, **settings: Any) -> Loaded:
    """The model with room for one window, its logits kept; ``settings`` are keywords of ``EngineConfig``."""
    vocab = load_model(open_checkpoint(model)).config.vocab
    rows = max(1, min(512, _LOGIT_BYTES // (4 * vocab), settings.get("max_num_batched_tokens") or 512))
    own = {"max_model_len": context, "kv_cache_tokens": context, "max_num_seqs": rows, "max_num_batched_tokens": rows}
    return load(EngineConfig(model=model, keep=("logits",), **(settings | own)), progress)


def read_tokens(loaded: Loaded, text: str) -> list[int]:
    """The text's ids. Control tokens written in it are read as such, as transformers reads them, and the tokenizer puts around
    it what it puts around a text. RequestError unless there is something to predict."""
    ids = loaded.checkpoint.tokenizer().encode(text, add_special=True, parse_special=True)
    if len(ids) < 2:
        raise RequestError("The text is too short: at least 2 tokens are needed to predict one from another.")
    wrong = next((token for token in ids if token >= loaded.program.vocab), None)
    if wrong is not None:
        raise RequestError(
            f"The text has the token {wrong}, but the model's vocabulary ends at {loaded.program.vocab}."
        )
    return ids


def logits(forward: Forward, loaded: Loaded, ids: Sequence[int], window: Window) -> Iterator[tuple[Array, Array]]:
    """For the predicted tokens of a window, in chunks: logits f32 [n, V] and the ids i32 [n] that came."""
    most = loaded.config.max_num_seqs
    last = window.end - 1  # the last token predicts nothing
    for start in range(window.begin, last, most):
        stop = min(start + most, last)
        rows = np.arange(max(window.first - 1, start), stop, dtype=np.int32)
        found = forward.run(ids[start:stop], start - window.begin, rows - np.int32(start))
        if rows.size:
            yield found["logits"], np.array(ids[rows[0] + 1 : stop + 1], np.int32)
