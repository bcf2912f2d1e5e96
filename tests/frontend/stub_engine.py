"""A leader without a model: speaks `engine.protocol` over ZMQ and generates scripted tokens.

`python stub_engine.py '<StubConfig as JSON>'` prints the address it is bound to and serves until Shutdown or a signal.
It keeps the engine's promises: a step delivers one `Outputs` per frontend, every token comes once and in order, the
waiting queue is bounded, a cancelled request's blocks are free in the stats that follow.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from collections import deque
from pathlib import Path

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
    TokenLogprobs,
)


class StubConfig(msgspec.Struct, kw_only=True):
    script: list[int]
    """The tokens of every answer; after them a request's first stop id, where it has one, or the script again."""
    dp_rank: int = 0
    dp_size: int = 1
    max_context: int = 4096
    kv_capacity: int = 8192
    max_running: int = 256
    max_waiting: int = 1000
    step_s: float = 0.0
    tokens_per_step: int = 1
    queue_s: float = 0.0
    prefill_s: float = 0.0
    """What it says of every request."""
    loaded_when: str | None = None
    """A file; the model counts as loaded once it exists."""
    error_after: int | None = None
    """End every request with finish `error` after this many tokens."""
    echo_prompt: bool = False
    """Answer with the prompt's own ids instead of the script."""
    report: str | None = None
    """A file that gets one line of JSON for each message received."""


class Running:
    def __init__(self, identity: bytes, request: Generate, script: list[int], max_context: int) -> None:
        self.identity = identity
        self.request = request
        limit = request.max_tokens if request.max_tokens is not None else len(script) + 1
        limit = min(limit, max_context - len(request.prompt))
        tokens = script[:limit]
        self.finish = "length"
        if len(script) < limit:
            if request.stop_ids:
                tokens, self.finish = [*script, request.stop_ids[0]], "stop"
            else:
                tokens = (script * (limit // max(len(script), 1) + 1))[:limit]
        for position, token in enumerate(tokens):
            if token in request.stop_ids and position >= request.min_tokens:
                tokens, self.finish = tokens[: position + 1], "stop"
                break
        self.tokens = tokens
        self.position = 0


class StubEngine:
    def __init__(self, config: StubConfig) -> None:
        self._config = config
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._running: dict[str, Running] = {}
        self._waiting: deque[Running] = deque()
        self._clients: set[bytes] = set()
        self._stats = EngineStats(kv_blocks_total=1000)
        self._report = open(config.report, "a", buffering=1) if config.report else None  # noqa: SIM115

    def run(self) -> None:
        while self._config.loaded_when is not None and not Path(self._config.loaded_when).exists():
            time.sleep(0.02)
        while True:
            busy = bool(self._running or self._waiting)
            if not busy:
                self._socket.poll()
            if not self._receive():
                return
            self._step()
            if self._config.step_s:
                time.sleep(self._config.step_s)

    def _receive(self) -> bool:
        while True:
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            message = self._decoder.decode(frame)
            if self._report is not None:
                self._report.write(msgspec.json.encode(message).decode() + "\n")
            if isinstance(message, Shutdown):
                self._clients.discard(identity)
                if not self._clients:  # every frontend has drained
                    return False
            elif isinstance(message, Hello):
                self._clients.add(identity)
                for request_id in [i for i, running in self._running.items() if running.identity == identity]:
                    del self._running[request_id]
                self._waiting = deque(running for running in self._waiting if running.identity != identity)
                self._send(identity, self._ready())
            elif isinstance(message, Cancel):
                self._cancel(identity, message.request_id)
            else:
                self._add(identity, message)

    def _ready(self) -> Ready:
        config = self._config
        return Ready(
            dp_rank=config.dp_rank,
            dp_size=config.dp_size,
            max_context=config.max_context,
            kv_capacity=config.kv_capacity,
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            layout="stub",
        )

    def _add(self, identity: bytes, request: Generate) -> None:
        script = request.prompt if self._config.echo_prompt else self._config.script
        if len(self._running) + len(self._waiting) >= self._config.max_running + self._config.max_waiting:
            self._send_outputs(identity, [Output(request_id=request.request_id, finish="overloaded")])
            return
        self._waiting.append(Running(identity, request, script, self._config.max_context))

    def _cancel(self, identity: bytes, request_id: str) -> None:
        waiting = [running for running in self._waiting if running.request.request_id != request_id]
        known = self._running.pop(request_id, None) is not None or len(waiting) < len(self._waiting)
        self._waiting = deque(waiting)
        if known:
            self._send_outputs(identity, [Output(request_id=request_id, finish="cancelled")])

    def _step(self) -> None:
        while self._waiting and len(self._running) < self._config.max_running:
            running = self._waiting.popleft()
            self._running[running.request.request_id] = running
        if not self._running:
            return
        outputs: dict[bytes, list[Output]] = {}
        for request_id, running in list(self._running.items()):
            output = self._advance(running)
            outputs.setdefault(running.identity, []).append(output)
            if output.finish is not None:
                del self._running[request_id]
        for identity in self._clients:
            self._send_outputs(identity, outputs.get(identity, []))

    def _advance(self, running: Running) -> Output:
        start = running.position
        end = running.position = min(start + self._config.tokens_per_step, len(running.tokens))
        tokens = running.tokens[start:end]
        output = Output(request_id=running.request.request_id, token_ids=tokens)
        if start == 0:
            output.cached_tokens = len(running.request.prompt) // 2
            output.queue_s, output.prefill_s = self._config.queue_s, self._config.prefill_s
        if (count := running.request.sampling.logprobs) is not None:
            output.logprobs = [TokenLogprobs(-0.5, [(t, -0.5), (t + 1, -1.5)][:count]) for t in tokens]
        if self._config.error_after is not None and end >= self._config.error_after:
            output.finish, output.error = "error", "the stub engine was told to fail"
        elif end == len(running.tokens):
            output.finish = running.finish
        return output

    def _send_outputs(self, identity: bytes, outputs: list[Output]) -> None:
        stats = self._stats
        stats.running, stats.waiting = len(self._running), len(self._waiting)
        stats.kv_blocks_used = len(self._running)
        stats.steps += 1
        stats.step_tokens += sum(len(output.token_ids) for output in outputs)
        self._send(identity, Outputs(outputs=outputs, stats=stats))

    def _send(self, identity: bytes, message: Outputs | Ready) -> None:
        self._socket.send_multipart([identity, self._encoder.encode(message)])


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test leaves nothing behind
    engine = StubEngine(msgspec.json.decode(sys.argv[1], type=StubConfig))
    print(engine.address, flush=True)
    engine.run()


if __name__ == "__main__":
    main()
