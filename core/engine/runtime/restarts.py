"""How often a step loop that has failed may begin anew, and what it lets go of before."""

from __future__ import annotations

import time
import traceback
from collections import deque

MOST = 3
WITHIN_S = 60.0
_PAUSE_S = 0.5


def let_go(error: BaseException | None) -> None:
    """Of what was at hand where an error and its reasons were raised: values of a device, whose memory is needed again."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Restarts:
    """``count``: restarts so far. ``WITHIN_S`` holds at most ``MOST`` of them."""

    def __init__(self) -> None:
        self.count = 0
        self._times: deque[float] = deque()

    def wait(self, error: Exception) -> None:
        """Counts one more, after a pause that grows, since a device may need a while; raises the error where there have
        been too many."""
        now = time.monotonic()
        while self._times and now - self._times[0] > WITHIN_S:
            self._times.popleft()
        if len(self._times) >= MOST:
            raise error
        time.sleep(_PAUSE_S * len(self._times))
        self._times.append(now)
        self.count += 1
