"""Collectives over MLX arrays by MLX's ring, over TCP: for each rank an address, as ``mlx.launch --backend ring`` has it."""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from engine.backend.v1 import Group

T = TypeVar("T")
DTYPES = (mx.float32, mx.float16, mx.bfloat16, mx.int32)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MAX_AXES = 8


class RingCollectives:
    """MLX joins one ring a process and never leaves it, so groups that a process joins later are the same ranks by other
    addresses. Its operations wait for ever; a thread does them here, which is given up after the group's timeout."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, len(group.addresses)
        self._timeout, self._lost = group.timeout, ""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="engine-ring", daemon=True).start()
        self._ring = self._do(lambda: _joined(group))

    @property
    def fixed_order(self) -> bool:
        """Around a ring an element's sum begins where its part of the value does; of two numbers there is one sum."""
        return self.size <= 2

    def all_reduce(self, value: mx.array) -> mx.array:
        return self._exchange("all_reduce", value, lambda: self._sum(value))

    def all_gather(self, value: mx.array, axis: int = 0) -> mx.array:
        return self._exchange("all_gather", value, lambda: mx.concatenate(self._gathered(value), axis=axis))

    def reduce_scatter(self, value: mx.array) -> mx.array:
        return self._exchange("reduce_scatter", value, lambda: mx.contiguous(self._own_part(self._sum(value))))

    def all_to_all(self, value: mx.array) -> mx.array:
        return self._exchange(
            "all_to_all", value, lambda: mx.concatenate([self._own_part(one) for one in self._gathered(value)])
        )

    def close(self) -> None:
        self._jobs.put(None)

    def _sum(self, value: mx.array) -> mx.array:
        return mx.distributed.all_sum(value, group=self._ring)

    def _gathered(self, value: mx.array) -> list[mx.array]:
        """Each rank's value."""
        joined = mx.distributed.all_gather(value[None], group=self._ring)
        return [joined[n] for n in range(self.size)]

    def _own_part(self, value: mx.array) -> mx.array:
        return mx.split(value, self.size)[self.rank]

    def _exchange(self, op: str, value: mx.array, operation: Callable[[], mx.array]) -> mx.array:
        """The operation, once all ranks have said that they call the same with the same shape and dtype."""

        def both() -> mx.array:
            mine = [OPS.index(op), DTYPES.index(value.dtype), value.ndim, *value.shape]
            row = mx.array([mine + [0] * (3 + MAX_AXES - len(mine))], mx.int32)
            said = mx.distributed.all_gather(row, group=self._ring)
            if not mx.array_equal(said, mx.broadcast_to(said[:1], said.shape)).item():
                raise RuntimeError(f"The ranks differ in what they exchange: {_described(said)}.")
            found = operation()
            mx.eval(found)
            return found

        return self._do(both)

    def _do(self, job: Callable[[], T]) -> T:
        if self._lost:
            raise RuntimeError(self._lost)
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)

        self._jobs.put(run)
        try:
            return future.result(self._timeout)
        except TimeoutError:
            self._lost = f"Rank {self.rank} has waited {self._timeout:g} s for the others; one is lost or silent."
        except Exception as error:
            text = " ".join(str(error).split())
            again = "MLX joins one ring a process, so other ranks need a new one"
            self._lost = text if text.endswith(".") else f"The ring of rank {self.rank} is broken: {text}. {again}."
        raise RuntimeError(self._lost)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _joined(group: Group) -> mx.distributed.Group:
    """MLX takes addresses from a file and the rank from the environment."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[address] for address in group.addresses]))
        os.environ |= {"MLX_RANK": str(group.rank), "MLX_HOSTFILE": str(hosts)}
        ring = mx.distributed.init(strict=True, backend="ring")
    if (ring.rank(), ring.size()) != (group.rank, len(group.addresses)):
        raise RuntimeError(
            f"This process is rank {ring.rank()} of {ring.size()} already, and cannot be rank {group.rank} of"
            f" {len(group.addresses)}, since MLX joins one ring a process."
        )
    return ring


def _described(said: mx.array) -> str:
    rows: list[list[int]] = said.tolist()  # type: ignore[assignment]
    parts = (
        f"rank {n} {OPS[op]} of {DTYPES[dtype]} {shape[:axes]}" for n, (op, dtype, axes, *shape) in enumerate(rows)
    )
    return ", ".join(parts)
