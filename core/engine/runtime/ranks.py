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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, Protocol

from ..backend.joining import free_addresses
from ..backend.v1 import Group, Session, StepInputs, StepResult
from ..errors import BackendError, EngineStoppedError
from .config import EngineConfig
from .rank_worker import FAILED, HERE, READY, Job, Message, Reply, serve

_GRACE = 5.0
"""Seconds that a rank has to end by itself."""
_STARTING = 120.0
"""Seconds that a process may take to start."""


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
        self.send(job)

    def send(self, message: Message | Job) -> None:
        try:
            pickle.dump(message, self._input)
            self._input.flush()
        except (OSError, ValueError):  # it has ended, which its replies tell
            return

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
        for rank in range(1, self.group.size):
            self._workers.append(start(Job(config, replace(self.group, rank=rank))))
        self._wait_for(HERE, _STARTING)

    def wait_until_ready(self) -> None:
        """BackendError when a rank could not load its part of the model."""
        self._wait_for(READY, self.group.timeout)

    def _wait_for(self, wanted: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for rank, worker in enumerate(self._workers, 1):
            try:
                reply = worker.replies.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                self._fail(f"Rank {rank} of {self.group.size} has not answered for {seconds:g} s.")
            else:
                if reply is None or reply[0] != wanted:
                    self._fail(self._told(rank, reply))

    def _fail(self, sentence: str) -> None:
        self.close()
        raise BackendError(sentence)

    def _told(self, rank: int, reply: Reply | None) -> str:
        """What a rank's last reply means."""
        if reply is not None and reply[0] == FAILED:
            return f"Rank {rank} of {self.group.size} failed: {reply[1]}"
        return f"Rank {rank} of {self.group.size} is lost: {self._workers[rank - 1].how()}."

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
        while self.broken is None:
            for rank, worker in enumerate(self._workers, 1):
                if not worker.replies.empty():
                    self.broken = self.broken or self._told(rank, worker.replies.get())
            if time.monotonic() >= deadline:
                break
            time.sleep(0.01)
        return self.broken

    def close(self) -> None:
        """Ends the other ranks."""
        self.broken = self.broken or "The ranks have been ended."
        self._stop()


def _stop_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.stop()


@dataclass(frozen=True)
class RankedTicket:
    """A step that all ranks run. EngineStoppedError where a rank is lost, or the step fails on one: their states differ then."""

    future: Future[StepResult]
    ranks: Ranks

    def wait(self) -> StepResult:
        while not self.future.done():
            try:
                return self.future.result(timeout=0.5)
            except TimeoutError:
                if not self.future.done() and (failure := self.ranks.failure()):
                    raise EngineStoppedError(failure) from None
            except Exception:
                break
        try:
            return self.future.result()
        except Exception as error:
            failure = self.ranks.failure(_GRACE)
            self.ranks.broken = failure or f"Rank 0 of {self.ranks.group.size} failed: {error}"
            raise EngineStoppedError(self.ranks.broken) from error


class RankedSession:
    """Rank 0's session, whose steps the others run, too."""

    def __init__(self, ranks: Ranks, local: Session) -> None:
        self._ranks = ranks
        self._local = local
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="engine-rank-0")

    def submit(self, inputs: StepInputs) -> RankedTicket:
        if self._ranks.broken is not None:
            raise EngineStoppedError(self._ranks.broken)
        ticket = self._local.submit(inputs)  # first, since it refuses steps that no rank may run
        self._ranks.send(inputs)
        return RankedTicket(self._waiting.submit(ticket.wait), self._ranks)

    def close(self) -> None:
        """What hangs because a rank is lost is left behind."""
        closing = threading.Thread(target=self._local.close, daemon=True)
        closing.start()
        closing.join(None if self._ranks.broken is None else _GRACE)
        self._waiting.shutdown(wait=False)
