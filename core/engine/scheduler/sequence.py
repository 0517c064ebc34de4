"""A sequence: one prompt with one continuation, as the scheduler sees it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from ..errors import AdmissionError

NO_SLOT = -1
MAX_TOKEN_ID = 2**31 - 1


class SequenceStatus(Enum):
    WAITING = "waiting"  # holds nothing: new, preempted, or not yet forked
    RUNNING = "running"  # holds a slot and blocks
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens computed, chasing tokens wanted; there are no phases.

    The caller gives ``seq_id`` to ``embeds_from``. ``max_tokens`` bounds the output; a lower ``priority`` value goes
    first; ``salt`` keeps the cached prefix apart from that of sequences with another salt. A ``synchronous`` sequence's
    token must be known on the host before the next one is computed, since what may come next depends on it there; it
    never reads a token from the device's history. A ``beam`` is synchronous, and ``Scheduler.continue_beams`` chooses
    its tokens. With ``scores_prompt`` every prompt token but the last has a row of its own in the head. With
    ``embeds_from``, an embedding, nothing is sampled (``max_tokens`` is 0), and the hidden state of each token from that
    position on is wanted. A ``whole`` sequence, an encoder's, is computed in one step, and builds on no cached prefix, since
    later tokens change what comes of earlier ones. The scheduler sets the rest.
    """

    seq_id: int
    request_id: str
    token_ids: list[int]
    """All tokens known on the host: the prompt, then the output."""
    max_tokens: int
    priority: int = 0
    salt: bytes = b""
    synchronous: bool = False
    beam: bool = False
    scores_prompt: bool = False
    embeds_from: int | None = None
    whole: bool = False

    branch: int = 0
    """Index among the parallel samples of the request."""
    arrival: int = 0
    """Order of ``Scheduler.add``."""
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = NO_SLOT
    num_prompt: int = field(init=False)
    num_computed: int = 0
    """Tokens whose cache is written by the steps scheduled so far."""
    held: bool = False
    """A beam whose row has come; it waits for the other beams."""
    num_scored: int = 0
    """Prompt tokens that had their own rows, or whose hidden state was given, in the steps scheduled so far."""
    num_pending: int = 0
    """Tokens sampled by steps in flight, not known here yet; one for a step with guesses."""
    steps_in_flight: int = 0
    num_cached: int | None = None
    """Prompt tokens that a prefix hit saved at the first admission."""
    preemptions: int = 0
    unforked: list[Sequence] = field(default_factory=list)
    """Branches that wait for this one to compute the prompt."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.token_ids)  # it grows, and the caller's prompt must not
        self.num_prompt = len(self.token_ids)

    def fork(self, seq_id: int, token: int) -> Sequence:
        """A waiting sequence with these tokens, but ``token`` as the last one."""
        child = replace(
            self,
            seq_id=seq_id,
            token_ids=[*self.token_ids[:-1], token],
            status=SequenceStatus.WAITING,
            slot=NO_SLOT,
            num_computed=0,
            preemptions=0,
            unforked=[],
        )
        child.num_prompt = self.num_prompt
        return child

    @property
    def prompt_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt]

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def goal(self) -> int:
        """Tokens to compute as of now. Before a fork the last prompt token is left, for each branch to run itself."""
        return len(self.token_ids) + self.num_pending - bool(self.unforked)

    @property
    def exhausted(self) -> bool:
        """Whether the last output token is sampled already, if only by a step in flight; of an embedding the last token
        computed."""
        if self.embeds_from is not None:
            return self.num_computed == self.num_prompt
        return self.num_output + self.num_pending >= self.max_tokens

    @property
    def wanted(self) -> int:
        """Tokens that a step could compute now."""
        if self.held or (self.synchronous and self.num_pending):
            return 0
        reached = len(self.token_ids) + self.num_pending  # not by the properties above: each step asks each sequence
        if reached - self.num_prompt >= self.max_tokens and self.embeds_from is None:
            return 0
        return reached - bool(self.unforked) - self.num_computed

    @property
    def first_row(self) -> int:
        """The position from which on each token has a row in the head, or a hidden state that is wanted: the last one's
        alone, unless the prompt is scored, or embedded from an earlier one on."""
        if self.embeds_from is not None:
            return max(self.num_computed, self.num_scored, self.embeds_from)
        if self.scores_prompt and self.num_scored < self.num_prompt - 1:
            return max(self.num_computed, self.num_scored)
        return len(self.token_ids) + self.num_pending - 1


def check_admission(sequence: Sequence, n: int, limit: int) -> None:
    """AdmissionError where a request of ``n`` such sequences can never be served in a context of ``limit`` tokens."""
    prompt = sequence.num_prompt
    if n < 1:
        raise AdmissionError(f"n is {n}; a request has at least 1 sample.")
    if prompt == 0:
        raise AdmissionError("The prompt has no tokens; it needs at least 1.")
    if sequence.max_tokens < 1 and sequence.embeds_from is None:
        raise AdmissionError(f"max_tokens is {sequence.max_tokens}; it must be at least 1.")
    if min(sequence.token_ids) < 0 or max(sequence.token_ids) > MAX_TOKEN_ID:
        raise AdmissionError(f"The prompt has a token id outside of 0 to {MAX_TOKEN_ID}.")
    if prompt + sequence.max_tokens > limit:
        raise AdmissionError(
            f"A prompt of {prompt} tokens and max_tokens {sequence.max_tokens} make "
            f"{prompt + sequence.max_tokens} tokens, and the context holds {limit}; "
            "shorten the prompt or lower max_tokens."
        )
