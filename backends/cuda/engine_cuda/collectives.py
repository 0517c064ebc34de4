"""Collectives over torch.distributed: NCCL (or RCCL) between GPUs, gloo where kernels are interpreted on the CPU.

Before each operation the ranks tell each other over gloo what they are about to do, since sizes that differ would end a process
or hang it, and a rank that is lost shows there. That takes an exchange between hosts each time; GPUs work on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch

from engine.backend.v1 import Group

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32)
_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_MOST_AXES = 8


class CollectivesError(Exception):
    """The group has come to its end; the text is a sentence."""


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
        self._agree("all_reduce", value)
        total = value.clone(memory_format=torch.contiguous_format)
        self._run(lambda: self._values.allreduce([total]))
        return total

    def all_gather(self, value: torch.Tensor, axis: int = 0) -> torch.Tensor:
        self._agree("all_gather", value, axis)
        found = value.new_empty(self.size * value.numel())
        self._run(lambda: self._values._allgather_base(found, value.reshape(-1)))
        return torch.cat(found.view(self.size, *value.shape).unbind(), axis)

    def reduce_scatter(self, value: torch.Tensor) -> torch.Tensor:
        part = value.new_empty(self._part("reduce_scatter", value))
        self._run(lambda: self._values._reduce_scatter_base(part, value.contiguous()))
        return part

    def all_to_all(self, value: torch.Tensor) -> torch.Tensor:
        self._part("all_to_all", value)
        found = torch.empty_like(value, memory_format=torch.contiguous_format)
        self._run(lambda: self._values.alltoall_base(found, value.contiguous(), [], []))
        return found

    def close(self) -> None:
        """Lets the connections go."""
        self._end("The group has been left.")

    # -- agreement -------------------------------------------------------------------------------------------------

    def _part(self, op: str, value: torch.Tensor) -> tuple[int, ...]:
        """The shape of a rank's part of the value, once all have agreed."""
        if value.ndim == 0 or len(value) % self.size:
            raise self._end(
                f"A value of shape {list(value.shape)} has a first axis that does not fall into {self.size} equal parts."
            )
        self._agree(op, value)
        return (len(value) // self.size, *value.shape[1:])

    def _agree(self, op: str, value: torch.Tensor, axis: int = 0) -> None:
        if value.dtype not in _DTYPES or value.ndim > _MOST_AXES:
            raise self._end(
                f"A value of {value.dtype} with {value.ndim} axes cannot be sent; it must be f32, f16, bf16 or i32, with at most"
                f" {_MOST_AXES} axes."
            )
        shape = (*value.shape, *[-1] * (_MOST_AXES - value.ndim))
        mine = torch.tensor([_OPS.index(op), _DTYPES.index(value.dtype), axis, value.ndim, *shape])
        calls = mine.new_empty(self.size * len(mine))
        self._run(lambda: self._calls._allgather_base(calls, mine))
        for rank, other in enumerate(calls.view(self.size, -1)):
            if not torch.equal(other, mine):
                raise self._end(
                    f"Rank {rank} called {_described(other)} where rank {self.rank} called {_described(mine)}; all ranks must"
                    " call the same with values that are alike."
                )

    def _run(self, begin: Callable[[], Any]) -> None:
        if self._broken is not None:
            raise CollectivesError(self._broken)
        try:
            begin().wait()
        except RuntimeError as error:
            why = " ".join(str(error).split())
            raise self._end(
                f"A rank was lost, or silent for {self._group.timeout:g} s: the operation failed ({why})."
            ) from None

    def _end(self, sentence: str) -> CollectivesError:
        """The group is of no use any more. The others notice: the connections are let go."""
        self._broken = self._broken or sentence
        self._calls = self._values = None
        return CollectivesError(sentence)


def _described(call: torch.Tensor) -> str:
    op, dtype, axis, ndim, *shape = call.tolist()
    along = f", axis {axis}" if axis else ""
    return f"{_OPS[op]}({str(_DTYPES[dtype]).removeprefix('torch.')}{shape[:ndim]}{along})"
