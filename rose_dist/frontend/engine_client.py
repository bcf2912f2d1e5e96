"""The frontend's side of the wire: one ZMQ DEALER socket a data-parallel leader, on the asyncio loop.

Plain non-blocking sockets under `add_reader` rather than zmq.asyncio, whose futures cost more than a token's whole
budget. ZMQ's descriptor is edge-triggered: after every wake-up and every send, everything that is there is read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from rose_dist.engine.protocol import (
    Cancel,
    EngineStats,
    Generate,
    Hello,
    Output,
    Outputs,
    Ready,
    Shutdown,
    ToEngine,
    ToFrontend,
)
from rose_dist.frontend.announcements import TURN_S, Announcements
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


class Generation:
    """The choices of one HTTP request, on their way through one leader. Iterate with `receive`, or `listen`."""

    def __init__(self, client: EngineClient, leader: Leader, request_ids: list[str]) -> None:
        self._client = client
        self._leader = leader
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
                self._client.cancel(self._leader, request_id)
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
            self._client.cancel(self._leader, request_id)
        self._live.clear()

    def _wake(self) -> None:
        if self._listener is not None:
            if not self._announced:
                self._announced = True
                self._client.announcements.add(self._notify)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


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
        self.announcements = Announcements()

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
        generation = Generation(self, leader, [request.request_id for request in requests])
        for request in requests:
            self._generations[request.request_id] = (generation, leader)
            leader.in_flight += 1
            self._send(leader, request)
        return generation

    def cancel(self, leader: Leader, request_id: str) -> None:
        if self._forget(request_id):
            self._send(leader, Cancel(request_id))

    def abort_all(self, error: Exception) -> None:
        for generation in {generation for generation, _ in self._generations.values()}:
            generation.abort(error)

    def _forget(self, request_id: str) -> bool:
        entry = self._generations.pop(request_id, None)
        if entry is None:
            return False
        entry[1].in_flight -= 1
        return True

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
