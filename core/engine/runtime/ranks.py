"""Tensor parallelism at run time: rank 0 schedules, and tells the other ranks, which are processes or threads, of each step;
all run the same program, and choose the same tokens from the same logits."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, Protocol, TypeVar

from ..backend.joining import free_addresses
from ..backend.v1 import Group, RemapSession, Runs, Session, StepInputs, StepResult, Ticket
from ..errors import BackendError, EngineStoppedError
from .config import EngineConfig
from .rank_worker import FAILED, Job, Message, Remapping, Reply, serve

T = TypeVar("T")
_GRACE = 5.0
"""Seconds that a rank has to end by itself."""


class Worker(Protocol):
    """Another rank. ``replies`` ends with None once it has ended; ``how`` it ended."""

    replies: queue.SimpleQueue[Reply | None]

    def send(self, message: Message) -> None: ...
    def how(self) -> str: ...
    def stop(self) -> None: ...


class ProcessWorker:
    """A rank in a process of its own, which ends when its standard input does: also when this process is killed."""

    def __init__(self, job: Job) -> None:
        command = [sys.executable, "-P", "-c", "from engine.runtime.rank_worker import main; main()"]
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # an interrupt at the terminal is rank 0's to handle
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self.replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process.stdout, self.replies), daemon=True).start()
        _started.add(self)
        self.send(job)

    def send(self, message: Message | Job) -> None:
        try:
            pickle.dump(message, self._input)
            self._input.flush()
        except (OSError, ValueError):  # it has ended, which its replies tell
            return

    def leave(self, nothing: int) -> None:
        """In a forked process, whose end of the pipe would keep the rank alive when this one has ended."""
        if not self._input.closed:
            os.dup2(nothing, self._input.fileno())

    def how(self) -> str:
        try:
            return f"its process ended with the code {self._process.wait(_GRACE)}"
        except subprocess.TimeoutExpired:
            return "its process answers no more"

    def stop(self) -> None:
        """Waits for a short time, then kills it."""
        with suppress(OSError):
            self._input.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_started: weakref.WeakSet[ProcessWorker] = weakref.WeakSet()


def _leave_all() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    for worker in _started:
        worker.leave(nothing)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


def _read(stream: IO[bytes], replies: queue.SimpleQueue[Reply | None]) -> None:
    try:
        while True:
            replies.put(pickle.load(stream))
    except (EOFError, OSError, ValueError, pickle.UnpicklingError):
        replies.put(None)


class ThreadWorker:
    """A rank in a thread, for devices whose ranks live in one process."""

    def __init__(self, job: Job) -> None:
        self.replies: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(job,), daemon=True, name=f"rank {job.group.rank}")
        self._thread.start()

    def _serve(self, job: Job) -> None:
        serve(job, self._messages.get, self.replies.put)
        self.replies.put(None)

    def send(self, message: Message) -> None:
        self._messages.put(pickle.loads(pickle.dumps(message)))  # inputs are borrowed from rank 0

    def how(self) -> str:
        return "its thread ended"

    def stop(self) -> None:
        self._messages.put(None)
        self._thread.join(_GRACE)


class Ranks:
    """The ranks beside this one, which are started and stopped here. A rank that fails ends them all, for good."""

    def __init__(self, config: EngineConfig, where: str) -> None:
        addresses = free_addresses(config.tensor_parallel_size)
        self.group = Group(0, addresses, config.watchdog_s)
        self.broken: str | None = None
        start = ThreadWorker if where == "threads" else ProcessWorker
        self._workers: list[Worker] = []
        self._stop = weakref.finalize(self, _stop_all, self._workers)
        self._loading = set(range(1, self.group.size))
        for rank in sorted(self._loading):
            self._workers.append(start(Job(config, replace(self.group, rank=rank))))

    def wait_until_ready(self) -> None:
        """BackendError when a rank cannot load its part of the model, or takes much longer than this one."""
        deadline = time.monotonic() + self.group.timeout
        while self._loading and self.failure() is None:
            if time.monotonic() > deadline:
                sentence = (
                    f"Rank {min(self._loading)} of {self.group.size} has not loaded its part of the model in time."
                )
                raise BackendError(sentence)
            time.sleep(0.01)
        if self.broken is not None:
            raise BackendError(self.broken)

    def session(self, make: Callable[[], Session]) -> RankedSession:
        """A session of all ranks; ``make`` gives this one's. EngineStoppedError where a rank is lost."""
        if self.broken is not None:
            raise EngineStoppedError(self.broken)
        self.send("open")
        return RankedSession(self, make())

    def send(self, message: Message) -> None:
        for worker in self._workers:
            worker.send(message)

    def failure(self, seconds: float = 0.0) -> str | None:
        """What has become of a rank that has failed or ended, if one has within so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, worker in enumerate(self._workers, 1):
                while not worker.replies.empty() and self.broken is None:
                    self._take(rank, worker, worker.replies.get())
            if self.broken is not None or time.monotonic() >= deadline:
                return self.broken
            time.sleep(0.01)

    def _take(self, rank: int, worker: Worker, reply: Reply | None) -> None:
        if reply is None:
            self.broken = f"Rank {rank} of {self.group.size} is lost: {worker.how()}."
        elif reply[0] == FAILED:
            self.broken = f"Rank {rank} of {self.group.size} failed: {reply[1]}"
        else:
            self._loading.discard(rank)

    def watch(self, action: Callable[[], T]) -> T:
        """What the action gives. EngineStoppedError when another rank fails before that; what hangs is left behind."""
        future = _beside(action)
        while not future.done():
            wait([future], timeout=0.5)
            if not future.done() and (failure := self.failure()):
                raise EngineStoppedError(failure)
        return future.result()

    def close(self) -> None:
        """Ends the other ranks."""
        self.broken = self.broken or "The ranks have been ended."
        self._stop()


def _stop_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.stop()


def _beside(action: Callable[[], T]) -> Future[T]:
    """The action, run in a thread that nobody has to wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass(frozen=True)
class RankedTicket:
    """A step that all ranks run. EngineStoppedError where a rank is lost, or the step fails on one: their states differ then."""

    ticket: Ticket
    ranks: Ranks

    def wait(self) -> StepResult:
        try:
            return self.ranks.watch(self.ticket.wait)
        except EngineStoppedError:
            raise
        except Exception as error:
            failure = self.ranks.failure(_GRACE) or f"Rank 0 of {self.ranks.group.size} failed: {error}"
            self.ranks.broken = failure
            raise EngineStoppedError(failure) from error


class RankedSession:
    """Rank 0's session, whose steps the others run, too."""

    def __init__(self, ranks: Ranks, local: Session) -> None:
        self._ranks = ranks
        self._local = local

    def submit(self, inputs: StepInputs) -> RankedTicket:
        if self._ranks.broken is not None:
            raise EngineStoppedError(self._ranks.broken)
        ticket = self._local.submit(inputs)  # first, since it refuses steps that no rank may run
        self._ranks.send(inputs)
        return RankedTicket(ticket, self._ranks)

    def remap(self, unmapped: Sequence[Runs], mapped: Sequence[Runs]) -> None:
        if not isinstance(self._local, RemapSession):
            raise EngineStoppedError("The session has no remap; choose another KV allocator.")
        self._local.remap(unmapped, mapped)
        self._ranks.send(Remapping(unmapped, mapped))

    def close(self) -> None:
        """What hangs because a rank is lost is left behind."""
        wait([_beside(self._local.close)], timeout=None if self._ranks.broken is None else _GRACE)
