"""What the host does in a turn of the serving loop, but for the model itself: it takes in requests, plans, prepares
inputs, reads tokens and delivers them. Runs without a GPU.

    python -m benchmarks.host_steps [--prompts 128 1024 4000] [--batches 1 64 128] [--profile] [--out FOLDER]

A prompt's time is in three parts: before the model's launch, for which a device with nothing else to do waits; after
it, while a device works; and when the token is there. Decode steps of so many requests of 1,024 tokens are turns in the
middle of a long run: the median, the most, and what of all is Python's garbage collector. Processor time of this
thread, so other work on the machine hardly counts. A frontend's part is in `benchmarks.frontend`.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import logging
import pstats
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from benchmarks.graphs import table
from benchmarks.host_overhead import BLOCK, TINY
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig, ladder_for
from rose_dist.engine.engine import Engine
from rose_dist.engine.mailbox import Mailbox
from rose_dist.engine.paged_planner import PagedPlanner
from rose_dist.engine.protocol import Generate, Hello, SamplingParams
from rose_dist.layers.forward_batch import ForwardBatch
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.gpt_oss import GptOssForCausalLM
from rose_dist.models.gpt_oss_config import GptOssConfig
from rose_dist.models.presets import PRESETS

CONTEXT = 1024
ROUNDS = 30
STEPS = 200


class Server:
    """A leader's loop, turn by turn, whose model gives the same logits whatever it is asked."""

    def __init__(self, batch: int) -> None:
        preset = PRESETS["gpt-oss-120b"] | {"num_hidden_layers": 2, "num_experts": 16, "vocab_size": 1024} | TINY
        config = EngineConfig(
            Path(), dtype="bfloat16", kv_tokens=1 << 20, max_step_tokens=8192, max_running=batch, max_waiting=batch,
            max_context=8192, ladder=ladder_for(batch), overlap=True,
        )  # fmt: skip
        groups = World.join(log_level=logging.WARNING).groups(Layout.of(1))
        options = BuildOptions(groups, config.max_step_tokens, torch.bfloat16, config.device, "mxfp4")
        self.engine = Engine(config, groups, GptOssForCausalLM(GptOssConfig.from_json(preset), options))
        runner = self.engine.runner
        runner._planners = [
            PagedPlanner(number, spec.window, BLOCK, storage, runner._inputs, None)
            for number, (spec, storage) in enumerate(zip(runner.specs, runner.storages, strict=True))
        ]
        runner.draws = lambda step: step.decodes_only  # type: ignore[method-assign]
        self._logits = torch.randn(batch, 1024)
        self.launched = 0.0
        runner.model.forward = self._forward
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox = Mailbox(context, "127.0.0.1")
        self._client = context.socket(zmq.DEALER)
        self._client.connect(self._mailbox.address)
        self._send(Hello())

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.launched = time.thread_time()
        wanted = batch.positions if batch.logits_rows is None else batch.logits_rows
        return self._logits[: len(wanted)]

    def _send(self, message: Any) -> None:
        self._client.send(msgspec.msgpack.encode(message))

    def ask(self, name: str, prompt: list[int], tokens: int) -> None:
        """A request, as a frontend sends it; what it is sampled by is what `rose bench decode` takes."""
        sampling = SamplingParams(temperature=1, seed=1)
        self._send(Generate(request_id=name, prompt=prompt, sampling=sampling, max_tokens=tokens))
        while not self._mailbox.socket.poll(10):
            pass

    def turn(self) -> None:
        """As in `engine.loop.serve`."""
        engine, mailbox = self.engine, self._mailbox
        mailbox.receive(engine)
        mailbox.deliver(engine.step()[1], engine.scheduler.stats)

    def drain(self) -> None:
        """Read what a frontend would."""
        while self._client.poll(0):
            self._client.recv()


class Collections:
    """Seconds and number of the garbage collector's runs within, and the longest one."""

    def __init__(self) -> None:
        self.seconds = self.longest = self._begun = 0.0
        self.number = 0

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.thread_time()
            return
        seconds = time.thread_time() - self._begun
        self.seconds, self.longest, self.number = self.seconds + seconds, max(self.longest, seconds), self.number + 1


def collection_ms() -> float:
    gc.collect()
    begun = time.thread_time()
    gc.collect()
    return (time.thread_time() - begun) * 1e3


def draw_prompt(tokens: int) -> list[int]:
    return [random.randrange(1024) for _ in range(tokens)]


def prompt_row(server: Server, tokens: int) -> dict[str, Any]:
    before, during, after = [], [], []
    for number in range(ROUNDS):
        server.ask(f"{tokens} {number}", draw_prompt(tokens), 1)
        begun = time.thread_time()
        server.turn()
        before.append((server.launched - begun) * 1e6)
        ended = time.thread_time()
        during.append((ended - server.launched) * 1e6)
        server.turn()
        after.append((time.thread_time() - ended) * 1e6)
        server.drain()
        assert not server.engine.has_work
    return {
        "tokens": tokens, "us to the launch": statistics.median(before), "most": max(before),
        "us after it": statistics.median(during), "us to deliver": statistics.median(after), "most of it": max(after),
    }  # fmt: skip


def decode_row(server: Server, batch: int) -> dict[str, Any]:
    for number in range(batch):
        server.ask(f"{batch} {number}", draw_prompt(CONTEXT), STEPS + 100)
    while len(server.engine.scheduler.running) < batch or any(r.remaining > 1 for r in server.engine.scheduler.running):
        server.turn()
    before, times = [], []
    with Collections() as collected:
        for _ in range(STEPS):
            begun = time.thread_time()
            server.turn()
            times.append((time.thread_time() - begun) * 1e6)
            before.append((server.launched - begun) * 1e6)
            server.drain()
    for request in list(server.engine.scheduler.running):
        server.engine.cancel(request.client, request.id)
    while server.engine.has_work:
        server.turn()
    return {
        "batch": batch, "us a step": statistics.median(times), "most": max(times),
        "of it to the launch": statistics.median(before), "us a step in gc": collected.seconds * 1e6 / STEPS,
        "collections": collected.number, "longest us": collected.longest * 1e6,
    }  # fmt: skip


def profiled(call: Callable[[], Any]) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(call)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(35)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="*", type=int, default=[128, 1024, 4000])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 64, 128])
    parser.add_argument("--profile", action="store_true", help="also print where Python spends the time")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    import rose_dist.kernels.cute.paged_attention_decode  # noqa: F401, PLC0415  loads the compiler, as a server does

    server = Server(max(arguments.batches, default=1))
    print(f"{len(gc.get_objects())} objects; a full collection takes {collection_ms():.0f} ms", end=", ")
    gc.freeze()  # as `cli.engine_start.load_engine` does
    print(f"{collection_ms():.1f} ms once they are frozen\n")
    prompts = [prompt_row(server, tokens) for tokens in arguments.prompts]
    decodes = [decode_row(server, batch) for batch in arguments.batches]
    print(table(prompts), table(decodes), sep="\n\n")
    if arguments.profile:
        for tokens in arguments.prompts:
            profiled(lambda tokens=tokens: prompt_row(server, tokens))  # type: ignore[misc]
        for batch in arguments.batches:
            profiled(lambda batch=batch: decode_row(server, batch))  # type: ignore[misc]
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        rows = {"prompts": prompts, "decodes": decodes}
        (arguments.out / "host_steps.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
