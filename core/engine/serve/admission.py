"""Who may begin: a bounded queue, taken from in turn for each caller."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict, deque

from .errors import ApiError

_MAX_RETRY_S = 60
_SHARE_OF_NEWEST = 0.1  # in the mean time that a request takes


class Place:
    """A request's place in the queue, and then among the running ones. ``weight``: how many sequences it has. The lowest
    ``priority`` goes first."""

    def __init__(self, admission: Admission, caller: str, weight: int, priority: int = 0) -> None:
        self.caller, self.weight, self.priority = caller, weight, priority
        self.begun: float | None = None
        self._admission = admission
        self._turn = asyncio.Event()
        self._left = False

    async def turn(self) -> None:
        """Waits until the request may begin."""
        await self._turn.wait()

    def begin(self) -> None:
        self.begun = time.monotonic()
        self._turn.set()

    def leave(self) -> None:
        """Gives the place back, wherever it is; may be called again."""
        if not self._left:
            self._left = True
            self._admission._leave(self)


class Admission:
    """``capacity``: sequences, or what else ``kind`` says, that may run at a time; ``max_queue``: those that may wait beyond,
    where a caller with less than an even share of them finds room in any case. All on one event loop."""

    def __init__(self, capacity: int, max_queue: int, max_per_key: int | None = None, kind: str = "sequences") -> None:
        self.capacity = capacity
        self.draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self.refused = 0
        self._max_queue = max_queue
        self._max_per_key = max_per_key
        self._kind = kind
        self._free = capacity
        self._queues: OrderedDict[str, deque[Place]] = OrderedDict()  # the caller whose turn is next comes first
        self._held: Counter[str] = Counter()
        self._mean_s = 1.0

    @property
    def waiting(self) -> int:
        """Sequences that wait for their turn."""
        return sum(place.weight for queue in self._queues.values() for place in queue)

    @property
    def running(self) -> int:
        return self.capacity - self._free

    def of_forms(self) -> Admission:
        """Who may have a form compiled: one at a time, with a queue of the same bounds."""
        return Admission(1, self._max_queue, self._max_per_key, "forms")

    def check(self, caller: str, weight: int) -> None:
        """Raises what ``enter`` would."""
        self.check_open()
        if weight > self.capacity:
            raise ApiError(
                400, f"The request asks for {weight} {self._kind}; at most {self.capacity} run at a time.", "n"
            )
        if self._max_per_key is not None and self._held[caller] >= self._max_per_key:
            raise self._refusal(f"This key has {self._held[caller]} requests at work, which is the most it may have")
        waiting, own = self.waiting, sum(place.weight for place in self._queues.get(caller, ()))
        share = self._max_queue / len(self._queues.keys() | {caller})  # which no other caller's requests can fill
        full = waiting + weight > self._max_queue and own + weight > share
        if (waiting or weight > self._free) and full:
            raise self._refusal(f"The server is full: {self.running} {self._kind} run and {waiting} wait")

    def check_open(self) -> None:
        """ApiError 503 when the server shuts down."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", retry_s=5)

    def enter(self, caller: str, weight: int, priority: int = 0) -> Place:
        """A place in the caller's queue, behind all of no higher ``priority``. ApiError 429 where there is none, 503 when the
        server shuts down."""
        self.check(caller, weight)
        place = Place(self, caller, weight, priority)
        self._held[caller] += 1
        queue = self._queues.setdefault(caller, deque())
        queue.insert(sum(other.priority <= priority for other in queue), place)
        self.idle.clear()
        self._grant()
        return place

    def _refusal(self, why: str) -> ApiError:
        self.refused += 1
        rounds = (self.waiting + 1) / self.capacity
        retry = min(max(math.ceil(self._mean_s * rounds), 1), _MAX_RETRY_S)
        return ApiError(429, f"{why}; try again in {retry} s.", code="rate_limit_exceeded", retry_s=retry)

    def _grant(self) -> None:
        """Lets requests begin, of those with the lowest priority one of each caller in turn; one that needs more room than there
        is holds the others up."""
        while self._queues:
            caller, queue = min(self._queues.items(), key=lambda item: item[1][0].priority)
            if queue[0].weight > self._free:
                return
            place = queue.popleft()
            self._free -= place.weight
            place.begin()
            if queue:
                self._queues.move_to_end(caller)
            else:
                del self._queues[caller]

    def _leave(self, place: Place) -> None:
        self._held[place.caller] -= 1
        if not self._held[place.caller]:
            del self._held[place.caller]
        if place.begun is not None:
            self._free += place.weight
            self._mean_s += (time.monotonic() - place.begun - self._mean_s) * _SHARE_OF_NEWEST
        else:
            queue = self._queues[place.caller]
            queue.remove(place)
            if not queue:
                del self._queues[place.caller]
        self._grant()
        if not self._held:
            self.idle.set()
