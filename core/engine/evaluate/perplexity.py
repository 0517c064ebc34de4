"""Perplexity of a model on a text, and how far one model's predictions are from another's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..backend.v1 import Array
from ..errors import RequestError
from ..runtime.load import Loaded, Progress
from .forward import Forward
from .windows import logits, windows


@dataclass(frozen=True)
class Perplexity:
    """``perplexity`` = exp(mean negative log-likelihood) of ``tokens`` predicted tokens; ``error``: its standard error, taking
    tokens as independent."""

    perplexity: float
    error: float
    tokens: int


@dataclass(frozen=True)
class Divergence:
    """Of a model's predictions from a base model's, over the same tokens, in nats: KL(base || model) = sum of p_base *
    (log p_base - log p_model). ``same_top``: the share of tokens whose likeliest id is the same."""

    mean: float
    error: float
    p99: float
    largest: float
    same_top: float


def perplexity(
    loaded: Loaded, ids: Sequence[int], context: int, stride: int, progress: Progress | None = None
) -> Perplexity:
    """Over the windows of ``windows.windows``. RequestError where the logits are not finite."""
    losses = []
    with Forward(loaded) as forward:
        for window in windows(len(ids), context, stride):
            for found, targets in logits(forward, loaded, ids, window):
                losses.append(_losses(log_softmax(found), targets))
            if progress is not None:
                progress("Predicting", window.end, len(ids))
    return _perplexity(np.concatenate(losses))


def compare(
    base: Loaded, model: Loaded, ids: Sequence[int], context: int, stride: int, progress: Progress | None = None
) -> tuple[Perplexity, Perplexity, Divergence]:
    """Perplexities of the base and of the model, and the divergence of the second's predictions from the first's. RequestError
    where their vocabularies differ."""
    if base.program.vocab != model.program.vocab or not _same_tokens(base, model):
        raise RequestError(
            f"{base.checkpoint.path} and {model.checkpoint.path} have different vocabularies; only models of one vocabulary"
            " can be compared."
        )
    kls, tops, losses = [], [], ([], [])  # type: tuple[list[Array], list[Array], tuple[list[Array], list[Array]]]
    with Forward(base) as first, Forward(model) as second:
        for window in windows(len(ids), context, stride):
            both = zip(logits(first, base, ids, window), logits(second, model, ids, window), strict=True)
            for (wanted, targets), (found, _) in both:
                p, q = log_softmax(wanted), log_softmax(found)
                kls.append((np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64))
                tops.append(p.argmax(axis=1) == q.argmax(axis=1))
                for part, log in zip(losses, (p, q), strict=True):
                    part.append(_losses(log, targets))
            if progress is not None:
                progress("Comparing", window.end, len(ids))
    kl = np.concatenate(kls)
    divergence = Divergence(
        mean=float(kl.mean()),
        error=_standard_error(kl),
        p99=float(np.quantile(kl, 0.99)),
        largest=float(kl.max()),
        same_top=float(np.concatenate(tops).mean()),
    )
    return _perplexity(np.concatenate(losses[0])), _perplexity(np.concatenate(losses[1])), divergence


def _same_tokens(base: Loaded, model: Loaded) -> bool:
    first, second = base.checkpoint.tokenizer(), model.checkpoint.tokenizer()
    size = min(first.vocab_size, second.vocab_size)  # one may count unused rows of the embedding table
    return all(first.token_bytes(token) == second.token_bytes(token) for token in range(0, size, max(size // 4096, 1)))


def log_softmax(found: Array) -> Array:
    """f32 [n, V] of logits [n, V]; sums in f64."""
    shifted = found - found.max(axis=1, keepdims=True)
    if not np.isfinite(shifted).any(axis=1).all():
        raise RequestError("The model's logits are not finite.")
    total = np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)
    shifted -= np.log(total).astype(np.float32)
    result: Array = shifted
    return result


def _losses(log: Array, targets: Array) -> Array:
    """f64 [n]: minus the logarithm of each target's probability."""
    losses: Array = -np.take_along_axis(log, targets[:, None].astype(np.int64), axis=1)[:, 0].astype(np.float64)
    return losses


def _perplexity(losses: Array) -> Perplexity:
    value = math.exp(losses.mean())
    return Perplexity(value, value * _standard_error(losses), losses.size)


def _standard_error(values: Array) -> float:
    return float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else math.inf
