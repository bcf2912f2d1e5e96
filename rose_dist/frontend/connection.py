"""uvicorn's connection, with which a stream can do without a task that is woken for every token."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_SCOPE_KEY = "rose.connection"


class Connection(HttpToolsProtocol):
    """Requests find theirs with `Connection.of`.

    ASGI's `send` and `receive` are coroutines, which cost more than a token's whole budget. A stream begins and ends
    with them; in between it calls `write_chunk`, and `watch` takes the place of a task that waits in `receive`.
    """

    _on_lost: Callable[[], None] | None = None

    @classmethod
    def of(cls, scope: Scope) -> Connection:
        connection: Connection = scope[_SCOPE_KEY]
        return connection

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Have `on_lost` called, once, if the client leaves or has left; None ends that."""
        self._on_lost = on_lost
        if on_lost is not None and self.transport.is_closing():
            on_lost()

    @property
    def write_paused(self) -> bool:
        """The client reads too slowly: `drain` before the next chunk."""
        return self.flow.write_paused

    async def drain(self) -> None:
        """Wait until the client has read, or has left."""
        await self.flow.drain()

    def write_chunk(self, data: bytes) -> None:
        """A chunk of the body, after `http.response.start` and before the body's last part; `data` is not empty."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[_SCOPE_KEY] = self  # type: ignore[literal-required]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._on_lost is not None:
            self._on_lost()
