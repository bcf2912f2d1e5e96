"""Placements are pure data: what must hold for every one, and that the greedy solver evens out real skews."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose_dist.comm.expert_moves import move_experts, plan
from rose_dist.comm.expert_placement import Placement, balance, solve
from rose_dist.comm.layout import LayoutError, even_split
from rose_dist.comm.world import World
from tests.ranks import run_ranks


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Loads, ranks, slots."""
    ranks = draw(st.integers(1, 9))
    experts = draw(st.integers(1, 24))
    redundant = draw(st.integers(0, min(experts * (ranks - 1), 20)))
    load = draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts))
    return load, ranks, experts + redundant


def check(placement: Placement, experts: int, ranks: int, slots: int) -> None:
    assert (placement.num_experts, placement.ranks, len(placement.slots)) == (experts, ranks, slots)
    assert {*placement.slots} == {*range(experts)}
    held = [placement.of_rank(rank) for rank in range(ranks)]
    assert [len(bundle) for bundle in held] == [len(even_split(slots, ranks, rank)) for rank in range(ranks)]
    assert all(len({*bundle}) == len(bundle) for bundle in held), "an expert twice on a rank"
    table = placement.table()
    for expert, row in enumerate(table):
        assert [placement.slots[slot] for slot in row[1 : 1 + row[0]]] == [expert] * placement.slots.count(expert)
    assert table.shape == (experts, placement.width)


@given(problem=problems())
def test_every_solution_is_a_placement(problem: tuple[list[int], int, int]) -> None:
    load, ranks, slots = problem
    placement = solve(load, ranks, slots)
    check(placement, len(load), ranks, slots)
    assert placement == solve(load, ranks, slots)
    assert np.isclose(placement.rank_loads(load).sum(), sum(load))


@given(problem=problems(), seed=st.integers(0, 9))
def test_staying_changes_no_load(problem: tuple[list[int], int, int], seed: int) -> None:
    load, ranks, slots = problem
    other = np.random.default_rng(seed).permutation(load)
    before = solve(other, ranks, slots)
    free, kept = solve(load, ranks, slots), solve(load, ranks, slots, before)
    check(kept, len(load), ranks, slots)
    assert sorted(np.round(free.rank_loads(load), 6)) == sorted(np.round(kept.rank_loads(load), 6))
    assert len(plan(before, kept)) <= slots
    assert solve(other, ranks, slots, before) == before, "nothing changed, so nothing moves"


@given(problem=problems(), seed=st.integers(0, 9))
def test_moves_lead_from_one_placement_to_another(problem: tuple[list[int], int, int], seed: int) -> None:
    load, ranks, slots = problem
    before = solve(np.random.default_rng(seed).permutation(load), ranks, slots)
    after = solve(load, ranks, slots)
    moved = list(before.slots)
    for move in plan(before, after):
        moved[move.target] = before.slots[move.source]
    assert tuple(moved) == after.slots


def test_the_best_possible_where_greed_finds_it() -> None:
    """Four experts of loads 4, 1, 1, 2 and two more slots on two ranks: 4 is split, and 2."""
    placement = solve([4, 1, 1, 2], 2, 6)
    assert placement.rank_loads([4, 1, 1, 2]).tolist() == [4, 4]
    assert balance([placement], [[4, 1, 1, 2]]) == 1


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "before", "after"), [(128, 8, 0, 0.82, 0.93), (256, 32, 32, 0.6, 0.97)]
)
def test_a_zipf_skew_is_evened_out(experts: int, ranks: int, redundant: int, before: float, after: float) -> None:
    draw = np.random.default_rng(0)
    loads = [draw.permutation(1 / np.arange(1, experts + 1) ** 0.5) for _ in range(4)]
    first = [Placement.initial(experts, ranks, redundant)] * 4
    solved = [solve(load, ranks, experts + redundant) for load in loads]
    assert balance(first, loads) < before
    assert balance(solved, loads) > after


def test_without_redundancy_experts_start_in_order() -> None:
    assert Placement.initial(5, 2).slots == (0, 1, 2, 3, 4)
    assert Placement.initial(5, 2).of_rank(0) == (0, 1, 2)
    check(Placement.initial(5, 3, 2), 5, 3, 7)
    assert balance([Placement.initial(4, 2)], [[0, 0, 0, 0]]) == 1


@pytest.mark.parametrize(("experts", "ranks", "redundant"), [(4, 1, 1), (4, 2, 5), (4, 2, -1)])
def test_useless_redundancy_is_refused(experts: int, ranks: int, redundant: int) -> None:
    with pytest.raises(LayoutError, match=f"{redundant} redundant experts"):
        Placement.initial(experts, ranks, redundant)


def weights_of(slots: tuple[int, ...], layer: int) -> list[torch.Tensor]:
    """Tensors whose rows tell the expert; without any slot they have no row."""
    ids = torch.tensor(slots, dtype=torch.float32)
    matrix = ids[:, None, None] + torch.arange(6.0).view(2, 3) / 10 + 100 * layer
    return [matrix.clone(), (ids[:, None] * torch.ones(5)).bfloat16(), ids.clone()]


def move(world: World, seed: int) -> list[int]:
    draw = np.random.default_rng(seed)
    experts = int(draw.integers(1, 12))
    redundant = int(draw.integers(0, experts * (world.size - 1) + 1))
    before = Placement.initial(experts, world.size, redundant)
    held = weights_of(before.of_rank(world.rank), 0)
    received = []
    for stay in (False, True, False):
        load = draw.integers(0, 50, experts)
        after = solve(load, world.size, experts + redundant, before if stay else None)
        received.append(move_experts(before, after, world.group, held))
        for tensor, wanted in zip(held, weights_of(after.of_rank(world.rank), 0), strict=True):
            assert torch.equal(tensor, wanted)
        before = after
    assert move_experts(before, before, world.group, held) == 0
    return received


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.mpi(n)) for n in (1, 2, 4)])
def test_weights_arrive(ranks: int) -> None:
    received = [run_ranks(ranks, move, seed) for seed in range(8)]
    assert any(any(any(moved) for moved in each) for each in received) == (ranks > 1)
