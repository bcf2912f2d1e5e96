"""rose on this CPU against transformers, the same checkpoint, dtype and threads: `make bench-cpu`.

    python -m benchmarks.cpu MODEL [--threads 2] [--rounds 5] [--machine NAME]

MODEL is the demo's: SmolLM2 as a GPT-OSS mixture of experts. The two take turns within a round, so that a change of the
machine's speed meets both; ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq

from benchmarks.report import markdown, write
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.doorbell import Doorbell
from rose_dist.engine.engine import Engine
from rose_dist.engine.offline import OfflineSession
from rose_dist.engine.protocol import Generate, SamplingParams

PROMPT, OUTPUT, BATCH, PREFIX = 37, 48, 8, 2000


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(100, 40_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Rose:
    def __init__(self, model: Path) -> None:
        world = World.join(log_level=logging.WARNING)
        groups = world.groups(Layout.of(1))
        engine = Engine.load(EngineConfig(model), groups)
        self._session = OfflineSession(engine, Doorbell(zmq.Context.instance(), "127.0.0.1", groups.lockstep))

    def generate(self, prompts: list[list[int]], count: int) -> float:
        """Seconds for `count` tokens after each prompt, all at once."""
        begun = time.perf_counter()
        tokens = sum(len(output.token_ids) for output in self._session.run(self._requests(prompts, count)))
        assert tokens == count * len(prompts)
        return time.perf_counter() - begun

    def first_token(self, prompt: list[int]) -> float:
        """Seconds."""
        return self.generate([prompt], 1)

    @staticmethod
    def _requests(prompts: list[list[int]], count: int) -> Iterator[Generate]:
        for number, prompt in enumerate(prompts):
            yield Generate(
                request_id=str(number), prompt=prompt, sampling=SamplingParams(temperature=0), max_tokens=count
            )


class Transformers:
    def __init__(self, model: Path) -> None:
        from transformers import GptOssForCausalLM, Mxfp4Config  # noqa: PLC0415

        loaded: Any = GptOssForCausalLM.from_pretrained(model, quantization_config=Mxfp4Config(dequantize=True))
        self._model = loaded.float().eval()
        self.experts = self._model.config._experts_implementation

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], count: int) -> float:
        """Seconds for `count` tokens after each prompt, one after another."""
        begun = time.perf_counter()
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = self._model.generate(
                ids,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                attention_mask=torch.ones_like(ids),
                pad_token_id=0,
            )
            assert out.shape[1] == len(prompt) + count
        return time.perf_counter() - begun


@dataclass(frozen=True)
class Comparison:
    """Seconds of each round, and what the ratio theirs / ours must reach."""

    name: str
    ours: list[float]
    theirs: list[float]
    target: float
    tokens: int

    @property
    def ratios(self) -> list[float]:
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    def row(self) -> list[object]:
        ours, theirs = (statistics.median(times) / self.tokens * 1e3 for times in (self.ours, self.theirs))
        spread = f"{min(self.ratios):.2f}–{max(self.ratios):.2f}"
        return [
            self.name,
            f"{theirs:.1f}",
            f"{ours:.1f}",
            f"{statistics.median(self.ratios):.2f}",
            spread,
            f"≥ {self.target}",
        ]


def compare(
    name: str, ours: Callable[[], float], theirs: Callable[[], float], rounds: int, target: float, tokens: int
) -> Comparison:
    ours(), theirs()  # warm-up
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return Comparison(name, [a for a, _ in pairs], [b for _, b in pairs], target, tokens)


def prefix_rounds(rose: Rose, rounds: int) -> Comparison:
    """Time to the first token after a new prefix, and after the same prefix with another question."""
    first, second = [], []
    for seed in range(rounds):
        prefix = random_prompt(PREFIX, 1000 + seed)
        first.append(rose.first_token(prefix + random_prompt(20, 2 * seed)))
        second.append(rose.first_token(prefix + random_prompt(20, 2 * seed + 1)))
    return Comparison("first token after a shared 2,000-token prefix, of the first request", second, first, 5, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}core", help="folder of the results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rose, peer = Rose(arguments.model), Transformers(arguments.model)
    one, eight = [random_prompt(PROMPT, 1)], [random_prompt(PROMPT, seed) for seed in range(BATCH)]
    results = [
        compare(
            "batch 1",
            lambda: rose.generate(one, OUTPUT),
            lambda: peer.generate(one, OUTPUT),
            arguments.rounds,
            1.2,
            OUTPUT,
        ),
        compare(
            "8 requests at once (transformers: one after another)",
            lambda: rose.generate(eight, OUTPUT),
            lambda: peer.generate(eight, OUTPUT),
            arguments.rounds,
            3,
            OUTPUT * BATCH,
        ),
        prefix_rounds(rose, arguments.rounds),
    ]
    header = ["what", "transformers ms a token", "rose ms a token", "ratio, median", "spread", "target"]
    text = markdown(header, [result.row() for result in results])
    text += (
        f"\n\nfp32, {arguments.threads} threads, prompts of {PROMPT} tokens, {OUTPUT} tokens out, {arguments.rounds} "
        f"rounds; transformers with experts by {peer.experts}. The last row compares rose with itself: first token of "
        "the first request and of the second, ms."
    )
    print(text)
    figures = [vars(result) | {"ratio_median": statistics.median(result.ratios)} for result in results]
    command = f"python -m benchmarks.cpu {arguments.model.name} --threads {arguments.threads}"
    write(arguments.machine, "cpu", "SmolLM2 as GPT-OSS on a CPU, rose and transformers", command, text, figures)


if __name__ == "__main__":
    main()
