"""A sequence as the step loop knows it, and what its rows of the head are asked and give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..backend.v1 import StepResult
from ..errors import RequestError
from ..sampling.speculation import PromptLookup
from ..scheduler import ScheduledStep, Sequence
from .beams import BeamGroup
from .head_inputs import RowParams
from .request import Request


@dataclass
class Member:
    """A sequence of a request; all beams of a request have the same. ``lookup`` guesses its next tokens, where that may be."""

    request: Request
    index: int
    row: RowParams
    beams: BeamGroup | None = None
    lookup: PromptLookup | None = None


def row_params(request: Request, group: BeamGroup | None) -> RowParams:
    """What the request's rows ask, its samples' alike."""
    params = request.params
    return RowParams(
        params,
        prompt_length=len(request.prompt_ids),
        branch=0,
        seed=request.seed,
        banned=tuple(sorted(request.stop_ids)),
        bias=(np.array(list(params.logit_bias), np.int32), np.array(list(params.logit_bias.values()), np.float32)),
        want=-1 if group is not None else request.want,
        candidates=group.search.candidates if group is not None else 0,
        prompt_ids=request.prompt_ids if params.prompt_logprobs is not None else (),
    )


def asked(
    step: ScheduledStep, members: Mapping[int, Member], sequences: Mapping[int, Sequence]
) -> tuple[dict[int, RowParams], dict[str, str]]:
    """What each sequence's rows are asked, with what its logits processors want; and of requests whose processor has failed
    why."""
    params: dict[int, RowParams] = {}
    failed: dict[str, str] = {}
    for part in step.sequences:
        member = members[part.seq_id]
        params[part.seq_id] = member.row
        if member.request.processors and part.emits:
            output = sequences[part.seq_id].output_ids
            try:
                wanted = [p.bias(member.request.prompt_ids, output) for p in member.request.processors]
                params[part.seq_id] = member.row.with_bias(wanted)
            except RequestError as error:
                failed[member.request.request_id] = str(error)
    return params, failed


def logprobs(result: StepResult, row: int, want: int, token: int) -> Mapping[int, float] | None:
    """Of the token that came in a row, and of the ``want`` likeliest; None where none are wanted (-1)."""
    if want < 0:
        return None
    best = zip(result.top_ids[row, :want].tolist(), result.top_logprobs[row, :want].tolist(), strict=True)
    return {token: float(result.logprob[row]), **dict(best)}
