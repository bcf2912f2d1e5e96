"""The choices of one HTTP request, on their way through one leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rose_dist.engine.protocol import Output


class Generation:
    """Iterate with `receive`."""

    def __init__(self, request_ids: list[str], cancel: Callable[[str], None]) -> None:
        """`cancel` ends a request in the engine."""
        self._cancel = cancel
        self._live = {request_id: index for index, request_id in enumerate(request_ids)}
        self._pending: list[tuple[int, Output]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._aborted: Exception | None = None

    async def receive(self) -> Sequence[tuple[int, Output]]:
        """What arrived since the last call, as (choice index, output); waits until there is something.

        Raises: what `abort` was given.
        """
        while not self._pending:
            if self._aborted is not None:
                raise self._aborted
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, []
        return pending

    def cancel(self, index: int) -> None:
        """End one choice now; nothing more is received for it."""
        for request_id, live_index in list(self._live.items()):
            if live_index == index:
                self._cancel(request_id)
                del self._live[request_id]

    def close(self) -> None:
        """Cancel whatever still runs. Safe to call at any time, any number of times."""
        for request_id in list(self._live):
            self._cancel(request_id)
        self._live.clear()

    def abort(self, error: Exception) -> None:
        """Cancel everything and let `receive` raise `error`."""
        self._aborted = error
        self.close()
        self._wake()

    def deliver(self, output: Output) -> None:
        index = self._live.get(output.request_id)
        if index is None:
            return
        if output.finish is not None:
            del self._live[output.request_id]
        self._pending.append((index, output))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
