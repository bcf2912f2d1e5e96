"""Whole-engine runs: the same request gives the same tokens, however it is cut, cached and batched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.doorbell import Doorbell
from rose_dist.engine.engine import Engine
from rose_dist.engine.offline import OfflineSession
from rose_dist.engine.protocol import Generate, Output, SamplingParams
from tests.checkpoints import random_prompt, reference_greedy, reference_logits, write_tiny

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


class Runner:
    """An engine on this process alone, driven in full batches."""

    def __init__(self, folder: Path, **options: object) -> None:
        world = World.join()
        groups = world.groups(Layout.of(1))
        self.engine = Engine.load(EngineConfig(folder, **options), groups)  # type: ignore[arg-type]
        self.session = OfflineSession(self.engine, Doorbell(zmq.Context.instance(), "127.0.0.1", groups.lockstep))

    def run(self, requests: Sequence[Generate]) -> dict[str, list[Output]]:
        outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
        for output in self.session.run(requests):
            outputs[output.request_id].append(output)
        assert self.engine.scheduler.kv.used_blocks == 0
        return outputs

    def tokens(self, requests: Sequence[Generate]) -> dict[str, list[int]]:
        return {
            request: [token for output in outputs for token in output.token_ids]
            for request, outputs in self.run(requests).items()
        }


def greedy(name: str, prompt: list[int], count: int) -> Generate:
    return Generate(request_id=name, prompt=prompt, sampling=GREEDY, max_tokens=count)


@pytest.fixture(scope="module")
def mixed(tiny: Path) -> tuple[list[Generate], dict[str, list[int]]]:
    """32 requests of many lengths, and what transformers generates for each alone."""
    lengths = [1, 2, 15, 16, 17, 100, 127, 128, 129, 200, 300, *random.Random(0).choices(range(3, 260), k=21)]
    requests = [greedy(f"r{i}", random_prompt(n, i), 6 + i % 9) for i, n in enumerate(lengths)]
    alone = {
        request.request_id: reference_greedy(tiny, request.prompt, request.max_tokens or 0) for request in requests
    }
    return requests, alone


@pytest.mark.parametrize("chunk", [1, 16, 64, 512])
def test_chunks_give_the_same_tokens_as_transformers(tiny: Path, chunk: int) -> None:
    prompt = random_prompt(200, 7)
    runner = Runner(tiny, max_step_tokens=chunk, max_running=1)
    assert runner.tokens([greedy("r", prompt, 12)])["r"] == reference_greedy(tiny, prompt, 12)


def test_a_mixed_batch_gives_each_request_the_tokens_it_gets_alone(
    tiny: Path, mixed: tuple[list[Generate], dict[str, list[int]]]
) -> None:
    requests, alone = mixed
    assert Runner(tiny, max_step_tokens=128, max_running=32).tokens(requests) == alone


def test_preemption_does_not_change_tokens(tiny: Path) -> None:
    """8 requests that grow to 110 tokens each, in a cache for 640."""
    requests = [greedy(f"r{i}", random_prompt(60, i), 50) for i in range(8)]
    runner = Runner(tiny, kv_tokens=640, max_step_tokens=64, max_running=8)
    assert runner.tokens(requests) == {
        request.request_id: reference_greedy(tiny, request.prompt, 50) for request in requests
    }
    assert runner.engine.scheduler.stats.preemptions > 0


def test_a_cached_prefix_gives_the_same_tokens(tiny: Path) -> None:
    runner = Runner(tiny, max_step_tokens=64, max_running=4)
    shared = random_prompt(330, 11)
    prompts = [shared, shared, [*shared[:250], *random_prompt(40, 12)], shared[:64], [*shared, 1, 2, 3]]
    for i, prompt in enumerate(prompts):
        outputs = runner.run([greedy(f"r{i}", prompt, 8)])[f"r{i}"]
        assert [token for output in outputs for token in output.token_ids] == reference_greedy(tiny, prompt, 8)
        expected = [0, 320, 240, 48, 320][i]
        # The window's blocks that the shorter beginnings need may be gone; what is reported must be what was skipped.
        assert outputs[0].cached_tokens in ({expected} if i in (0, 1, 4) else {0, expected})
    assert runner.engine.scheduler.stats.prefix_hits >= 640


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(tiny: Path) -> None:
    runner = Runner(tiny, max_step_tokens=64, max_running=32)
    seeded = [
        Generate(
            request_id=f"r{i}",
            prompt=random_prompt(20, i),
            sampling=SamplingParams(temperature=1.2, top_p=0.9, top_k=40, seed=i, frequency_penalty=0.3),
            max_tokens=20,
        )
        for i in range(8)
    ]
    together = runner.tokens(seeded)
    assert together == {key: value for request in seeded for key, value in runner.tokens([request]).items()}
    assert len({tuple(tokens) for tokens in together.values()}) == 8


def test_logprobs_are_those_of_the_model(tiny: Path) -> None:
    prompt = random_prompt(30, 5)
    request = Generate(request_id="r", prompt=prompt, sampling=SamplingParams(temperature=0, logprobs=3), max_tokens=4)
    outputs = Runner(tiny).run([request])["r"]
    tokens = [output.token_ids[0] for output in outputs]
    expected = torch.log_softmax(reference_logits(tiny, prompt + tokens), -1)
    for position, output in enumerate(outputs, start=len(prompt) - 1):
        assert output.logprobs is not None
        found = output.logprobs[0]
        values, ids = expected[position].topk(3)
        assert found.logprob == pytest.approx(float(values[0]), abs=1e-4)
        assert [token for token, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_stop_ids_end_the_output_and_are_delivered(tiny: Path) -> None:
    prompt = random_prompt(9, 3)
    tokens = reference_greedy(tiny, prompt, 10)
    stop = tokens[4]
    request = Generate(request_id="r", prompt=prompt, sampling=GREEDY, max_tokens=10, stop_ids=[stop])
    outputs = Runner(tiny).run([request])["r"]
    assert [token for output in outputs for token in output.token_ids] == tokens[: tokens.index(stop) + 1]
    assert [output.finish for output in outputs[-2:]] == [None, "stop"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 1, "the prompt is empty"),
        (9000, 1, "fewer than 8192"),
        (600, None, "fewer than 592: the model's context is 8192, the KV cache's 592"),
        (500, 100, "max_tokens 100 exceed 592"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(tiny: Path, prompt: int, max_tokens: int | None, message: str) -> None:
    request = Generate(request_id="r", prompt=[1] * prompt, sampling=GREEDY, max_tokens=max_tokens)
    (output,) = Runner(tiny, kv_tokens=600 if "592" in message else 16384).run([request])["r"]
    assert output.finish == "error"
    assert message in (output.error or "")


def test_a_request_without_max_tokens_ends_where_the_cache_does(tiny: Path) -> None:
    request = Generate(request_id="r", prompt=[1] * 20, sampling=GREEDY)
    outputs = Runner(tiny, kv_tokens=64).run([request])["r"]
    assert len(outputs) == 44
    assert outputs[-1].finish == "length"


def test_closing_the_iterator_cancels_and_frees(tiny: Path) -> None:
    runner = Runner(tiny)
    outputs = runner.session.run([greedy("a", random_prompt(50, 1), 100), greedy("b", random_prompt(50, 2), 100)])
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert not runner.engine.scheduler.has_work
    assert runner.engine.scheduler.kv.used_blocks == 0
    assert runner.tokens([greedy("c", random_prompt(9, 3), 4)])["c"] == reference_greedy(tiny, random_prompt(9, 3), 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1, 500]},
        {"prompt": [-1]},
        {"stop_ids": [500]},
        {"sampling": SamplingParams(logit_bias={1000: 1.0})},
    ],
)
def test_ids_outside_the_vocabulary_are_refused(tiny: Path, fields: dict[str, Any]) -> None:
    request = Generate(**{"request_id": "r", "prompt": [1, 2], "sampling": GREEDY, "max_tokens": 2} | fields)
    runner = Runner(tiny)
    (output,) = runner.run([request])["r"]
    assert output.finish == "error"
    assert "0 to 499" in (output.error or "")
    assert len(runner.tokens([greedy("next", [1, 2], 2)])["next"]) == 2
