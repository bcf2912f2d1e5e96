"""The leader's socket, with real frontend sockets."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from rose_dist.engine.mailbox import Mailbox
from rose_dist.engine.protocol import Generate, Hello, Output, Outputs, Ready, SamplingParams, Shutdown, ToEngine
from tests.checkpoints import write_tiny
from tests.engine.test_engine import Runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(write_tiny(tmp_path_factory.mktemp("tiny")))


class Frontend:
    def __init__(self, address: str, identity: bytes | None = None) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        if identity is not None:
            self.socket.routing_id = identity
        self.socket.connect(address)

    def send(self, message: ToEngine) -> None:
        self.socket.send(msgspec.msgpack.encode(message))


def receive(mailbox: Mailbox, runner: Runner) -> bool:
    assert mailbox.socket.poll(5000)
    return mailbox.receive(runner.engine)


def test_the_engine_stops_when_the_last_frontend_has_drained(runner: Runner) -> None:
    mailbox = Mailbox(zmq.Context.instance(), "127.0.0.1")
    frontends = [Frontend(mailbox.address) for _ in range(2)]
    for frontend in frontends:
        frontend.send(Hello())
        receive(mailbox, runner)
        ready = msgspec.msgpack.decode(frontend.socket.recv(), type=Ready)
        assert ready.kv_capacity == runner.engine.scheduler.kv.capacity
    frontends[0].send(Shutdown())
    assert not receive(mailbox, runner)
    assert not mailbox.stopping
    frontends[1].send(Shutdown())
    assert receive(mailbox, runner)
    assert mailbox.stopping


def test_a_message_that_cannot_be_read_is_dropped(runner: Runner) -> None:
    mailbox = Mailbox(zmq.Context.instance(), "127.0.0.1")
    frontend = Frontend(mailbox.address)
    frontend.socket.send(b"\xc1 not msgpack")
    assert not receive(mailbox, runner)
    frontend.send(Hello())
    receive(mailbox, runner)
    assert frontend.socket.poll(5000)


def test_a_frontend_that_connects_anew_has_asked_for_nothing(runner: Runner) -> None:
    """And gets what is delivered from then on, though its first connection still stands."""
    mailbox = Mailbox(zmq.Context.instance(), "127.0.0.1")
    first, other = Frontend(mailbox.address, b"one"), Frontend(mailbox.address, b"other")
    for frontend in (first, other):
        frontend.send(Hello())
        receive(mailbox, runner)
        frontend.send(Generate(request_id="a", prompt=[5, 6], sampling=SamplingParams(), max_tokens=3))
        assert receive(mailbox, runner)
    again = Frontend(mailbox.address, b"one")
    again.send(Hello())
    receive(mailbox, runner)
    waiting = [request.client for request in runner.engine.scheduler.waiting]
    assert waiting == [b"other"]
    assert msgspec.msgpack.decode(again.socket.recv(), type=Ready)
    mailbox.deliver([(b"one", Output(request_id="b", token_ids=[7]))], runner.engine.scheduler.stats)
    assert again.socket.poll(5000)
    assert msgspec.msgpack.decode(again.socket.recv(), type=Outputs).outputs[0].token_ids == [7]
    runner.engine.scheduler.cancel_all(b"other")
    assert not runner.engine.scheduler.has_work
    for frontend in (other, again):
        frontend.send(Shutdown())
        receive(mailbox, runner)
    assert mailbox.stopping
