"""The token-budget scheduler: continuous batching with chunked prefill, preemption by recomputation or by swapping,
parallel samples and beams.

The loop is vLLM v1's (no phases: every sequence has tokens computed and tokens wanted), the order Sarathi-Serve's
(decodes, then running prefills in chunks, then new requests; Agrawal et al. 2024, arXiv 2403.02310), so that decodes
never wait for a prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from ..errors import SchedulerError
from ..kv import HostPool, KVAllocator, MappingAllocator
from .config import SchedulerConfig, SchedulerStats
from .policy import POLICIES
from .queues import Queues
from .sequence import Sequence, SequenceStatus, check_admission
from .step import FROM_HISTORY, Failures, Guesses, ScheduledSequence, ScheduledStep, StepDraft, Tokens, Update
from .swapping import Swapper

_NEXT = (FROM_HISTORY,)


class Scheduler:
    """Decides what each step computes. Not thread-safe: one thread owns it.

    The caller submits each step from ``schedule`` to the device in order, and hands its tokens to ``complete`` in the
    same order. It may schedule further steps before that (at most the device's max_in_flight are wise). State changes
    on the device in submission order, so what a sequence gives back may be given out by the next step at once.
    With a ``host`` pool, preempted sequences are swapped out while it has room, and computed again otherwise.
    """

    def __init__(self, config: SchedulerConfig, allocator: KVAllocator, host: HostPool | None = None) -> None:
        self.config = config
        self.allocator = allocator
        self._mapping = allocator if isinstance(allocator, MappingAllocator) else None
        self.swapper = Swapper(host, allocator.groups)
        self._queues = Queues(POLICIES[config.policy], config.max_sequences)
        self.sequences = self._queues.sequences
        self._in_flight: deque[tuple[ScheduledStep, list[Sequence]]] = deque()
        self._arrivals = 0
        self._steps = 0
        self._preemptions = 0

    # Requests come and go.

    def add(self, sequence: Sequence, n: int = 1) -> tuple[Sequence, ...]:
        """Admits a request of ``n`` parallel samples, or refuses it with AdmissionError and a sentence.

        Returns its sequences, branch 0 (the one given) first; they have the ids ``seq_id`` to ``seq_id + n - 1``. The
        prompt but for its last token is computed once, and forked.
        """
        if taken := [i for i in range(sequence.seq_id, sequence.seq_id + n) if i in self.sequences]:
            raise SchedulerError(f"sequence id {taken[0]} is in use; ids are unique, and n samples take n ids")
        check_admission(sequence, n, self.config.max_model_len)
        branches = [sequence]
        for branch in range(1, n):
            branches.append(
                replace(sequence, seq_id=sequence.seq_id + branch, branch=branch, unforked=[], scores_prompt=False)
            )
        limit = sequence.num_prompt + sequence.max_tokens
        for each in branches:
            self.allocator.open(each.seq_id, limit, each.salt, sequence.num_prompt)
            each.arrival = self._arrivals
            self._queues.enter(each)
        self._arrivals += 1
        if sequence.num_prompt > 1:
            sequence.unforked = branches[1:]
        for each in branches[:1] if sequence.unforked else branches:
            self._queues.wait(each)
        return tuple(branches)

    def has(self, request_id: str) -> bool:
        """Whether a sequence of this request is here."""
        return request_id in self._queues.requests

    def finish(self, seq_id: int) -> None:
        """Ends a sequence (a stop token or string was found). Tokens of it in flight will be dropped."""
        if seq_id not in self.sequences:
            raise SchedulerError(f"sequence {seq_id} is not in the scheduler; it has ended or was never added")
        self._end(self.sequences[seq_id])

    def continue_beams(
        self, request_id: str, choices: Iterable[tuple[int, int]], first_id: int
    ) -> tuple[Sequence, ...]:
        """Goes on with a beam request once all its beams are held: for each (sequence id, token) the sequence with that
        token, in the same order. A sequence's first choice continues it, the others are forked from it and get the ids
        ``first_id`` and on; sequences that are not chosen end."""
        parents = {sequence.seq_id: sequence for sequence in self._queues.requests[request_id]}
        waited = [sequence.seq_id for sequence in parents.values() if not sequence.held]
        if waited:
            raise SchedulerError(f"beam {waited[0]} of {request_id!r} has not come yet; beams go on together")
        going: list[Sequence] = []
        for seq_id, token in choices:
            parent = parents[seq_id]
            if parent.held:
                parent.token_ids.append(token)
                parent.held = False
                going.append(parent)
            else:
                child = parent.fork(first_id, token)
                first_id += 1
                self.allocator.open(child.seq_id, child.num_prompt + child.max_tokens, child.salt, child.num_prompt)
                self._queues.enter(child)
                parent.unforked.append(child)
                going.append(child)
        for sequence in parents.values():
            if sequence.held:
                self._end(sequence)
        return tuple(going)

    def abort(self, request_id: str) -> tuple[int, ...]:
        """Ends all sequences of a request, in whatever state, and returns their ids; () where none is left."""
        ended = tuple(self._queues.requests.get(request_id, ()))
        for sequence in reversed(ended):  # branches not yet forked before the one that carries them
            self._end(sequence)
        return tuple(sequence.seq_id for sequence in ended)

    # The step loop.

    @property
    def decoding(self) -> list[Sequence]:
        """Running sequences that want one token."""
        return [sequence for sequence in self._queues.running if sequence.wanted == 1]

    @property
    def prefilling(self) -> int:
        """How many sequences wait, or run and want more than one token."""
        return len(self._queues.waiting) + sum(sequence.wanted > 1 for sequence in self._queues.running)

    def schedule(
        self, only: str | None = None, joining: int | None = None, guesses: Guesses | None = None
    ) -> ScheduledStep | None:
        """The next step, or None where there is nothing to do before a step in flight completes, or at all.

        ``only`` names a request to run alone, to find the one that breaks steps: all others are preempted first.
        ``joining``: most tokens of prompts that join a step with decodes; what the budget leaves if None. ``guesses``: what
        may follow the tokens of synchronous sequences, to be computed with them where there is room.
        """
        draft = StepDraft(self.config.max_batch_tokens, self.config.rows)
        if only is not None:
            for sequence in tuple(self._queues.running):
                if sequence.request_id != only:
                    self._preempt(sequence)
        self._fill(draft, only, joining, guesses or {})
        while not draft.sequences and self._stalls(only) and (held := self._queues.last_held()):
            self._preempt(held)  # what it holds is what its siblings wait for
            self._fill(draft, only, joining, {})
        if not draft.sequences:
            self._check_progress(only)
            return None
        return self._issue(draft)

    def _fill(self, draft: StepDraft, only: str | None, joining: int | None, guesses: Guesses) -> None:
        """Decodes first, then running prefills, then new sequences."""
        self._fork_ready(draft)
        running = [(sequence, sequence.wanted) for sequence in self._queues.running]
        draft.spare = min(draft.budget, draft.rows) - sum(wanted == 1 for _, wanted in running)
        for sequence, wanted in running:
            if wanted == 1 and (guesses or not self._decode(draft, sequence)):
                self._advance(draft, sequence, guesses.get(sequence.seq_id, ()))
        if draft.sequences and joining is not None:
            draft.budget = min(draft.budget, joining)
        for sequence, wanted in running:
            if wanted > 1:
                self._advance(draft, sequence)
        if not draft.out_of_blocks:
            self._admit(draft, only)

    def complete(
        self, step: ScheduledStep, tokens: Tokens, failed: Failures | None = None, held: Tokens | None = None
    ) -> list[Update]:
        """Takes the result of the oldest step in flight: a token for each sequence that emits, or a sentence for each
        that failed, by sequence id. ``held``: how many of a sequence's guesses are right; its token is the one after these.
        Sequences that have ended meanwhile may be missing, and are passed over. Whether a token is the last one, short of
        max_tokens, is for the caller to say (``finish``), best before the next ``schedule``."""
        failed, held = failed or {}, held or {}
        if not self._in_flight or self._in_flight[0][0] is not step:
            raise SchedulerError(
                f"step {step.number} is not the oldest step in flight; steps complete in the order scheduled"
            )
        parts = list(zip(step.sequences, self._in_flight[0][1], strict=True))
        for part, sequence in parts:
            missing = part.emits and part.seq_id not in tokens and part.seq_id not in failed
            if missing and sequence.status is not SequenceStatus.FINISHED:
                raise SchedulerError(f"step {step.number} gives no token for sequence {part.seq_id}, which emits one")
        self._in_flight.popleft()
        self.swapper.complete(step)
        updates: list[Update] = []
        for part, sequence in parts:
            sequence.steps_in_flight -= 1
            sequence.num_pending -= part.emits
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if part.seq_id in failed:
                self._end(sequence)
                updates.append(Update(sequence, None, finished=True, error=failed[part.seq_id]))
                continue
            new: tuple[int, ...] = (tokens[part.seq_id],) if part.emits else ()
            if part.guessed:
                new = (*part.token_ids[part.num_tokens - part.guessed :][: held.get(part.seq_id, 0)], *new)
                updates += (Update(sequence, token, nth=nth) for nth, token in enumerate(new[:-1]))
            self._book(part, sequence, new)
            if part.emits:
                finished = len(sequence.token_ids) - sequence.num_prompt >= sequence.max_tokens and not sequence.beam
                updates.append(Update(sequence, new[-1], finished, None, len(new) - 1))
            else:
                finished = sequence.embeds_from is not None and part.start + part.num_tokens == sequence.num_prompt
                updates += [Update(sequence, None, finished=True)] if finished else []
            if finished:
                self._end(sequence)
        return updates

    def _book(self, part: ScheduledSequence, sequence: Sequence, new: tuple[int, ...]) -> None:
        """What a part of a step that is done has computed, and the tokens that are known by it."""
        if sequence.beam:
            sequence.held = part.emits
        else:
            sequence.token_ids += new
        if sequence.status is SequenceStatus.RUNNING:
            end = part.start + part.num_tokens
            if part.guessed >= len(new) > 0:  # not all guesses are right
                sequence.num_computed = end = end - part.guessed + len(new) - 1
                self.allocator.rewind(part.seq_id, end)
            if not sequence.whole:  # on whose cache none may ever build
                # Only now: before the step is done, no other sequence may build on its cache.
                self.allocator.commit(part.seq_id, sequence.token_ids, end)

    def reset(self) -> None:
        """The device lost its state: steps in flight are void, and every sequence is computed again from its tokens, but for
        those whose cache is saved on the host."""
        for step, sequences in reversed(self._in_flight):
            for part, sequence in zip(step.sequences, sequences, strict=True):
                sequence.steps_in_flight = sequence.num_pending = 0
                for start, stop in (part.scored, part.embedded):
                    if start < stop:
                        sequence.num_scored = start
        self._in_flight.clear()
        for sequence in tuple(self._queues.running):
            self._preempt(sequence, swap=False)
        self.swapper.reset()
        self.allocator.forget()

    def stats(self) -> SchedulerStats:
        queues = (len(self._queues.waiting), len(self._queues.running), len(self._in_flight))
        pool = None if self.swapper.pool is None else self.swapper.pool.stats()
        return SchedulerStats(*queues, self._preemptions, self.allocator.stats(), self.swapper.outs, pool)

    def check(self) -> None:
        """Raises AssertionError where an invariant is broken (tests)."""
        self.allocator.check()
        self._queues.check()
        for sequence in self._queues.places():
            assert not sequence.held or (sequence.beam and sequence.wanted == 0), "a held sequence wants a step"
            assert 0 <= sequence.num_pending <= sequence.steps_in_flight <= len(self._in_flight)
            assert sequence.num_output + sequence.num_pending <= sequence.max_tokens, "more tokens than max_tokens"
            running = sequence.status is SequenceStatus.RUNNING
            held = self.allocator.tables(sequence.seq_id)
            assert running == any(held) == (sequence.num_computed > 0), "only running sequences hold blocks"
        assert self.swapper.held <= {sequence.seq_id for sequence in self._queues.waiting}, "who is swapped out waits"
        if self.swapper.pool is not None:
            self.swapper.pool.check()

    # Inside.

    def _fork_ready(self, draft: StepDraft) -> None:
        """Forks the sequences whose prompt is computed but for its last token. Branches that find no slot or block
        now wait as ordinary sequences, and will hit the prompt's prefix."""
        for parent in tuple(self._queues.running):
            if not parent.unforked or parent.wanted:
                continue
            children, parent.unforked = parent.unforked, []
            for number, child in enumerate(children, start=1):
                if self._queues.slots and self.allocator.can_fork(parent.seq_id, number):
                    self.allocator.fork(parent.seq_id, child.seq_id)
                    self._queues.start(child)
                    child.num_computed, child.num_cached = parent.num_computed, parent.num_cached
                    draft.history_copies.append((parent.slot, child.slot))
                else:
                    self._queues.wait(child)

    def _decode(self, draft: StepDraft, sequence: Sequence) -> bool:
        """``_advance`` where a sequence wants its next token and nothing else, as most do; whether that is so, and it fits."""
        asks = sequence.unforked or sequence.scores_prompt or sequence.embeds_from is not None
        if asks or not draft.budget or not draft.rows or sequence.status is not SequenceStatus.RUNNING:
            return False
        seq_id, start, known = sequence.seq_id, sequence.num_computed, sequence.token_ids
        if not self.allocator.allocate(seq_id, 1):
            return False
        draft.budget -= 1
        draft.rows -= 1
        draft.plain += 1
        sequence.num_computed += 1
        sequence.num_pending += 1
        sequence.steps_in_flight += 1
        token = _NEXT if start >= len(known) else (known[start],)
        tables = self.allocator.tables(seq_id)
        draft.sequences[seq_id] = ScheduledSequence(seq_id, sequence.slot, start, 1, token, True, tables)
        return True

    def _advance(self, draft: StepDraft, sequence: Sequence, guess: tuple[int, ...] = ()) -> None:
        """Adds a running sequence's next chunk, preempting others for its blocks where it must; what is guessed behind it
        only where there is room."""
        count = self._chunk(draft, sequence, sequence.num_computed)
        if count == 0 or sequence.status is not SequenceStatus.RUNNING:
            return
        emits = sequence.synchronous and sequence.num_computed + count == len(sequence.token_ids)
        guess = guess[: max(min(draft.spare, sequence.max_tokens - sequence.num_output - 1), 0)] if emits else ()
        if guess and self.allocator.allocate(sequence.seq_id, count + len(guess)):
            self._take(draft, sequence, count, guess)
            return
        while not self.allocator.allocate(sequence.seq_id, count):
            draft.out_of_blocks = True
            victim = self._victim(draft, sequence)
            if victim is None:
                if self._queues.running == [sequence]:  # no others to wait for: what it holds is in its own way
                    self._preempt(sequence, swap=False)
                    draft.out_of_blocks = False
                return  # else it keeps its blocks and waits for those before it
            # What a fork copies for it in this step is not there yet to be saved.
            self._preempt(victim, swap=all(slot != victim.slot for _, slot in draft.history_copies))
        self._take(draft, sequence, count)

    def _admit(self, draft: StepDraft, only: str | None) -> None:
        """Starts waiting sequences in policy order, up to the first that must wait on."""
        while self._queues.slots and draft.budget and (sequence := self._queues.first_waiting(only)):
            if sequence.steps_in_flight or self.swapper.is_under_way(sequence.seq_id):
                return  # preempted, and a token of it is still to come, or its blocks are on their way to the host
            goal = sequence.goal
            swapped = self.swapper.hit(sequence)
            # A token whose row is wanted is computed, whatever is cached of it.
            limit = 1 if sequence.whole else min(goal, sequence.first_row + 1)
            hit = swapped or self.allocator.match(sequence.seq_id, sequence.token_ids, limit)
            # Room for all its tokens, not just the first chunk, or it would soon be preempted amid its prompt.
            rest = goal - hit.num_tokens
            if not self.allocator.can_fit(sequence.seq_id, rest, hit):
                return
            count = self._chunk(draft, sequence, hit.num_tokens)
            if count == 0:
                return
            self.allocator.allocate(sequence.seq_id, count, hit)
            if swapped:
                tables = self.allocator.tables(sequence.seq_id)
                draft.swap_ins.append(self.swapper.take_in(sequence.seq_id, tables))
            self._queues.waiting.remove(sequence)
            self._queues.start(sequence)
            sequence.num_computed = hit.num_tokens
            if sequence.num_cached is None:
                sequence.num_cached = hit.num_tokens
            if hit.num_tokens:
                draft.history_fills.append((sequence.slot, tuple(sequence.token_ids[: hit.num_tokens])))
            self._take(draft, sequence, count)

    def _chunk(self, draft: StepDraft, sequence: Sequence, start: int) -> int:
        """How many tokens from ``start`` on the step can take: of a sequence that is computed whole all or none."""
        wanted = sequence.goal - start
        fits = wanted if sequence.embeds_from is not None else sequence.first_row - start + draft.rows
        count = max(min(wanted, draft.budget, fits), 0)
        return 0 if sequence.whole and count < wanted else count

    def _take(self, draft: StepDraft, sequence: Sequence, count: int, guess: tuple[int, ...] = ()) -> None:
        """Puts ``count`` allocated tokens into the step, and those of a guess behind them."""
        start, known = sequence.num_computed, sequence.token_ids
        end = start + count
        token_ids = tuple(known[start:end])
        if len(token_ids) < count:
            token_ids += (FROM_HISTORY,) * (count - len(token_ids))
        embeds = sequence.embeds_from is not None
        emits = end == len(known) + sequence.num_pending and not embeds
        if not embeds:
            draft.rows -= max(end - sequence.first_row, 0) + len(guess)
        scored = _span(sequence, sequence.scores_prompt, min(end, sequence.num_prompt - 1))
        embedded = _span(sequence, embeds, end)
        sequence.num_computed = end + len(guess)
        sequence.num_pending += emits
        sequence.steps_in_flight += 1
        draft.budget -= count + len(guess)
        draft.spare -= len(guess)
        tables = self.allocator.tables(sequence.seq_id)
        part = ScheduledSequence(
            sequence.seq_id, sequence.slot, start, count + len(guess), token_ids + guess, emits, tables, scored, embedded,
            len(guess),
        )  # fmt: skip
        draft.sequences[sequence.seq_id] = part

    def _issue(self, draft: StepDraft) -> ScheduledStep:
        parts, decode_count = draft.ordered()
        step = ScheduledStep(
            number=self._steps,
            sequences=parts,
            decode_count=decode_count,
            num_tokens=sum(part.num_tokens for part in parts),
            block_copies=self.allocator.take_copies(),
            history_copies=tuple(draft.history_copies),
            history_fills=tuple(draft.history_fills),
            swap_outs=self.swapper.issue(),
            swap_ins=tuple(draft.swap_ins),
            remaps=() if self._mapping is None else self._mapping.take_remaps(),
            plain=draft.plain == len(parts),
        )
        self._steps += 1
        self._in_flight.append((step, [self.sequences[part.seq_id] for part in parts]))
        return step

    def _victim(self, draft: StepDraft, sequence: Sequence) -> Sequence | None:
        """Whom to preempt for ``sequence``: one with nothing left to compute, else the last in policy order, if it
        comes after ``sequence`` and is not in the step already."""
        candidates = [other for other in self._queues.running if other.seq_id not in draft.sequences]
        for other in candidates:
            if other.exhausted:
                return other
        return candidates[-1] if candidates[-1] is not sequence else None

    def _preempt(self, sequence: Sequence, swap: bool = True) -> None:
        """Takes everything from a running sequence; it will be swapped in, or its known tokens computed again."""
        if swap:
            self.swapper.take_out(sequence, self.allocator.tables(sequence.seq_id))
        self._stop(sequence)
        self._queues.wait(sequence)
        sequence.preemptions += 1
        self._preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        self._queues.stop(sequence)
        sequence.num_computed = 0
        self.allocator.free(sequence.seq_id)

    def _end(self, sequence: Sequence) -> None:
        """A sequence leaves, from any state."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop(sequence)
        self._queues.leave(sequence)
        self.swapper.drop((sequence.seq_id,))
        self.allocator.close(sequence.seq_id)

    def _stalls(self, only: str | None) -> bool:
        """Whether a sequence wants a step, and none in flight could make room for it."""
        wanting = any(one.wanted for one in self._queues.running) or self._queues.first_waiting(only) is not None
        return wanting and not self._in_flight

    def _check_progress(self, only: str | None) -> None:
        """Nothing was scheduled: that is right only where nothing could be."""
        if self._stalls(only):
            raise SchedulerError(
                f"the scheduler stalls with {len(self._queues.waiting)} sequences waiting and {len(self._queues.running)}"
                " running; this is a defect of the engine"
            )


def _span(sequence: Sequence, asked: bool, stop: int) -> tuple[int, int]:
    """The positions before ``stop`` whose rows, or hidden states, a step gives where they are asked for."""
    if not asked or sequence.first_row >= stop:
        return 0, 0
    start, sequence.num_scored = sequence.first_row, stop
    return start, stop
