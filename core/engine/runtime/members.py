"""The requests in the engine: their sequences in the scheduler, and what becomes of them, as events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..backend.v1 import StepResult
from ..errors import AdmissionError, EngineError, RequestError
from ..sampling.speculation import PromptLookup
from ..scheduler import ScheduledStep, Sequence, SequenceStatus, Update
from .beams import BeamGroup, make_search
from .load import Loaded
from .member import Member, logprobs, row_params
from .output_processor import TokenEvent
from .pooling import Pooler, take_states
from .prompt import numbered
from .request import Request
from .step_inputs import Row, Rows

NO_TOKEN = 2
STATUS = {
    1: "The model gave numbers that are not finite; the checkpoint or this prompt is damaged.",
    NO_TOKEN: "No token is left to choose: the logit bias, the mask or the n-grams ban them all.",
}


class Members:
    """``by_id``: sequences that have not ended. ``events``: what is to be told of them since somebody took these. ``guesses``:
    whether tokens may be guessed. Not thread-safe: the loop's thread owns it."""

    def __init__(self, loaded: Loaded, guesses: bool) -> None:
        self._loaded = loaded
        self._guesses = guesses
        self.scheduler = loaded.scheduler()
        self.by_id: dict[int, Member] = {}
        self.events: list[TokenEvent] = []
        self._next_id = 0

    @property
    def requests(self) -> list[Request]:
        return list({id(member.request): member.request for member in self.by_id.values()}.values())

    # -- they come and go ------------------------------------------------------------------------------------------

    def add_all(self, requests: tuple[Request, ...]) -> None:
        """All or, where one is refused, none; the sentence then says which."""
        for n, request in enumerate(requests):
            try:
                self.add(request)
            except Exception as error:
                for admitted in requests[:n]:
                    for seq_id in self.scheduler.abort(admitted.request_id):
                        self._drop(seq_id)
                if isinstance(error, EngineError):
                    raise numbered(error, n, len(requests)) from error
                raise

    def add(self, request: Request) -> None:
        """Raises AdmissionError where it can never fit, RequestError where its id is in use."""
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
        guesses = self._guesses and not host and pooler is None
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
            whole=not self._loaded.model.config.causal,
        )
        row = row_params(request, group)  # before anything is booked: what is wrong with it must leave no trace
        added = self.scheduler.add(first, 1 if group is not None else params.samples)
        self._next_id += len(added)
        for seq in added:
            matcher = request.matchers[seq.branch] if request.matchers else None
            own = replace(row, branch=seq.branch, matcher=matcher)
            self.by_id[seq.seq_id] = Member(request, seq.branch, own, group, PromptLookup() if guesses else None)

    def abort(self, request_id: str, reason: str, why: str | None) -> None:
        for request in self.requests:
            if request.request_id == request_id:
                self.end(request, reason, why)

    def end(self, request: Request, reason: str, why: str | None) -> None:
        """Ends what is left of a request; stage 3 passes over continuations that have ended already."""
        for seq_id in self.scheduler.abort(request.request_id):
            self.by_id.pop(seq_id, None)
        for index in range(len(request.continuations)):
            self._event(request, index, reason=reason, why=why)

    def abandon(self, request: Request) -> None:
        """Ends this one, and not another that has the same id by now."""
        if any(member.request is request for member in self.by_id.values()):
            self.end(request, "abort", None)

    def finish(self, request: Request, index: int) -> None:
        """Ends a continuation of which stage 3 knows that it has ended."""
        for seq_id, member in list(self.by_id.items()):
            if member.request is request and member.index == index:
                self.scheduler.finish(seq_id)
                self._drop(seq_id)

    def _drop(self, seq_id: int) -> Member:
        return self.by_id.pop(seq_id)

    def restart(self, sentence: str) -> None:
        """Nothing that the scheduler knows is to be relied on. Requests that have begun, or ended there, end with this sentence;
        the others are added to a new one."""
        requests, sequences = self.requests, self.scheduler.sequences
        begun = {
            id(member.request)
            for seq_id, member in self.by_id.items()
            if (seq := sequences.get(seq_id)) is None or seq.status is SequenceStatus.RUNNING or seq.num_output
        }
        self.by_id, self.scheduler = {}, self._loaded.scheduler()
        for request in requests:
            if id(request) in begun:
                for index in range(len(request.continuations)):
                    self._event(request, index, reason="error", why=sentence)
            else:
                self.add(request)

    # -- what steps give them --------------------------------------------------------------------------------------

    def take(self, step: ScheduledStep, rows: Rows, result: StepResult, held: Mapping[int, int]) -> None:
        """A step is done; of the guesses of each sequence so many are right as ``held`` says."""
        values = result.tokens.tolist()
        if not rows.plain:
            values = [values[n + held.get(seq_id, 0)] for seq_id, n in rows.next.items()]
        tokens = dict(zip(rows.next, values, strict=True))
        failed = self._failed(rows, result) if result.status.any() else {}
        if not rows.plain:
            self._note_reading(step)
            self._score(rows, result)
            failed |= take_states(step, result.embeddings, self._pooler)
        for update in self.scheduler.complete(step, tokens, failed, held):
            self._publish(update, result, rows.next)

    def _failed(self, rows: Rows, result: StepResult) -> dict[int, str]:
        """Why sequences have failed."""
        return {row.seq_id: self._fault(row.seq_id, code) for row, code in self._statuses(rows, result) if code}

    def _statuses(self, rows: Rows, result: StepResult) -> Iterator[tuple[Row, int]]:
        """A beam that may take no token does not fail its request, nor does what comes of a guess."""
        for row, code in zip(rows.each, result.status.tolist(), strict=True):
            member = self.by_id.get(row.seq_id)
            spared = code == NO_TOKEN and member is not None and member.beams
            yield row, 0 if spared or row.guessed else code

    def _note_reading(self, step: ScheduledStep) -> None:
        for part in step.sequences:
            if not part.emits and (member := self.by_id.get(part.seq_id)):
                member.request.num_read = part.start + part.num_tokens

    def _score(self, rows: Rows, result: StepResult) -> None:
        """Notes the logprobs of prompt tokens; all have come before the first token of the output."""
        for n, row in enumerate(rows.each):
            if row.position is None or result.status[n]:
                continue
            if member := self.by_id.get(row.seq_id):
                request = member.request
                assert request.prompt_logprobs is not None and request.params.prompt_logprobs is not None
                want, token = request.params.prompt_logprobs, request.prompt_ids[row.position]
                request.prompt_logprobs[row.position] = logprobs(result, n, want, token)

    def _pooler(self, seq_id: int) -> Pooler | None:
        member = self.by_id.get(seq_id)
        return None if member is None else member.request.pooler

    def _fault(self, seq_id: int, status: int) -> str:
        """Why a row has failed; its sequence may have ended meanwhile."""
        member = self.by_id.get(seq_id)
        matcher = member.row.matcher if member else None
        return (matcher.error if matcher else None) or STATUS[status]

    def _publish(self, update: Update, result: StepResult, rows: Mapping[int, int]) -> None:
        seq = update.sequence
        member = self.by_id.get(seq.seq_id)
        if member is None:  # its request has ended with an update before this one
            return
        if seq.branch == 0:  # what the others find in the cache may be the request's own work
            member.request.num_cached = seq.num_cached or 0
        if update.error is not None:
            self._drop(seq.seq_id)
            if member.beams is None:
                self._event(member.request, member.index, reason="error", why=update.error)
            else:
                self.end(member.request, "error", update.error)
            return
        if member.request.pooler is not None:
            member.request.embedding = vector = member.request.pooler.vector()  # which may fail
            self._drop(seq.seq_id)
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
        found = logprobs(result, rows[seq.seq_id] + update.nth, member.row.want, token)
        if reason is not None:
            self._drop(seq.seq_id)
        self._event(member.request, member.index, token, found, is_stop, reason, why)

    def _advance(self, member: Member, group: BeamGroup) -> None:
        """The next round of a beam search, or its end: then its best sequences go out whole."""
        request = member.request
        ids = tuple(group.ids)
        beams = group.advance(self.scheduler, request.request_id, self._next_id)
        found = () if beams else tuple(group.found(request.params.n))
        for seq_id in ids:  # now that nothing of this can fail any more
            self._drop(seq_id)
        if beams:
            self._next_id = max(self._next_id, *(beam.seq_id + 1 for beam in beams))
            self.by_id |= {beam.seq_id: member for beam in beams}
            return
        self.scheduler.abort(request.request_id)
        for index, token, logprob, reason, why in found:
            self._event(request, index, token, {token: logprob}, isinstance(why, int), reason, why)
        self.end(request, "error", STATUS[NO_TOKEN])  # those that found no token to end with

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
        self.events.append(TokenEvent(request, index, token, logprobs, is_stop, reason, why, time.monotonic()))
