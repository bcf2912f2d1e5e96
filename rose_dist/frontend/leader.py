"""A frontend's connection to one data-parallel leader: a ZMQ DEALER socket on the asyncio loop.

Plain non-blocking sockets under `add_reader` rather than zmq.asyncio, whose futures cost more than a token's whole
budget. ZMQ's descriptor is edge-triggered: after every wake-up and every send, everything that is there is read.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

import msgspec
import zmq

from rose_dist.engine.protocol import EngineStats, Hello, Ready, Shutdown, ToEngine, ToFrontend
from rose_dist.frontend.announcements import TURN_S

logger = logging.getLogger(__name__)

_LINGER_MS = 1000
_BEAT_MS = 1000
_SILENT_MS = 8000
"""How long a watched leader may be silent. After a break TCP sends again at 3.0 and 6.2 s: one of 5 s is survived."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)


class Leader:
    """What this frontend knows of the leader, and the way to it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        take: Callable[[Leader, ToFrontend], None],
        lose: Callable[[Leader], None] | None = None,
    ) -> None:
        """
        Args:
            take: called with each message.
            lose: called when the connection breaks, or nothing was heard for 8 s. All that was asked for is void
                then, and a new connection is being made. None: not watched, since the leader's end is this process'.
        """
        self.address = address
        self.ready: Ready | None = None
        """What it said of itself; None before, and again after the connection broke."""
        self.stats = EngineStats()
        self.in_flight = 0
        """Requests of this frontend that have not ended."""
        self._context = context
        self._take = take
        self._lose = lose
        self._identity = b"frontend" + secrets.token_bytes(8)
        """The same in all connections: the leader knows by it which requests are void."""
        self._loop = asyncio.get_running_loop()
        self._read_scheduled = False
        self._monitor: zmq.Socket[bytes] | None = None
        self._connect()

    def _connect(self) -> None:
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)  # the engine limits its queue itself, by answering `overloaded`
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.ROUTING_ID, self._identity)
        if self._lose is not None:
            socket.setsockopt(zmq.HEARTBEAT_IVL, _BEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TTL, _SILENT_MS)
            self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._loop.add_reader(self._monitor.fileno(), self._look_at_connection)
            self._loop.call_soon(self._look_at_connection)
        socket.connect(self.address)
        self._loop.add_reader(socket.fileno(), self._read)
        self.send(Hello())

    def _disconnect(self, linger: int) -> None:
        if self._monitor is not None:
            self._loop.remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger)

    def close(self, *, shutdown: bool = False) -> None:
        """With `shutdown`, tell it that this frontend wants nothing more."""
        if shutdown:
            self._socket.send(_encoder.encode(Shutdown()), zmq.NOBLOCK)
        self._disconnect(_LINGER_MS if shutdown else 0)

    def send(self, message: ToEngine) -> None:
        self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        if not self._read_scheduled:  # sending may have used up the descriptor's edge
            self._read_scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._read_scheduled = False
        if self._socket.closed:
            return
        pause = time.monotonic() + TURN_S
        while time.monotonic() < pause:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = _decoder.decode(frame)
            except msgspec.DecodeError:
                logger.exception("A message of leader %s can't be decoded", self.address)
                continue
            self._take(self, message)
        self._read_scheduled = True
        self._loop.call_soon(self._read)

    def _look_at_connection(self) -> None:
        """The monitor tells of nothing but a connection that broke."""
        if self._monitor is None or self._lose is None:
            return
        try:
            self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        self.ready = None
        self._disconnect(0)  # with what waits in it, either way
        self._connect()
        self._lose(self)
