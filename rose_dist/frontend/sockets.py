"""The sockets that frontend processes listen on, bound by their parent so that it knows of a port in use."""

from __future__ import annotations

import socket


def listening_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """One socket a frontend process, all on one port; the kernel spreads connections over them.

    Args:
        port: 0 takes a free one.

    Raises:
        OSError: the address can't be bound; `errno` is EADDRINUSE where the port is taken.
    """
    first = socket.create_server((host, port), backlog=2048, reuse_port=count > 1)
    port = first.getsockname()[1]
    return [first, *(socket.create_server((host, port), backlog=2048, reuse_port=True) for _ in range(count - 1))]
