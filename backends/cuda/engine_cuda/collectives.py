"""Collectives over torch.distributed: NCCL (or RCCL) between GPUs, gloo where kernels are interpreted on the CPU.

Before each operation the ranks tell each other over gloo what they are about to do, since sizes that differ would end a process
or hang it, and a rank that is lost shows there. That takes an exchange between hosts each time; GPUs work on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

from engine.backend.v1 import CollectiveCall, CollectivesError, Group

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int32: "i32"}


class TorchCollectives:
    """A rank's operations on tensors of its device. Sums are taken in the library's order, which may differ from place to
    place in a value."""

    fixed_order = False

    def __init__(self, group: Group, where: torch.device) -> None:
        self._group = group
        distributed: Any = import_module("torch.distributed")
        host, _, port = group.addresses[0].rpartition(":")
        timeout = timedelta(seconds=group.timeout)
        store = distributed.TCPStore(host, int(port), group.size, group.rank == 0, timeout)
        calls = distributed.PrefixStore("calls", store)
        self._calls: Any = distributed.ProcessGroupGloo(calls, group.rank, group.size, timeout)
        self._values: Any = self._calls
        if where.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            values = distributed.PrefixStore("values", store)
            self._values = distributed.ProcessGroupNCCL(values, group.rank, group.size, options)
        self._broken: str | None = None

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        with self._ending():
            self._agree(_call("all_reduce", value))
            total = value.clone(memory_format=torch.contiguous_format)
            self._run(lambda: self._values.allreduce([total]))
        return total

    def all_gather(self, value: torch.Tensor, axis: int = 0) -> torch.Tensor:
        with self._ending():
            self._agree(_call("all_gather", value, axis))
            found = value.new_empty(self.size * value.numel())
            self._run(lambda: self._values._allgather_base(found, value.reshape(-1)))
        return torch.cat(found.view(self.size, *value.shape).unbind(), axis)

    def reduce_scatter(self, value: torch.Tensor) -> torch.Tensor:
        with self._ending():
            call = _call("reduce_scatter", value)
            part = value.new_empty(call.part(self.size))
            self._agree(call)
            self._run(lambda: self._values._reduce_scatter_base(part, value.contiguous()))
        return part

    def all_to_all(self, value: torch.Tensor) -> torch.Tensor:
        with self._ending():
            call = _call("all_to_all", value)
            call.part(self.size)
            self._agree(call)
            found = torch.empty_like(value, memory_format=torch.contiguous_format)
            self._run(lambda: self._values.alltoall_base(found, value.contiguous(), [], []))
        return found

    def close(self) -> None:
        """Lets the connections go."""
        self._end("The group has been left.")

    def _agree(self, call: CollectiveCall) -> None:
        mine = torch.frombuffer(bytearray(call.encoded()), dtype=torch.uint8)
        calls = mine.new_empty(self.size * len(mine))
        self._run(lambda: self._calls._allgather_base(calls, mine))
        call.check_same(self.rank, [other.numpy().tobytes() for other in calls.view(self.size, -1)])

    def _run(self, begin: Callable[[], Any]) -> None:
        if self._broken is not None:
            raise CollectivesError(self._broken)
        try:
            begin().wait()
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise CollectivesError(
                f"A rank was lost, or silent for {self._group.timeout:g} s: the operation failed ({why})."
            ) from None

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """After a fault the group is of no use any more."""
        try:
            yield
        except CollectivesError as error:
            self._end(str(error))
            raise

    def _end(self, sentence: str) -> None:
        """The others notice: the connections are let go."""
        self._broken = self._broken or sentence
        self._calls = self._values = None


def _call(op: str, value: torch.Tensor, axis: int = 0) -> CollectiveCall:
    return CollectiveCall(op, _DTYPES.get(value.dtype, str(value.dtype)), tuple(value.shape), axis)
