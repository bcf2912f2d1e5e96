"""The choices of one HTTP request, on their way through one leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rose_dist.engine.protocol import Output
from rose_dist.frontend.announcements import Announcements


class Generation:
    """Iterate with `receive`, or `listen`."""

    def __init__(self, request_ids: list[str], cancel: Callable[[str], None], announcements: Announcements) -> None:
        """`cancel` ends a request in the engine."""
        self._cancel = cancel
        self._announcements = announcements
        self._live = {request_id: index for index, request_id in enumerate(request_ids)}
        self._pending: list[tuple[int, Output]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._announced = False
        self._aborted: Exception | None = None

    @property
    def finished(self) -> bool:
        """Every choice has ended and everything was received."""
        return not self._live and not self._pending

    async def receive(self) -> Sequence[tuple[int, Output]]:
        """What arrived since the last call, as (choice index, output); waits until there is something.

        Raises: what `abort` was given.
        """
        while not self._pending and self._aborted is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def take(self) -> Sequence[tuple[int, Output]]:
        """As `receive`, but what is there now."""
        if self._aborted is not None:
            raise self._aborted
        pending, self._pending = self._pending, []
        return pending

    def listen(self, listener: Callable[[], None]) -> None:
        """Have `listener` called from the loop whenever there is something to `take`, an exception included.

        Cheaper than to wait in `receive`, and after all that do.
        """
        self._listener = listener
        if self._pending or self._aborted is not None:
            self._wake()

    def _notify(self) -> None:
        self._announced = False
        if self._listener is not None:
            self._listener()

    def cancel(self, index: int) -> None:
        """End one choice now; nothing more is received for it."""
        for request_id, live_index in list(self._live.items()):
            if live_index == index:
                self._cancel(request_id)
                del self._live[request_id]

    def close(self) -> None:
        """Cancel whatever still runs. Safe to call at any time, any number of times."""
        self._listener = None
        self._cancel_live()

    def abort(self, error: Exception) -> None:
        """Cancel everything and let `receive` and `take` raise `error`."""
        self._aborted = error
        self._cancel_live()
        self._wake()

    def deliver(self, output: Output) -> None:
        index = self._live.get(output.request_id)
        if index is None:
            return
        if output.finish is not None:
            del self._live[output.request_id]
        self._pending.append((index, output))
        self._wake()

    def _cancel_live(self) -> None:
        for request_id in self._live:
            self._cancel(request_id)
        self._live.clear()

    def _wake(self) -> None:
        if self._listener is not None:
            if not self._announced:
                self._announced = True
                self._announcements.add(self._notify)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
