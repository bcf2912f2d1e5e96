"""Calls the listeners of running streams in short turns, after the requests that wait for their first output."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

TURN_S = 0.0005
"""How long listeners are called, or messages read, before others get their turn: new requests, first outputs."""


class Announcements:
    """What comes for a stream while it stands in the queue is joined to what it has."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()

    def add(self, notify: Callable[[], None]) -> None:
        """Have `notify` called from the running loop.

        Not before requests that wait for their first output have written it: the loop goes round once for them.
        """
        if not self._queue:
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._take_turn)
        self._queue.append(notify)

    def _take_turn(self) -> None:
        queue = self._queue
        pause = time.monotonic() + TURN_S
        while queue:
            queue.popleft()()
            if time.monotonic() > pause:
                break
        if queue:
            asyncio.get_running_loop().call_soon(self._take_turn)
