"""Stage 2: the step loop. One thread owns the scheduler and submits steps; the next one is made while the device computes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from ..backend.v1 import Session, StepResult, Ticket
from ..errors import AdmissionError, EngineError, EngineStoppedError, RequestError
from ..sampling.speculation import PromptLookup
from ..scheduler import ScheduledStep, Sequence, SequenceStatus, Update
from .beams import BeamGroup, make_search
from .commands import Command, Commands, Done
from .head_inputs import HeadInputs
from .load import Loaded
from .member import Member, asked, logprobs, row_params
from .output_processor import TokenEvent
from .pace import Pace
from .pooling import Pooler, take_states
from .prompt import numbered
from .request import Request
from .restarts import Restarts, let_go
from .speculation import Speculation
from .step_inputs import Row, Rows, StepArrays
from .swap import HostBlocks, SwapTickets

NO_TOKEN = 2
STATUS = {
    1: "The model gave numbers that are not finite; the checkpoint or this prompt is damaged.",
    NO_TOKEN: "No token is left to choose: the logit bias, the mask or the n-grams ban them all.",
}


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
        self._events: list[TokenEvent] = []
        self._arrays = StepArrays(len(loaded.program.groups), HeadInputs((loaded.program.vocab + 31) // 32))
        self.scheduler = loaded.scheduler()
        self._host = HostBlocks()
        self._session: Session | None = loaded.session()
        self._restarts = Restarts()
        self._max_in_flight = max(loaded.device.describe().max_in_flight, 1)
        self._members: dict[int, Member] = {}
        self._commands = Commands()
        self._in_flight: deque[_InFlight] = deque()
        self._suspects: deque[str] = deque()
        self._next_id = 0
        self._steps = 0
        self._progress = time.monotonic()
        self._pace = Pace(slowdown) if (slowdown := loaded.config.decode_slowdown) else None
        self.speculation = Speculation(loaded.config.speculate)
        self._failure: EngineError | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine-loop", daemon=True)
        self._thread.start()

    # -- from other threads ----------------------------------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        """Admit requests together, so that one step can take them all; AdmissionError when one can never fit, and then
        none of them is admitted."""
        self._call(lambda: self._add_all(requests))

    def add_soon(self, request: Request, done: Done) -> None:
        """``add`` for callers that must not wait."""
        self._commands.put_told(lambda: self._add_all((request,)), done)

    def abort(self, *request_ids: str) -> None:
        """End requests in any state, all before the next step; nothing happens to one that has ended already."""

        def run() -> None:
            for request_id in request_ids:
                self._abort(request_id, "abort", None)

        self._call(run)

    def abandon(self, request: Request) -> None:
        """``abort`` for callers that must not wait, such as an event loop; by then another request may have the id."""
        self._commands.put(lambda: self._abandon(request))

    def finish(self, request: Request, index: int) -> None:
        """End one continuation: stage 3 has found a stop string in it. Does not wait."""
        self._commands.put(lambda: self._finish(request, index))

    def health(self) -> Health:
        stats = self.scheduler.stats()
        busy = bool(self._members or self._in_flight)
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
        for request in {id(m.request): m.request for m in self._members.values()}.values():
            self._end(request, "error" if self._failure else "abort", str(self._failure or "shut down"))
        self._hand_over()

    def _turn(self) -> None:
        self._session = self._session or self._loaded.session()
        self._take_commands()
        self._submit()
        self._hand_over()  # text is made of them while the device computes, and not beside what is done above
        if self._in_flight:
            self._finish_step()

    def _hand_over(self) -> None:
        if self._events:
            events, self._events = self._events, []
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
        requests = {id(m.request): m.request for m in self._members.values()}
        begun = {
            id(self._members[seq_id].request)
            for seq_id, seq in self.scheduler.sequences.items()
            if seq_id in self._members and (seq.status is SequenceStatus.RUNNING or seq.num_output)
        }
        self._restarts.wait(error)
        self._members, self._suspects, self._host = {}, deque(), HostBlocks()
        self.scheduler = self._loaded.scheduler()
        sentence = f"The step loop failed, and has begun anew; ask again ({type(error).__name__}: {error})."
        for key, request in requests.items():
            if key in begun:
                for index in range(len(request.continuations)):
                    self._event(request, index, reason="error", why=sentence)
            else:
                self._add(request)

    def _take_commands(self) -> None:
        while not self._stopping:
            if idle := not self._members and not self._in_flight:
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
            guesses = {} if suspect else self.speculation.guesses(decoding, self._members)
            step = self.scheduler.schedule(suspect, joining, guesses)
            if step is None:
                return
            params, failed = asked(step, self._members, self.scheduler.sequences)
            for request_id, sentence in failed.items():
                self._abort(request_id, "error", sentence)
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
        while self._suspects and all(m.request.request_id != self._suspects[0] for m in self._members.values()):
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
        rows, values, held = flight.rows, result.tokens.tolist(), {}
        if not rows.plain:
            held = self.speculation.check(flight.step, rows.next, result, self._members)
            values = [values[n + held.get(seq_id, 0)] for seq_id, n in rows.next.items()]
        tokens = dict(zip(rows.next, values, strict=True))
        failed = self._failed(rows, result) if result.status.any() else {}
        if not rows.plain:
            self._note_reading(flight.step)
            self._score(rows, result)
            failed |= take_states(flight.step, result.embeddings, self._pooler)
        for update in self.scheduler.complete(flight.step, tokens, failed, held):
            self._publish(update, result, rows.next)
        self._host.keep(self.scheduler.swapper.held)

    def _failed(self, rows: Rows, result: StepResult) -> dict[int, str]:
        """Why sequences have failed."""
        return {row.seq_id: self._fault(row.seq_id, code) for row, code in self._statuses(rows, result) if code}

    def _statuses(self, rows: Rows, result: StepResult) -> Iterator[tuple[Row, int]]:
        """A beam that may take no token does not fail its request, nor does what comes of a guess."""
        for row, code in zip(rows.each, result.status.tolist(), strict=True):
            member = self._members.get(row.seq_id)
            spared = code == NO_TOKEN and member is not None and member.beams
            yield row, 0 if spared or row.guessed else code

    def _note_reading(self, step: ScheduledStep) -> None:
        for part in step.sequences:
            if not part.emits and (member := self._members.get(part.seq_id)):
                member.request.num_read = part.start + part.num_tokens

    def _score(self, rows: Rows, result: StepResult) -> None:
        """Notes the logprobs of prompt tokens; all have come before the first token of the output."""
        for n, row in enumerate(rows.each):
            if row.position is None or result.status[n]:
                continue
            if member := self._members.get(row.seq_id):
                request = member.request
                assert request.prompt_logprobs is not None and request.params.prompt_logprobs is not None
                want, token = request.params.prompt_logprobs, request.prompt_ids[row.position]
                request.prompt_logprobs[row.position] = logprobs(result, n, want, token)

    def _pooler(self, seq_id: int) -> Pooler | None:
        member = self._members.get(seq_id)
        return None if member is None else member.request.pooler

    def _fault(self, seq_id: int, status: int) -> str:
        """Why a row has failed; its sequence may have ended meanwhile."""
        member = self._members.get(seq_id)
        matcher = member.row.matcher if member else None
        return (matcher.error if matcher else None) or STATUS[status]

    def _publish(self, update: Update, result: StepResult, rows: Mapping[int, int]) -> None:
        seq = update.sequence
        member = self._members.get(seq.seq_id)
        if member is None:  # its request has ended with an update before this one
            return
        if seq.branch == 0:  # what the others find in the cache may be the request's own work
            member.request.num_cached = seq.num_cached or 0
        if update.error is not None:
            self._drop(seq.seq_id)
            if member.beams is None:
                self._event(member.request, member.index, reason="error", why=update.error)
            else:
                self._end(member.request, "error", update.error)
            return
        if member.request.pooler is not None:
            self._drop(seq.seq_id)
            member.request.embedding = vector = member.request.pooler.vector()
            fault = STATUS[1] if vector is None else None
            self._event(member.request, 0, reason="error" if fault else "stop", why=fault)
            return
        if update.token_id is None:
            return
        if member.beams is not None:
            member.request.first_token = member.request.first_token or time.monotonic()
            if member.beams.take(seq.seq_id, result, rows[seq.seq_id]):
                self._advance(member, member.beams)
            return
        token, reason, why = update.token_id, None, None
        is_stop = token in member.request.stop_ids and seq.num_output >= member.request.params.min_tokens
        complete = member.row.matcher is not None and member.row.matcher.advance(token)
        if is_stop or complete:
            reason, why = "stop", token if is_stop else None
            if not update.finished:
                self.scheduler.finish(seq.seq_id)
        elif update.finished:
            reason = "length"
        if reason is not None:
            self._drop(seq.seq_id)
        found = logprobs(result, rows[seq.seq_id] + update.nth, member.row.want, token)
        self._event(member.request, member.index, token, found, is_stop, reason, why)

    def _advance(self, member: Member, group: BeamGroup) -> None:
        """The next round of a beam search, or its end: then its best sequences go out whole."""
        request = member.request
        for seq_id in group.ids:
            self._drop(seq_id)
        beams = group.advance(self.scheduler, request.request_id, self._next_id)
        if beams:
            self._next_id = max(self._next_id, *(beam.seq_id + 1 for beam in beams))
            self._members |= {beam.seq_id: member for beam in beams}
            return
        self.scheduler.abort(request.request_id)
        for index, token, logprob, reason, why in group.found(request.params.n):
            self._event(request, index, token, {token: logprob}, isinstance(why, int), reason, why)
        self._end(request, "error", STATUS[NO_TOKEN])  # those that found no token to end with

    def _event(
        self,
        request: Request,
        index: int,
        token: int | None = None,
        logprobs: Mapping[int, float] | None = None,
        is_stop: bool = False,
        reason: str | None = None,
        why: str | int | None = None,
    ) -> None:
        self._events.append(TokenEvent(request, index, token, logprobs, is_stop, reason, why, time.monotonic()))

    # -- on the loop's thread --------------------------------------------------------------------------------------

    def _add_all(self, requests: tuple[Request, ...]) -> None:
        for n, request in enumerate(requests):
            try:
                self._add(request)
            except Exception as error:
                for admitted in requests[:n]:
                    for seq_id in self.scheduler.abort(admitted.request_id):
                        self._drop(seq_id)
                if isinstance(error, EngineError):
                    raise numbered(error, n, len(requests)) from error
                raise

    def _add(self, request: Request) -> None:
        if self.scheduler.has(request.request_id):
            raise RequestError(f"The request id {request.request_id!r} is in use; give each request an id of its own.")
        params = request.params
        room = self._loaded.max_model_len - len(request.prompt_ids)
        limit = params.max_tokens if params.max_tokens is not None else max(room, 1)
        if request.pooler is None and params.max_tokens is None and (room < 1 or params.min_tokens > room):
            raise AdmissionError(
                f"The prompt has {len(request.prompt_ids)} tokens, and {max(params.min_tokens, 1)} more are wanted at least; the"
                f" context holds {self._loaded.max_model_len}."
            )
        group = None
        if request.beam is not None:
            tokenizer = self._loaded.checkpoint.tokenizer() if params.stop else None
            group = BeamGroup(make_search(request, request.beam, limit, tokenizer), [self._next_id])
        ids, pooler = request.prompt_ids, request.pooler
        if pooler is not None:
            ids, limit = pooler.begin(ids), 0
        host = bool(request.processors or request.matchers) or group is not None  # it must see each token
        guesses = self.speculation.most > 0 and not host and pooler is None
        first = Sequence(
            self._next_id,
            request.request_id,
            list(ids),
            limit,
            request.priority,
            request.salt,
            synchronous=host or guesses,
            beam=group is not None,
            scores_prompt=params.prompt_logprobs is not None,
            embeds_from=None if pooler is None else pooler.first(len(ids)),
        )
        row = row_params(request, group)  # before anything is booked: what is wrong with it must leave no trace
        added = self.scheduler.add(first, 1 if group is not None else params.samples)
        self._next_id += len(added)
        for seq in added:
            matcher = request.matchers[seq.branch] if request.matchers else None
            own = replace(row, branch=seq.branch, matcher=matcher)
            self._members[seq.seq_id] = Member(request, seq.branch, own, group, PromptLookup() if guesses else None)

    def _abort(self, request_id: str, reason: str, why: str | None) -> None:
        requests = {id(m.request): m.request for m in self._members.values() if m.request.request_id == request_id}
        for request in requests.values():
            self._end(request, reason, why)

    def _end(self, request: Request, reason: str, why: str | None) -> None:
        """Ends what is left of a request; stage 3 passes over continuations that have ended already."""
        for seq_id in self.scheduler.abort(request.request_id):
            self._members.pop(seq_id, None)
        for index in range(len(request.continuations)):
            self._event(request, index, reason=reason, why=why)

    def _abandon(self, request: Request) -> None:
        if any(member.request is request for member in self._members.values()):
            self._end(request, "abort", None)

    def _finish(self, request: Request, index: int) -> None:
        for seq_id, member in list(self._members.items()):
            if member.request is request and member.index == index:
                self.scheduler.finish(seq_id)
                self._drop(seq_id)

    def _drop(self, seq_id: int) -> Member:
        return self._members.pop(seq_id)

    def _recover(self, step: ScheduledStep, error: Exception) -> None:
        """The device lost its state: recompute. The step's requests then run one at a time, so that the one at fault
        fails alone. Raises the error where it says that nothing more can be done."""
        if isinstance(error, EngineStoppedError):
            raise error
        self._close_session()
        members = [self._members[part.seq_id] for part in step.sequences if part.seq_id in self._members]
        ids = list(dict.fromkeys(member.request.request_id for member in members))
        self.scheduler.reset()
        self._host.keep(self.scheduler.swapper.held)
        if len(ids) == 1:
            sentence = f"The device failed on this request: {type(error).__name__}: {error}"
            self._abort(ids[0], "error", sentence)
        else:
            self._suspects = deque(ids)
        let_go(error)
        self._session = self._loaded.session()
