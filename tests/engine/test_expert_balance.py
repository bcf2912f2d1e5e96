"""Experts change places between steps, and nobody's tokens change; real ranks, a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from rose_dist.comm.addresses import reachable_address
from rose_dist.comm.expert_moves import move_experts
from rose_dist.comm.expert_placement import Placement, solve
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.doorbell import Doorbell
from rose_dist.engine.engine import Engine
from rose_dist.engine.loop import serve
from rose_dist.engine.offline import OfflineSession
from rose_dist.engine.protocol import EngineStats, Generate, SamplingParams
from rose_dist.kernels.mxfp4 import quantize_mxfp4
from rose_dist.layers.expert_matrices import MoeWeights, expert_matrix
from tests.checkpoints import random_prompt, reference, reference_greedy, write_tiny
from tests.ranks import run_ranks

LENGTHS = (3, 17, 40, 130)
NEW = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def requests(name: str) -> list[Generate]:
    return [
        Generate(
            request_id=f"{name}{i}",
            prompt=random_prompt(length, i),
            sampling=SamplingParams(temperature=0),
            max_tokens=NEW,
        )
        for i, length in enumerate(LENGTHS)
    ]


def generate(
    world: World, folder: Path, tp: int | None, ep: int | None, redundant: int, rounds: int
) -> tuple[list[list[list[int]]], EngineStats, list[list[int]]] | None:
    """Rank 0's requests in several rounds, the experts rearranged in the middle of each; tokens by round."""
    groups = world.groups(Layout.of(world.size, tp=tp, ep=ep))
    config = EngineConfig(folder, max_step_tokens=64, prefix_cache=False, redundant_experts=redundant)
    engine = Engine.load(config, groups)
    context: zmq.Context[Any] = zmq.Context()
    bell = Doorbell(context, reachable_address(world.hosts), groups.lockstep)
    found = []
    if groups.lockstep.rank == 0:
        with OfflineSession(engine, bell) as session:
            for number in range(rounds):
                tokens: dict[str, list[int]] = {request.request_id: [] for request in requests(f"{number}-")}
                for step, output in enumerate(session.run(requests(f"{number}-"))):
                    tokens[output.request_id] += output.token_ids
                    engine.rebalance_wanted |= step == 9
                found.append(list(tokens.values()))
    else:
        serve(engine, bell, None, lambda: None)
    placements = [list(layer.expert_map.placement.slots) for layer in engine.runner.model.moe_layers]
    context.destroy(linger=0)
    groups.free()
    return (found, engine.scheduler.stats, placements) if world.rank == 0 else None


def routed_by_transformers(folder: Path) -> torch.Tensor:
    """[layers, experts]: how often one round's tokens choose each."""
    texts = [request.prompt + reference_greedy(folder, request.prompt, NEW) for request in requests("")]
    model = reference(folder)
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.router.register_forward_hook(lambda module, args, out: chosen.append(out[-1].flatten()))
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        for text in texts:
            model(torch.tensor([text[:-1]]))
    counts = [ids.bincount(minlength=8) for ids in chosen]
    total = torch.stack(counts).view(len(texts), len(hooks), 8).sum(0)
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize(
    ("ranks", "tp", "ep", "redundant"),
    [
        pytest.param(2, None, None, 0, marks=pytest.mark.mpi(2), id="2 ranks, experts change places only"),
        pytest.param(2, None, None, 3, marks=pytest.mark.mpi(2), id="2 ranks, 3 redundant"),
        pytest.param(4, None, None, 5, marks=pytest.mark.mpi(4), id="4 ranks, 5 redundant"),
        pytest.param(4, 2, 4, 4, marks=pytest.mark.mpi(4), id="2 replicas of 2 ranks, experts over 4"),
        pytest.param(4, None, 2, 2, marks=pytest.mark.mpi(4), id="experts twice, over 2 ranks each"),
    ],
)
def test_the_same_tokens_before_and_after(
    tiny: Path, ranks: int, tp: int | None, ep: int | None, redundant: int
) -> None:
    rounds = 3
    tokens, stats, placements = run_ranks(ranks, generate, tiny, tp, ep, redundant, rounds, timeout=120)[0]
    expected = [reference_greedy(tiny, request.prompt, NEW) for request in requests("")]
    assert tokens == [expected] * rounds
    assert stats.expert_rebalances == rounds
    assert stats.expert_bytes_moved > 0
    assert stats.expert_load == (rounds * routed_by_transformers(tiny).sum(0)).tolist()
    assert all(sorted({*slots}) == list(range(8)) and len(slots) == 8 + redundant for slots in placements)
    assert len({tuple(slots) for slots in placements}) > 1, "each layer has a placement of its own"


@pytest.mark.mpi(4)
def test_sliced_experts_move_too(tiny: Path) -> None:
    """Four ranks hold the halves of every expert's slices: the sum over ranks is rounded in another order afterwards,
    which does not show in these tokens.
    """
    tokens, stats, _ = run_ranks(4, generate, tiny, 4, 2, 2, 2, timeout=120)[0]
    assert tokens == [[reference_greedy(tiny, request.prompt, NEW) for request in requests("")]] * 2
    assert stats.expert_bytes_moved > 0


def move_matrices(world: World, kept: MoeWeights) -> int:
    """Matrices stored for one placement and moved to another are those stored for the other."""
    count, outputs, inputs = 5, 160, 96

    def stored(placement: Placement) -> list[torch.Tensor]:
        matrix = expert_matrix(kept, len(placement.of_rank(world.rank)), outputs, inputs, torch.bfloat16)
        for local, expert in enumerate(placement.of_rank(world.rank)):
            values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(expert)) * 2.0**expert
            matrix.store_packed(local)(*(part[None] for part in quantize_mxfp4(values)))
        return [parameter.data for parameter in matrix.parameters()]

    before = Placement.initial(count, world.size, 3)
    after = solve([1, 50, 3, 9, 2], world.size, count + 3, before)
    held = stored(before)
    received = move_experts(before, after, world.group, held)
    assert all(torch.equal(one, other) for one, other in zip(held, stored(after), strict=True))
    return received


@pytest.mark.mpi(2)
@pytest.mark.parametrize("kept", ["mxfp4", "fp8", "bf16"])
def test_weights_in_every_form_arrive(kept: MoeWeights) -> None:
    assert any(run_ranks(2, move_matrices, kept))
