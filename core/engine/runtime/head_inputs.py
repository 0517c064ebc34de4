"""The arrays that say how each row of the head is sampled: most steps decode the sequences of the step before, and have them
again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_

import numpy as np

from ..backend.v1 import Array
from ..sampling import SamplingParams
from ..sampling.grammar import Matcher
from ..sampling.processors import Bias

I32, F32, U32 = np.int32, np.float32, np.uint32
NO_BIAS: Bias = (np.zeros(0, I32), np.zeros(0, F32))
SCORING = SamplingParams(temperature=0.0)
_F32_PARAMS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


@dataclass(frozen=True)
class RowParams:
    """What the head needs of a sequence, worked out once.

    ``banned`` are the ids that may not come before ``min_tokens``; ``want`` is how many best logprobs are given beside
    the token's own, -1 for none; ``candidates`` a beam's, 0 if it is none; ``prompt_ids`` are there where the prompt is
    scored.
    """

    params: SamplingParams
    prompt_length: int
    branch: int
    seed: int
    banned: tuple[int, ...] = ()
    bias: Bias = NO_BIAS
    matcher: Matcher | None = None
    want: int = -1
    candidates: int = 0
    prompt_ids: tuple[int, ...] = ()
    target: int = -1

    @property
    def steady(self) -> bool:
        """Whether no token changes what its next row is asked."""
        return self.matcher is None and self.params.min_tokens == 0

    def scoring(self, position: int) -> RowParams:
        """The row whose logprob is that of the prompt token at ``position``."""
        want = self.params.prompt_logprobs
        assert want is not None
        return RowParams(
            SCORING, self.prompt_length, self.branch, self.seed, want=want, target=self.prompt_ids[position]
        )

    def with_bias(self, more: Sequence[Bias]) -> RowParams:
        ids, values = zip(self.bias, *more, strict=True)
        return replace(self, bias=(np.concatenate(ids), np.concatenate(values)))

    def biased(self, known: int) -> Bias:
        """What is added to the logits of the token after ``known`` ones."""
        only_ends = self.matcher is not None and self.matcher.only_ends
        if only_ends or known - self.prompt_length >= self.params.min_tokens:
            return self.bias
        ids, values = self.bias
        banned = np.array(self.banned, I32)
        return np.concatenate([ids, banned]), np.concatenate([values, np.full(len(banned), -np.inf, F32)])


@dataclass(frozen=True)
class HeadArrays:
    """``arrays`` by the names of a step's inputs. Counts: ``wanted`` of the best logprobs or a beam's candidates that a row
    wants at most, ``biased`` tokens and ``masked`` rows."""

    arrays: Mapping[str, Array]
    wanted: int
    biased: int
    masked: int


class HeadInputs:
    """Makes a step's arrays of rows, whose masks have ``mask_words`` words; those of the last step again where all rows have the
    same parameters, the same objects, and these are steady. Nobody writes to what it gives."""

    def __init__(self, mask_words: int) -> None:
        self._mask_words = mask_words
        self._params: Sequence[RowParams] = ()
        self._sampling = _sampling(())
        self._whole: HeadArrays | None = None

    def of(self, params: Sequence[RowParams], known: Sequence[int | None]) -> HeadArrays:
        """``known``: of each row how many tokens of the sequence are before the one it gives; None where it gives none."""
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        if same and self._whole is not None and None not in known:
            return self._whole
        if not same:
            self._params, self._sampling = tuple(params), _sampling(params)
        arrays = dict(self._sampling)
        masked = _masks(arrays, params, self._mask_words)  # first: it tells which texts can only end
        rows = zip(params, known, strict=True)
        biased = _biases(arrays, [NO_BIAS if count is None else row.biased(count) for row, count in rows])
        wanted = max(arrays[name].max(initial=0) for name in ("want_logprobs", "candidates"))
        made = HeadArrays(arrays, int(wanted), biased, masked)
        self._whole = made if all(row.steady for row in params) and None not in known else None
        return made


def _sampling(rows: Sequence[RowParams]) -> dict[str, Array]:
    params = [row.params for row in rows]
    arrays: dict[str, Array] = {
        "prompt_lengths": np.array([row.prompt_length for row in rows], I32),
        "branches": np.array([row.branch for row in rows], U32),
        "seeds": np.array([(row.seed & 0xFFFFFFFF, row.seed >> 32) for row in rows], U32).reshape(-1, 2),
        "want_logprobs": np.array([row.want for row in rows], I32),
        "candidates": np.array([row.candidates for row in rows], I32),
        "targets": np.array([row.target for row in rows], I32),
    }
    for name in ("top_k", "no_repeat_ngram_size"):
        arrays[name] = np.array([getattr(p, name) for p in params], I32)
    for name in _F32_PARAMS:
        arrays[name] = np.array([getattr(p, name) for p in params], F32)
    return arrays


def _masks(arrays: dict[str, Array], rows: Sequence[RowParams], words: int) -> int:
    """A mask for each row that has a grammar, in its state after the last token."""
    matchers = [row.matcher for row in rows]
    arrays["mask_rows"] = np.full(len(rows), -1, I32)
    having = [n for n, matcher in enumerate(matchers) if matcher is not None]
    arrays["mask_rows"][having] = np.arange(len(having), dtype=I32)
    arrays["masks"] = np.zeros((len(having), words), U32)
    for n, mask in zip(having, arrays["masks"], strict=True):
        if (matcher := matchers[n]) is not None:
            matcher.fill(mask)
    return len(having)


def _biases(arrays: dict[str, Array], rows: Sequence[Bias]) -> int:
    offsets = np.zeros(len(rows) + 1, I32)
    np.cumsum([len(ids) for ids, _ in rows], out=offsets[1:])
    arrays["bias_offsets"] = offsets
    ids, values = zip(NO_BIAS, *(bias for bias in rows if len(bias[0])), strict=True)
    arrays["bias_ids"], arrays["bias_values"] = np.concatenate(ids), np.concatenate(values)
    return int(offsets[-1])
