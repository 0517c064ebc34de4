"""The end of a step: process_logits and sample."""

from __future__ import annotations

import torch

from ..kernels import logits as kernels
from ..kernels import sampling
from ..kernels.common import launch, power_of_two
from ..operands import Operands

BLOCK = 4096
PASSES = {"BLOCK": 4096, "num_warps": 16}
"""Tokens that a pass of a program over its row takes at a time, and the warps that take them: filters pass over it dozens of
times, and each round waits for memory."""


def _parts(width: int) -> int:
    return -(-width // BLOCK)


def process_logits(o: Operands) -> None:
    logits, history, candidates = o["logits"], o.state("history"), o.get("candidates")
    assert history is not None
    count, width = logits.shape
    processed = o.result(0, count, width)
    place = (history, *(o[name] for name in ("rows", "positions", "token_seq", "seq_slots")))
    penalties = tuple(o[f"{name}_penalty"] for name in ("repetition", "frequency", "presence"))
    sums = o.new(count, 2, dtype=torch.float64)
    if candidates is not None:
        launch(kernels.log_sum, (count,), logits, candidates, sums, width, **PASSES)
    counts, length = o.new(count, width, dtype=torch.int32), history.shape[1]
    launch(kernels.clear_counts, (count, _parts(width)), *penalties, counts, width, BLOCK=BLOCK)
    launch(
        kernels.count_tokens, (count,), *place, o["prompt_lengths"], *penalties, counts, length, width, **PASSES
    )  # fmt: skip
    launch(
        kernels.adjust, (count, _parts(width)), logits, processed, sums, counts,
        logits if candidates is None else candidates, o["bias_offsets"], o["bias_ids"], o["bias_values"],
        o["mask_rows"], o["masks"], *penalties, width, o["masks"].shape[1], BEAMS=candidates is not None, BLOCK=BLOCK,
    )  # fmt: skip
    sizes = o.get("no_repeat_ngram_size")
    if sizes is not None:
        launch(kernels.ban_ngrams, (count,), *place, sizes, processed, length, width, **PASSES)
    typical = o.get("typical_p")
    launch(
        kernels.keep, (count,), processed, o["temperature"], o["top_k"], o["top_p"], o["min_p"],
        o["top_p"] if typical is None else typical, width, TYPICAL=typical is not None, **PASSES,
    )  # fmt: skip


def sample(o: Operands) -> None:
    processed, logits, history = o["processed"], o["logits"], o.state("history")
    assert history is not None
    targets, candidates = o.get("targets"), o.get("candidates")
    count, width = logits.shape
    parts, columns = _parts(width), o.dims.K
    tokens, status, logprob = (o.result(n, count) for n in range(3))
    top_ids, top_logprobs = o.result(3, count, columns), o.result(4, count, columns)
    best = o.new(count, parts, dtype=torch.float64)
    ids, bad = (o.new(count, parts, dtype=torch.int32) for _ in range(2))
    launch(
        sampling.best_of_parts, (count, parts), processed, logits, o["rows"], o["positions"], o["temperature"],
        o["seeds"], o["branches"], best, ids, bad, width, parts, BLOCK=BLOCK,
    )  # fmt: skip
    launch(
        sampling.choose, (count,), best, ids, bad, o["rows"], o["positions"], o["token_seq"], o["seq_slots"],
        status if targets is None else targets, history, tokens, status, len(o["token_seq"]), parts, width,
        history.shape[1], TARGETS=targets is not None, PARTS=power_of_two(parts),
    )  # fmt: skip
    active, sums = o.new(count, dtype=torch.int32), o.new(count, 2, dtype=torch.float64)
    beams = {"BEAMS": candidates is not None}
    others = status if candidates is None else candidates
    grid = (-(-count // PASSES["BLOCK"]),)
    launch(sampling.wants, grid, status, o["want_logprobs"], others, active, count, **beams, **PASSES)
    launch(kernels.log_sum, (count,), logits, active, sums, width, **PASSES)
    launch(
        sampling.report, (count,), logits, processed, sums, active, status, tokens, o["want_logprobs"], others,
        logprob, top_ids, top_logprobs, width, columns, **beams, **PASSES,
    )  # fmt: skip
