"""Grammars are compiled beside the steps: other requests go on, and nothing waits for what was cancelled."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from rose_dist.engine.doorbell import Doorbell
from rose_dist.engine.grammar import GrammarCompiler, TokenGrammar
from rose_dist.engine.loop import serve
from rose_dist.engine.mailbox import Mailbox
from rose_dist.engine.protocol import Cancel, Generate, Hello, Output, Outputs, Ready, Shutdown, ToEngine, ToFrontend
from tests.checkpoints import random_prompt
from tests.engine.test_engine import Runner, greedy
from tests.engine.test_grammar_sampling import STOP, constrained, spelling, with_stop

__all__ = ["spelling"]


class Gate:
    """Holds up the compilation of grammars that contain `held`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        compile_at_once = GrammarCompiler.compile

        def compile_later(compiler: GrammarCompiler, text: str) -> TokenGrammar:
            if "held" in text:
                self.entered.set()
                assert self.opened.wait(20)
            return compile_at_once(compiler, text)

        monkeypatch.setattr(GrammarCompiler, "compile", compile_later)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


class Server:
    """An engine in its serving loop, on a thread, and a frontend's socket to it."""

    def __init__(self, folder: Path, **options: int) -> None:
        self.engine = Runner(folder, **options).engine
        context = zmq.Context.instance()
        mailbox = Mailbox(context, "127.0.0.1")
        bell = Doorbell(context, "127.0.0.1", self.engine.groups.lockstep)
        self.thread = threading.Thread(target=serve, args=(self.engine, bell, mailbox, lambda: None), daemon=True)
        self.thread.start()
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(mailbox.address)
        self.send(Hello())
        self.ready = msgspec.msgpack.decode(self._socket.recv(), type=Ready)
        self.outputs: dict[str, list[Output]] = {}

    def send(self, message: ToEngine) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def receive_until_finished(self, name: str) -> list[Output]:
        deadline = time.monotonic() + 20
        while not (found := self.outputs.get(name, [])) or found[-1].finish is None:
            self.receive(deadline)
        return found

    def receive(self, deadline: float) -> Outputs:
        assert self._socket.poll(max(0, deadline - time.monotonic()) * 1000), "nothing came"
        message = msgspec.msgpack.decode(self._socket.recv(), type=ToFrontend)
        assert isinstance(message, Outputs)
        for output in message.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        return message

    def wait_for_waiting(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while self.receive(deadline).stats.waiting != count:
            pass

    def stop(self) -> None:
        self.send(Shutdown())
        self.thread.join(20)
        assert not self.thread.is_alive()


def held(name: str) -> Generate:
    return constrained(name, with_stop("(held|upheld)"), temperature=0)


def test_others_run_while_a_grammar_is_compiled(spelling: Path, gate: Gate) -> None:
    server = Server(spelling)
    server.send(held("slow"))
    assert gate.entered.wait(20)
    server.send(constrained("quick", with_stop("(yes|no)"), temperature=0))
    server.send(greedy("free", random_prompt(5, 2), 3))
    assert sum(len(output.token_ids) for output in server.receive_until_finished("free")) == 3
    assert server.receive_until_finished("quick")[-1].token_ids == [STOP]
    assert "slow" not in server.outputs
    gate.opened.set()  # the engine is idle and has to notice by itself
    slow = server.receive_until_finished("slow")
    assert slow[-1].finish == "stop"
    assert slow[0].queue_s > 0
    server.stop()


def test_requests_are_admitted_in_the_order_they_came_in(spelling: Path, gate: Gate) -> None:
    server = Server(spelling, max_running=1)
    server.send(held("first"))
    server.send(held("second"))
    assert gate.entered.wait(20)
    server.send(greedy("free", random_prompt(5, 2), 150))  # runs, so that both wait once they are compiled
    while "free" not in server.outputs:
        server.receive(time.monotonic() + 20)
    server.send(greedy("last", random_prompt(5, 3), 2))
    gate.opened.set()
    ended = [(server.receive_until_finished(name), list(server.outputs))[1] for name in ("first", "second", "last")]
    assert ended[-1] == ["free", "first", "second", "last"]
    server.stop()


def test_a_request_that_is_cancelled_while_compiling_is_never_run(spelling: Path, gate: Gate) -> None:
    server = Server(spelling)
    server.send(held("gone"))
    assert gate.entered.wait(20)
    server.wait_for_waiting(1)
    server.send(Cancel("gone"))
    server.wait_for_waiting(0)
    gate.opened.set()
    server.send(greedy("free", random_prompt(5, 2), 3))
    server.receive_until_finished("free")
    assert "gone" not in server.outputs
    server.stop()


def test_a_bad_grammar_is_refused_and_a_full_queue_before_it_is_compiled(spelling: Path, gate: Gate) -> None:
    server = Server(spelling, max_running=1, max_waiting=0)
    server.send(held("slow"))
    assert gate.entered.wait(20)
    server.send(held("one too many"))
    assert server.receive_until_finished("one too many")[-1].finish == "overloaded"
    gate.opened.set()
    assert server.receive_until_finished("slow")[-1].finish == "stop"
    server.send(constrained("bad", json.dumps({"grammars": []})))
    (bad,) = server.receive_until_finished("bad")
    assert bad.finish == "error"
    assert bad.error
    server.stop()
