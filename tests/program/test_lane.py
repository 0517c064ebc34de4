"""Work that runs on the thread of whoever waits for it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import engine_cpu.device
from engine import LLM, SamplingParams
from engine.program.execute import StepSession
from engine.program.lane import Lane
from engine.testing.checkpoints import write_checkpoint


def test_work_runs_in_order_up_to_what_is_waited_for():
    lane, seen = Lane(), []
    futures = [lane.submit(lambda n: seen.append((n, threading.get_ident())) or n * n, n) for n in range(5)]
    assert seen == []
    assert futures[2].result() == 4
    me = threading.get_ident()
    assert seen == [(0, me), (1, me), (2, me)] and futures[1].done() and not futures[3].done()
    assert futures[0].result() == 0 and len(seen) == 3
    lane.shutdown()
    assert [n for n, _ in seen] == [0, 1, 2, 3, 4] and futures[4].result() == 16


def test_what_fails_raises_where_it_is_waited_for_and_the_rest_runs():
    lane = Lane()

    def fail():
        raise ValueError("no")

    failed, after = lane.submit(fail), lane.submit(lambda: 7)
    assert after.result() == 7
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            failed.result()


def test_nothing_runs_twice_nor_beside_another_whoever_waits():
    lane, seen, inside = Lane(), [], threading.Lock()

    def work(n):
        assert inside.acquire(blocking=False), "two run at a time"
        time.sleep(0.002)
        seen.append(n)
        inside.release()
        return n

    futures = [lane.submit(work, n) for n in range(40)]
    got = [None] * 40
    threads = [
        threading.Thread(target=lambda n: got.__setitem__(n, futures[n].result()), args=(n,))
        for n in (39, 3, 17, 22, 0)
    ]
    for thread in threads:
        thread.start()
    lane.shutdown()  # waits for what others run
    assert seen == list(range(40))
    for thread in threads:
        thread.join()
    assert [got[n] for n in (39, 3, 17, 22, 0)] == [39, 3, 17, 22, 0]


def test_an_ended_lane_takes_no_work():
    lane, seen = Lane(), []
    cancelled = lane.submit(lambda: seen.append(1))
    lane.shutdown(cancel_futures=True)
    assert not seen and cancelled.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        lane.submit(lambda: None)


@pytest.mark.parametrize(("in_flight", "thread"), [(1, "engine-loop"), (2, "engine-step_0")])
def test_steps_have_a_thread_of_their_own_where_several_are_taken_at_a_time(in_flight, thread, tmp_path, monkeypatch):
    seen = set()
    run, plain = StepSession._run_exactly, engine_cpu.device.CpuDevice.describe

    def watched(session, *given):
        seen.add(threading.current_thread().name)
        return run(session, *given)

    monkeypatch.setattr(StepSession, "_run_exactly", watched)
    monkeypatch.setattr(
        engine_cpu.device.CpuDevice, "describe", lambda device: replace(plain(device), max_in_flight=in_flight)
    )
    folder = write_checkpoint("llama", tmp_path / "llama", np.random.default_rng())
    with LLM(folder, backend="cpu", max_model_len=96, kv_cache_tokens=256) as llm:
        llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert seen == {thread}
