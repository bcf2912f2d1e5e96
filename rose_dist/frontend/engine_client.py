"""The frontend's side of the wire: one ZMQ DEALER socket a data-parallel leader, on the asyncio loop.

Plain non-blocking sockets under `add_reader` rather than zmq.asyncio, whose futures cost more than a token's whole
budget. ZMQ's descriptor is edge-triggered: after every wake-up and every send, everything that is there is read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from rose_dist.engine.protocol import (
    Cancel,
    EngineStats,
    Generate,
    Hello,
    Outputs,
    Ready,
    Shutdown,
    ToEngine,
    ToFrontend,
)
from rose_dist.frontend.announcements import TURN_S, Announcements
from rose_dist.frontend.generation import Generation
from rose_dist.frontend.routing import Router

logger = logging.getLogger(__name__)


@dataclass
class Leader:
    """One data-parallel leader as this frontend sees it."""

    address: str
    socket: zmq.Socket[bytes]
    ready: Ready | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    in_flight: int = 0
    """Requests of this frontend that have not ended."""


class EngineClient:
    def __init__(self, addresses: Sequence[str]) -> None:
        """
        Args:
            addresses: ZMQ addresses of the leaders' ROUTER sockets, by data-parallel rank.
        """
        self._context = zmq.Context()
        self.leaders = [Leader(address, self._connect(address)) for address in addresses]
        self._router = Router(len(self.leaders))
        self._generations: dict[str, tuple[Generation, Leader]] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)
        self._drain_scheduled: set[str] = set()
        self._announcements = Announcements()

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)  # the engine limits its queue itself, by answering `overloaded`
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        return socket

    def open(self) -> None:
        """Greet every leader. Call on the running loop."""
        self._loop = asyncio.get_running_loop()
        for leader in self.leaders:
            self._loop.add_reader(leader.socket.fileno(), self._read, leader)
            self._send(leader, Hello())

    def close(self, *, shutdown: bool = False) -> None:
        """Leave the loop; with `shutdown`, tell every leader to end."""
        for leader in self.leaders:
            if shutdown:
                leader.socket.send(self._encoder.encode(Shutdown()))
            self._loop.remove_reader(leader.socket.fileno())
            leader.socket.close()
        self._context.term()

    @property
    def ready(self) -> bool:
        return all(leader.ready is not None for leader in self.leaders)

    @property
    def max_prompt_room(self) -> tuple[int, int]:
        """(max_context, kv_capacity) in tokens: what the smallest leader takes for prompt plus output."""
        ready = [leader.ready for leader in self.leaders if leader.ready is not None]
        return min(r.max_context for r in ready), min(r.kv_capacity for r in ready)

    @property
    def in_flight(self) -> int:
        return len(self._generations)

    def start(self, requests: list[Generate]) -> Generation:
        """Send the choices of one request, all to one leader, so that they share their prompt's cache."""
        leader = self.leaders[self._router.choose(requests[0].prompt, [leader.in_flight for leader in self.leaders])]
        generation = Generation([request.request_id for request in requests], self._cancel, self._announcements)
        for request in requests:
            self._generations[request.request_id] = (generation, leader)
            leader.in_flight += 1
            self._send(leader, request)
        return generation

    def _cancel(self, request_id: str) -> None:
        leader = self._forget(request_id)
        if leader is not None:
            self._send(leader, Cancel(request_id))

    def abort_all(self, error: Exception) -> None:
        for generation in {generation for generation, _ in self._generations.values()}:
            generation.abort(error)

    def _forget(self, request_id: str) -> Leader | None:
        entry = self._generations.pop(request_id, None)
        if entry is None:
            return None
        entry[1].in_flight -= 1
        return entry[1]

    def _send(self, leader: Leader, message: ToEngine) -> None:
        leader.socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        if leader.address not in self._drain_scheduled:  # sending may have used up the descriptor's edge
            self._drain_scheduled.add(leader.address)
            self._loop.call_soon(self._read, leader)

    def _read(self, leader: Leader) -> None:
        self._drain_scheduled.discard(leader.address)
        if leader.socket.closed:
            return
        pause = time.monotonic() + TURN_S
        while time.monotonic() < pause:
            try:
                frame = leader.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(leader, frame)
        self._drain_scheduled.add(leader.address)
        self._loop.call_soon(self._read, leader)

    def _take(self, leader: Leader, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
        except msgspec.DecodeError:
            logger.exception("A message of leader %s can't be decoded", leader.address)
            return
        if isinstance(message, Ready):
            leader.ready = message
            logger.info("Leader %d of %d is ready: %s", message.dp_rank, message.dp_size, message.layout)
            return
        self._hand_out(leader, message)

    def _hand_out(self, leader: Leader, message: Outputs) -> None:
        leader.stats = message.stats
        generations = self._generations
        for output in message.outputs:
            entry = generations.get(output.request_id)
            if entry is None:
                continue
            if output.finish is not None:
                self._forget(output.request_id)
            entry[0].deliver(output)
