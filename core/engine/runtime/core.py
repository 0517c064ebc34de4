"""Stage 2: the step loop. One thread owns the scheduler and submits steps; the next one is made while the device computes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ..backend.v1 import Session, Ticket
from ..errors import EngineError, EngineStoppedError
from ..scheduler import ScheduledStep, Scheduler
from .commands import Command, Commands, Done
from .head_inputs import HeadInputs
from .load import Loaded
from .member import asked
from .members import Members
from .output_processor import TokenEvent
from .pace import Pace
from .request import Request
from .restarts import Restarts, let_go
from .speculation import Speculation
from .step_inputs import Rows, StepArrays
from .swap import HostBlocks, SwapTickets


@dataclass(frozen=True)
class Health:
    """``stalled_s``: seconds since a step finished while there was work; 0 when idle. ``ready``: there is a session, so
    that steps can be run; ``restarts``: how often the loop has failed and begun anew."""

    alive: bool
    ready: bool
    restarts: int
    stalled_s: float
    steps: int
    waiting: int
    running: int


@dataclass
class _InFlight:
    step: ScheduledStep
    rows: Rows
    ticket: Ticket
    swaps: SwapTickets
    submitted: float


class EngineCore:
    """Takes requests, runs steps, and passes tokens on as events, all of a step at a time. All public methods may be called
    from any thread."""

    def __init__(self, loaded: Loaded, emit: Callable[[list[TokenEvent]], None]) -> None:
        self._loaded = loaded
        self._emit = emit
        self._arrays = StepArrays(len(loaded.program.groups), HeadInputs((loaded.program.vocab + 31) // 32))
        self.speculation = Speculation(loaded.config.speculate)
        self._members = Members(loaded, guesses=self.speculation.most > 0)
        self._host = HostBlocks()
        self._session: Session | None = loaded.session()
        self._restarts = Restarts()
        self._max_in_flight = max(loaded.device.describe().max_in_flight, 1)
        self._commands = Commands()
        self._in_flight: deque[_InFlight] = deque()
        self._suspects: deque[str] = deque()
        self._steps = 0
        self._progress = time.monotonic()
        self._pace = Pace(slowdown) if (slowdown := loaded.config.decode_slowdown) else None
        self._failure: EngineError | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine-loop", daemon=True)
        self._thread.start()

    @property
    def scheduler(self) -> Scheduler:
        return self._members.scheduler

    # -- from other threads ----------------------------------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        """Admit requests together, so that one step can take them all; AdmissionError when one can never fit, and then
        none of them is admitted."""
        self._call(lambda: self._members.add_all(requests))

    def add_soon(self, request: Request, done: Done) -> None:
        """``add`` for callers that must not wait."""
        self._commands.put_told(lambda: self._members.add_all((request,)), done)

    def abort(self, *request_ids: str) -> None:
        """End requests in any state, all before the next step; nothing happens to one that has ended already."""

        def run() -> None:
            for request_id in request_ids:
                self._members.abort(request_id, "abort", None)

        self._call(run)

    def abandon(self, request: Request) -> None:
        """``abort`` for callers that must not wait, such as an event loop; by then another request may have the id."""
        self._commands.put(lambda: self._members.abandon(request))

    def finish(self, request: Request, index: int) -> None:
        """End one continuation: stage 3 has found a stop string in it. Does not wait."""
        self._commands.put(lambda: self._members.finish(request, index))

    def health(self) -> Health:
        stats = self.scheduler.stats()
        busy = bool(self._members.by_id or self._in_flight)
        stalled = time.monotonic() - self._progress if busy else 0.0
        alive = self._thread.is_alive() and not self._failure
        ready = alive and self._session is not None
        return Health(alive, ready, self._restarts.count, stalled, self._steps, stats.waiting, stats.running)

    def check_progress(self) -> None:
        """EngineStoppedError when the loop has ended, or no step has finished for as long as the watchdog allows; what
        hangs in the device is not waited for any more."""
        self._commands.check_process()
        if self._failure is None and self._hangs():
            allowed = self._loaded.config.watchdog_s
            self._failure = EngineStoppedError(f"No step has finished for {allowed:g} s; the device seems to hang.")
            self._stopping = True
        if self._failure is not None or not self._thread.is_alive():
            raise self._failure or EngineStoppedError("The engine has been shut down.")

    def _hangs(self) -> bool:
        return self.health().stalled_s > self._loaded.config.watchdog_s

    def close(self) -> None:
        """Ends all requests and frees the device's state; a device that hangs is left behind."""
        self._stopping = True
        self._commands.put(lambda: None)  # it may wait for one
        while self._thread.is_alive() and threading.current_thread() is not self._thread and not self._hangs():
            self._thread.join(timeout=1.0)

    def _call(self, action: Command) -> None:
        """Run an action on the loop's thread, and raise here what it raises."""
        self._commands.check_process()
        if self._failure is not None or self._stopping:
            raise self._failure or EngineStoppedError("The engine has been shut down.")
        self._commands.call(action, self.check_progress)

    # -- the loop --------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._turn()
                except EngineStoppedError:  # for good: requests are told before what hangs is closed
                    raise
                except Exception as error:
                    self._restart(error)
        except Exception as error:  # the loop itself is broken: every request is told, and none waits for ever
            sentence = f"The step loop failed: {type(error).__name__}: {error}"
            self._failure = error if isinstance(error, EngineStoppedError) else EngineStoppedError(sentence)
        finally:
            self._end_all()
            self._close_session()
            while (command := self._commands.take(wait=False)) is not None:
                if not self._failure:
                    command()
            self._end_all()  # what came meanwhile

    def _end_all(self) -> None:
        for request in self._members.requests:
            self._members.end(request, "error" if self._failure else "abort", str(self._failure or "shut down"))
        self._hand_over()

    def _turn(self) -> None:
        self._session = self._session or self._loaded.session()
        self._take_commands()
        self._submit()
        self._hand_over()  # text is made of them while the device computes, and not beside what is done above
        if self._in_flight:
            self._finish_step()

    def _hand_over(self) -> None:
        if events := self._members.events:
            self._members.events = []
            self._emit(events)

    def _close_session(self) -> None:
        """Frees the device's state; what is in flight is lost."""
        for flight in self._in_flight:
            with suppress(Exception):  # its requests are told, or computed again
                flight.ticket.wait()
        self._in_flight.clear()
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _restart(self, error: Exception) -> None:
        """The loop has failed, and not by a request: those that have begun end, as what the scheduler knows of them may be
        wrong. The others are kept for a new session. Raises the error where there have been too many."""
        with suppress(Exception):  # a device that is lost may fail here, too
            self._close_session()
        self._restarts.wait(error)
        self._suspects, self._host = deque(), HostBlocks()
        self._members.restart(f"The step loop failed, and has begun anew; ask again ({type(error).__name__}: {error}).")

    def _take_commands(self) -> None:
        while not self._stopping:
            if idle := not self._members.by_id and not self._in_flight:
                self._hand_over()
            command = self._commands.take(wait=idle)
            if command is None:
                return
            if idle:
                self._progress = time.monotonic()
            command()

    def _submit(self) -> None:
        assert self._session is not None
        while len(self._in_flight) < (1 if (suspect := self._suspect()) else self._max_in_flight):
            decoding = self.scheduler.decoding if self._pace is not None or self.speculation.most else []
            joining = None if self._pace is None else self._pace.allowance(len(decoding), self.scheduler.prefilling)
            guesses = {} if suspect else self.speculation.guesses(decoding, self._members.by_id)
            step = self.scheduler.schedule(suspect, joining, guesses)
            if step is None:
                return
            params, failed = asked(step, self._members.by_id, self.scheduler.sequences)
            for request_id, sentence in failed.items():
                self._members.abort(request_id, "error", sentence)
            inputs, rows = self._arrays.of(step, params.__getitem__)
            try:
                swaps = self._host.submit(self._session, step)
                ticket = self._session.submit(inputs)
            except Exception as error:
                self._recover(step, error)
                return
            self._in_flight.append(_InFlight(step, rows, ticket, swaps, time.monotonic()))

    def _suspect(self) -> str | None:
        """The request to run alone next, while one that breaks steps is looked for."""
        while self._suspects and not self.scheduler.has(self._suspects[0]):
            self._suspects.popleft()
        return self._suspects[0] if self._suspects else None

    def _finish_step(self) -> None:
        flight = self._in_flight.popleft()
        try:
            result = flight.ticket.wait()
            self._host.finish(flight.swaps)
        except Exception as error:
            self._recover(flight.step, error)
            return
        self._steps += 1
        started, self._progress = max(self._progress, flight.submitted), time.monotonic()
        if self._pace is not None:
            guessed = [part.guessed for part in flight.step.sequences if part.guessed]
            decodes = flight.step.decode_count + len(guessed)
            self._pace.note(decodes, flight.step.num_tokens - decodes - sum(guessed), self._progress - started)
        if self._suspects and (flight.rows.each or result.embeddings is not None):
            self._suspects.popleft()  # it has run past where the step broke
        rows, held = flight.rows, {}
        if not rows.plain:
            held = self.speculation.check(flight.step, rows.next, result, self._members.by_id)
        self._members.take(flight.step, rows, result, held)
        self._host.keep(self.scheduler.swapper.held)

    def _recover(self, step: ScheduledStep, error: Exception) -> None:
        """The device lost its state: recompute. The step's requests then run one at a time, so that the one at fault
        fails alone. Raises the error where it says that nothing more can be done."""
        if isinstance(error, EngineStoppedError):
            raise error
        self._close_session()
        members = [self._members.by_id[part.seq_id] for part in step.sequences if part.seq_id in self._members.by_id]
        ids = list(dict.fromkeys(member.request.request_id for member in members))
        self.scheduler.reset()
        self._host.keep(self.scheduler.swapper.held)
        if len(ids) == 1:
            sentence = f"The device failed on this request: {type(error).__name__}: {error}"
            self._members.abort(ids[0], "error", sentence)
        else:
            self._suspects = deque(ids)
        let_go(error)
        self._session = self._loaded.session()
