"""A leader's side of the socket to the frontends."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec
import zmq

from rose_dist.engine.engine import Engine
from rose_dist.engine.protocol import (
    Cancel,
    EngineStats,
    Generate,
    Hello,
    Output,
    Outputs,
    Rebalance,
    Shutdown,
    ToEngine,
)
from rose_dist.engine.scheduler import Delivery

logger = logging.getLogger(__name__)


class Mailbox:
    """Receives requests from any number of frontends and delivers outputs to the one that asked."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.sndhwm = self.socket.rcvhwm = 0  # tokens are never dropped
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a frontend that connects anew is the same one
        port = self.socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self.stopping = False
        self._clients: set[bytes] = set()
        self._last_stats: bytes = b""
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, engine: Engine) -> bool:
        """Hand all that has come to the engine, compiled grammars too; whether there is anything to step for."""
        while True:
            try:
                client, message = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                self._handle(engine, client, self._decoder.decode(message))
            except msgspec.DecodeError:
                logger.exception("a frontend sent a message that can't be read; it is dropped")
        self.deliver(engine.take_compiled(), engine.scheduler.stats)
        return engine.scheduler.has_work or self.stopping or engine.rebalance_wanted

    def _handle(self, engine: Engine, client: bytes, message: ToEngine) -> None:
        match message:
            case Generate():
                self.deliver(engine.submit(client, message), engine.scheduler.stats)
            case Cancel(request_id):
                engine.cancel(client, request_id)
            case Rebalance():
                engine.rebalance_wanted = True
            case Hello():
                self._clients.add(client)
                engine.cancel_all(client)
                self.socket.send_multipart([client, self._encoder.encode(engine.ready())])
            case Shutdown():
                self._clients.discard(client)
                self.stopping = not self._clients

    def deliver(self, deliveries: Iterable[Delivery], stats: EngineStats) -> None:
        """Tell each frontend what is new for it; gauges that changed go to all."""
        by_client: dict[bytes, list[Output]] = {}
        for client, output in deliveries:
            by_client.setdefault(client, []).append(output)
        encoded = self._encoder.encode(stats)
        changed = encoded != self._last_stats
        self._last_stats = encoded
        for client in self._clients | by_client.keys() if changed else by_client.keys():
            message = Outputs(outputs=by_client.get(client, []), stats=stats)
            self.socket.send_multipart([client, self._encoder.encode(message)])
