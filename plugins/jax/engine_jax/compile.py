"""Segments as compiled functions: what lies between ops that compile themselves becomes one function, its states donated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import jax

from engine.backend.v1 import BoundCall, Frame, Limits, Segment, StepFn, Value

from .given import DTYPES, Given, Site
from .ops import OPS
from .sharing import Sharing, share_weights

PACKER = "jax"
"""What this backend's providers have in common."""


def compile_segment(segment: Segment, limits: Limits, site: Site) -> StepFn:
    """A function that runs the segment's calls, one compiled function after the other. Providers that are not this backend's,
    such as a group's collectives, run between them."""
    kept = {value.id for value in segment.outputs}
    runs = [(together, tuple(run)) for together, run in groupby(segment.calls, key=_can_be_joined)]
    fns: list[StepFn] = []
    for n, (together, calls) in enumerate(runs):
        later = {value.id for _, run in runs[n + 1 :] for bound in run for value in bound.call.inputs.values()}
        fns += (
            [compile_calls(calls, kept | later, site)]
            if together
            else [bound.provider.bind(bound, limits) for bound in calls]
        )

    def run(frame: Frame) -> None:
        for fn in fns:
            fn(frame)

    return run


def _can_be_joined(bound: BoundCall) -> bool:
    return bound.provider.packer == PACKER and OPS[bound.call.op].make is not None


def bind_call(bound: BoundCall, site: Site) -> StepFn:
    """A call by itself."""
    bind = OPS[bound.call.op].bind
    outputs = {value.id for value in bound.call.outputs}
    return compile_calls((bound,), outputs, site) if bind is None else bind(bound.call)


def compile_calls(calls: Sequence[BoundCall], wanted: set[int], site: Site) -> StepFn:
    """One compiled function for these calls, which leaves the values ``wanted``."""
    functions = [OPS[bound.call.op].make(bound.call, site) for bound in calls]  # type: ignore[misc]
    if not site.sharing.alone:
        share_weights(calls, site.sharing)
    weights = [{name: packed.handle.weight for name, packed in bound.weights.items()} for bound in calls]
    made = {value.id for bound in calls for value in bound.call.outputs}
    read = {value.id for bound in calls for value in bound.call.inputs.values()} - made
    written = {state for bound in calls if OPS[bound.call.op].writes for state in bound.call.states.values()}
    seen = {state for bound in calls for state in bound.call.states.values()} - written

    def step(
        changing: dict[str, Any], fixed: dict[str, Any], weights: Sequence[Mapping[str, Any]], values: dict[int, Any]
    ) -> tuple[dict[str, Any], dict[int, Any]]:
        values, states = dict(values), {**fixed, **changing}
        for bound, function, own in zip(calls, functions, weights, strict=True):
            call = bound.call
            given = Given(
                {name: values[value.id] for name, value in call.inputs.items()},
                own,
                {name: states[state] for name, state in call.states.items()},
            )
            for value, array in zip(call.outputs, function(given), strict=True):
                values[value.id] = _as_stored(array, value)
            states |= {state: given.states[name] for name, state in call.states.items()}
        changed = {state: _in_place(states[state], site.sharing) for state in written}
        return changed, {key: values[key] for key in made & wanted}

    compiled = jax.jit(step, donate_argnums=0)

    def run(frame: Frame) -> None:
        states, values = frame.states, frame.values
        changed, found = compiled(
            {name: states[name] for name in written},
            {name: states[name] for name in seen},
            weights,
            {key: values[key] for key in read},
        )
        states.update(changed)
        values.update(found)

    return run


def _in_place(state: jax.Array, sharing: Sharing) -> jax.Array:
    """The state shared out as it was, so that the next step finds it so."""
    return state if sharing.alone else jax.lax.with_sharding_constraint(state, sharing.of_state(state.shape))


def _as_stored(array: jax.Array, value: Value) -> jax.Array:
    return array.astype(DTYPES[value.dtype])
