"""Topologies are pure data: properties that must hold for every one, and small ones spelled out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_dist.comm.all_to_all.create import sums_pay
from rose_dist.comm.all_to_all.protocol import AllToAllConfig
from rose_dist.comm.group import Group
from rose_dist.comm.layout import Layout, LayoutError
from rose_dist.comm.topology import Topology
from rose_dist.comm.world import Groups, World
from tests.ranks import run_ranks

machines = st.lists(st.sampled_from("abcd"), min_size=1, max_size=16)
forced = st.none() | st.integers(1, 5)


@given(names=machines, force_remote=forced, data=st.data())
def test_near_and_far_are_the_group(names: list[str], force_remote: int | None, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(names) - 1))
    topology = Topology.of(names, rank, force_remote)
    assert sorted([*topology.near, *topology.far]) == list(range(len(names)))
    assert rank in topology.near
    for peer in range(len(names)):
        assert topology.is_far(peer) == (peer in topology.far)
        if names[peer] != names[rank]:
            assert topology.is_far(peer)
        elif force_remote is None:
            assert not topology.is_far(peer)
    assert topology.one_domain == (not topology.far)
    if force_remote is not None:
        assert max(map(len, topology.members)) <= force_remote


@given(names=machines, force_remote=forced)
def test_all_ranks_see_the_same_nodes(names: list[str], force_remote: int | None) -> None:
    views = [Topology.of(names, rank, force_remote) for rank in range(len(names))]
    assert len({view.nodes for view in views}) == 1
    for view in views:
        for peer in view.far:
            assert view.rank in views[peer].far
        for node, ranks in enumerate(view.members):
            assert view.rail(node) in ranks
        assert view.rail(view.node) == view.rank


@pytest.mark.parametrize("size", [1, 2, 4])
def test_nobody_is_everybodys_first(size: int) -> None:
    """In nodes of equal size each turn of the sends is a permutation of the ranks."""
    names = [name for name in "abcd" for _ in range(size)]
    orders = [Topology.of(names, rank).far for rank in range(len(names))]
    for turn in range(len(orders[0])):
        assert set(Counter(order[turn] for order in orders).values()) == {1}


def test_emulated_nodes_of_one_machine() -> None:
    assert Topology.of(["a"] * 4, 1).one_domain
    assert Topology.of(["a"] * 4, 1, force_remote=2).nodes == (0, 0, 1, 1)
    assert Topology.of(["a"] * 4, 1, force_remote=1).far == (2, 3, 0)
    assert Topology.of(["a", "b", "a", "b", "a"], 0, force_remote=2).nodes == (0, 1, 0, 1, 2)
    with pytest.raises(ValueError, match="at least 1 rank"):
        Topology.of(["a"], 0, force_remote=0)


@pytest.mark.parametrize(
    ("names", "allowed"), [("aabb", True), ("abc", True), ("a", True), ("aab", False), ("abab", False)]
)
def test_rails_join_ranks_of_the_same_place(names: str, allowed: bool) -> None:
    topology = Topology.of(names, len(names) - 1)
    if not allowed:
        with pytest.raises(LayoutError, match="place ranks by node"):
            topology.require_rails()
        return
    topology.require_rails()
    size = len(topology.near)
    assert {rail % size for rail in topology.rails} <= {topology.rank % size}


@pytest.mark.parametrize(
    ("nodes", "top_k", "rails", "pays"),
    [
        ("aa", 2, False, True), ("aa", 1, False, False), ("aabb", 4, False, False), ("aabb", 4, True, True),
        ("aabb", 1, True, False), ("aaaa", 3, True, False), ("abcd", 4, True, False),
    ],
)  # fmt: skip
def test_sums_pay_where_a_rank_or_a_node_has_a_row_of_a_token(nodes: str, top_k: int, rails: bool, pays: bool) -> None:
    ranks, alone = len(nodes), Group(None)
    layout, ep = Layout.of(ranks), Group(None)
    ep.size = ranks
    groups = Groups(layout, layout.at(0), alone, ep, alone, Topology.of(nodes, 0))
    config = AllToAllConfig(num_experts=8, top_k=top_k, hidden=16, max_tokens=1, rail_forwarding=rails)
    assert sums_pay(config, groups) is pays


def nodes_of_the_world(world: World, force_remote: int | None) -> tuple[tuple[int, ...], int]:
    groups = world.groups(Layout.of(world.size), force_remote)
    groups.free()
    return groups.topology.nodes, groups.topology.rank


def host(world: World) -> str:
    return world.host


@pytest.mark.mpi(2)
def test_the_world_knows_who_is_on_which_host() -> None:
    nodes = run_ranks(2, nodes_of_the_world, None)
    if len(set(run_ranks(2, host))) == 1:
        assert nodes == [((0, 0), 0), ((0, 0), 1)]
    assert run_ranks(2, nodes_of_the_world, 1) == [((0, 1), 0), ((0, 1), 1)]
