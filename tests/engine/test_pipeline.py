"""The GPU's way of stepping, on a CPU: inputs at fixed places, padded batches, plans ahead of the tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rose_dist.engine.decode_graphs import DecodeGraphs
from rose_dist.engine.protocol import Generate, SamplingParams
from tests.checkpoints import random_prompt, reference_greedy, write_tiny
from tests.engine.test_engine import Runner, greedy

LADDER = (1, 3, 8, 16)
WAYS = [{"overlap": True}, {"ladder": LADDER}, {"overlap": True, "ladder": LADDER}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_mixed_batch_gives_the_tokens_of_plain_steps(tiny: Path, way: dict[str, object]) -> None:
    lengths = [1, 2, 15, 16, 17, 127, 128, 129, *random.Random(0).choices(range(3, 260), k=6)]
    requests = [greedy(f"r{i}", random_prompt(n, i), 6 + i % 9) for i, n in enumerate(lengths)]
    sizes = {"max_step_tokens": 96, "max_running": 16, "max_context": 512}
    assert Runner(tiny, **sizes, **way).tokens(requests) == Runner(tiny, **sizes).tokens(requests)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_preemption_does_not_change_tokens(tiny: Path, way: dict[str, object]) -> None:
    requests = [greedy(f"r{i}", random_prompt(60, i), 40) for i in range(8)]
    runner = Runner(tiny, kv_tokens=640, max_step_tokens=64, max_running=8, max_context=640, **way)
    found = runner.tokens(requests)
    assert runner.engine.scheduler.stats.preemptions > 0
    for request in requests[::3]:
        assert found[request.request_id] == reference_greedy(tiny, request.prompt, 40)


def test_a_stop_id_found_late_drops_the_extra_token(tiny: Path) -> None:
    prompt = random_prompt(9, 3)
    tokens = reference_greedy(tiny, prompt, 10)
    stop = tokens[4]
    request = Generate(
        request_id="r", prompt=prompt, sampling=SamplingParams(temperature=0), max_tokens=10, stop_ids=[stop]
    )
    runner = Runner(tiny, overlap=True)
    outputs = runner.run([request])["r"]
    assert [token for output in outputs for token in output.token_ids] == tokens[: tokens.index(stop) + 1]
    assert outputs[-1].finish == "stop"
    steps = runner.engine.scheduler.stats.steps
    assert steps == tokens.index(stop) + 2  # the prompt's, one for each further token, and one for nothing


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_seeded_sampling_penalties_and_logprobs_stay_the_same(tiny: Path, way: dict[str, object]) -> None:
    requests = [
        Generate(
            request_id=f"r{i}",
            prompt=random_prompt(20, i),
            sampling=SamplingParams(
                temperature=0.5 * (i % 4), top_p=(1.0, 0.9)[i % 2], top_k=(0, 40, 0, 5)[i % 4], seed=i,
                frequency_penalty=(0.0, 0.4)[i % 2], repetition_penalty=(1.0, 1.2)[i % 3 == 0],
                logprobs=(None, 2)[i % 2],
            ),
            max_tokens=12 + i,
            min_tokens=i,
            stop_ids=[7, 8, 9],
        )
        for i in range(9)
    ]  # fmt: skip
    plain, found = Runner(tiny).run(requests), Runner(tiny, max_context=256, **way).run(requests)
    for name, outputs in plain.items():
        assert [o.token_ids for o in found[name]] == [o.token_ids for o in outputs]
        for one, other in zip(found[name], outputs, strict=True):
            if one.logprobs and other.logprobs:
                assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=1e-4)


def test_cancelling_while_a_step_is_under_way_frees_and_delivers_nothing_more(tiny: Path) -> None:
    runner = Runner(tiny, overlap=True)
    outputs = runner.session.run([greedy("a", random_prompt(50, 1), 100), greedy("b", random_prompt(50, 2), 100)])
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    assert not runner.engine.has_work
    assert runner.engine.scheduler.kv.used_blocks == 0
    assert runner.tokens([greedy("c", random_prompt(9, 3), 4)])["c"] == reference_greedy(tiny, random_prompt(9, 3), 4)


def test_a_client_that_connects_anew_voids_the_step_under_way(tiny: Path) -> None:
    """Of its requests one would have ended with that step, one is in the middle of its prompt, one waits."""
    runner = Runner(tiny, overlap=True, max_step_tokens=16, max_running=2)
    engine = runner.engine
    for request in (greedy("ends", [1, 2], 2), greedy("long", random_prompt(90, 1), 9), greedy("waits", [3], 9)):
        assert not engine.submit(b"lost", request)
    engine.step()
    engine.step()
    engine.cancel_all(b"lost")
    while engine.has_work:
        _, deliveries = engine.step()
        assert not deliveries
    assert engine.scheduler.kv.used_blocks == 0
    assert runner.tokens([greedy("c", random_prompt(9, 3), 4)])["c"] == reference_greedy(tiny, random_prompt(9, 3), 4)


def test_a_cached_prefix_gives_the_same_tokens(tiny: Path) -> None:
    runner = Runner(tiny, max_step_tokens=64, max_running=4, max_context=512, ladder=(1, 4), overlap=True)
    shared = random_prompt(330, 11)
    for i, prompt in enumerate([shared, shared, [*shared[:250], *random_prompt(40, 12)], [*shared, 1, 2, 3]]):
        outputs = runner.run([greedy(f"r{i}", prompt, 8)])[f"r{i}"]
        assert [token for output in outputs for token in output.token_ids] == reference_greedy(tiny, prompt, 8)
        assert outputs[0].cached_tokens in {0, [0, 320, 240, 320][i]}
    assert runner.engine.scheduler.stats.prefix_hits >= 640


def test_warming_up_leaves_no_trace(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(tiny, ladder=(1, 2), max_context=128)
    monkeypatch.setattr(DecodeGraphs, "capture", lambda self: None)  # there is nothing to capture on a CPU
    runner.engine.runner.warm_up()
    prompt = random_prompt(40, 1)
    assert runner.tokens([greedy("r", prompt, 6)])["r"] == reference_greedy(tiny, prompt, 6)
