"""A function run by all ranks of a group at a time, each in a process or a thread of its own."""

from __future__ import annotations

import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

OnRank = Callable[..., str | None]
"""Called with a rank and the rest; gives nothing, or what is wrong."""


def run_ranks(where: str, function: OnRank, count: int, args: tuple[Any, ...], seconds: float) -> list[str]:
    """What is wrong, with the ranks' numbers; empty if nothing is. ``where``: "processes" (``function`` and ``args`` are
    pickled) or "threads". A rank that has not come to its end after so many seconds is wrong, and its process is ended."""
    found = (_processes if where == "processes" else _threads)(function, count, args, seconds)
    return [f"rank {rank}: {said}" for rank, said in enumerate(found) if said]


def _said(function: OnRank, rank: int, args: tuple[Any, ...]) -> str | None:
    try:
        return function(rank, *args)
    except AssertionError as error:
        return str(error) or traceback.format_exc()
    except BaseException:
        return traceback.format_exc()


def _in_process(pipe: Connection, function: OnRank, rank: int, args: tuple[Any, ...]) -> None:
    pipe.send(_said(function, rank, args))


def _processes(function: OnRank, count: int, args: tuple[Any, ...], seconds: float) -> list[str | None]:
    spawning = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + seconds
    ranks = []
    for rank in range(count):
        mine, theirs = spawning.Pipe(duplex=False)
        process = spawning.Process(target=_in_process, args=(theirs, function, rank, args), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, mine))
    found: list[str | None] = []
    for process, pipe in ranks:
        try:
            ended = pipe.poll(max(deadline - time.monotonic(), 0))
            found.append(pipe.recv() if ended else f"it hangs: it has not ended after {seconds:g} s.")
        except EOFError:
            process.join(5)
            found.append(f"its process ended with the code {process.exitcode}.")
        process.terminate()
        process.join()
    return found


def _threads(function: OnRank, count: int, args: tuple[Any, ...], seconds: float) -> list[str | None]:
    deadline = time.monotonic() + seconds
    found: list[str | None] = [f"it hangs: it has not ended after {seconds:g} s."] * count

    def run(rank: int) -> None:
        found[rank] = _said(function, rank, args)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return found
