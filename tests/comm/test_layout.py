"""Layouts are pure arithmetic: properties that must hold for every one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_dist.comm.layout import Layout, LayoutError, even_split


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world = draw(st.integers(1, 24))
    sizes = st.sampled_from([size for size in range(1, world + 1) if world % size == 0])
    return Layout.of(world, tp=draw(sizes), ep=draw(sizes))


@given(total=st.integers(0, 200), parts=st.integers(1, 40))
def test_even_split_is_a_partition_of_near_equal_parts(total: int, parts: int) -> None:
    ranges = [even_split(total, parts, index) for index in range(parts)]
    assert [number for part in ranges for number in part] == list(range(total))
    lengths = [len(part) for part in ranges]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@given(layout=layouts())
def test_groups_partition_the_world(layout: Layout) -> None:
    places = [layout.at(rank) for rank in range(layout.world)]
    for members in ("tp_members", "ep_members", "lockstep_members"):
        for place in places:
            mine = getattr(place, members)
            assert place.rank in mine
            assert list(mine) == sorted(mine)
            assert all(getattr(places[other], members) == mine for other in mine)
    for place in places:
        assert place.rank == place.dp_rank * layout.tp + place.tp_rank
        assert len(place.tp_members) == layout.tp
        assert len(place.ep_members) == layout.ep
        assert list(place.tp_members).index(place.rank) == place.tp_rank
        assert list(place.ep_members).index(place.rank) == place.ep_rank
        assert {places[other].dp_rank for other in place.tp_members} == {place.dp_rank}


@given(layout=layouts())
def test_lockstep_groups_are_what_tp_and_ep_groups_connect(layout: Layout) -> None:
    component = {rank: {rank} for rank in range(layout.world)}
    for rank in range(layout.world):
        place = layout.at(rank)
        for other in (*place.tp_members, *place.ep_members):
            if component[other] is not component[rank]:
                component[rank] |= component[other]
                for joined in component[rank]:
                    component[joined] = component[rank]
    for rank in range(layout.world):
        assert set(layout.at(rank).lockstep_members) == component[rank]


@given(layout=layouts(), num_experts=st.integers(1, 80))
def test_every_group_holds_every_expert_once(layout: Layout, num_experts: int) -> None:
    for rank in range(layout.world):
        place = layout.at(rank)
        held = [number for other in place.ep_members for number in layout.at(other).expert_range(num_experts)]
        assert held == list(range(num_experts))
        if layout.moe_mode == "tensor_parallel":
            pieces = {
                (number, layout.at(other).expert_slice)
                for other in place.tp_members
                for number in layout.at(other).expert_range(num_experts)
            }
            assert pieces == {(number, piece) for number in range(num_experts) for piece in range(layout.expert_tp)}
            assert set(place.ep_members) <= set(place.tp_members), "replicas exchange nothing"
        else:
            assert layout.expert_tp == 1
            assert place.expert_slice == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"world": 1}, Layout(1, 1, 1, 1)),
        ({"world": 4}, Layout(4, 1, 4, 4)),
        ({"world": 4, "tp": 2}, Layout(4, 2, 2, 4)),
        ({"world": 4, "dp": 2}, Layout(4, 2, 2, 4)),
        ({"world": 6, "tp": 2, "dp": 3, "ep": 3}, Layout(6, 2, 3, 3)),
        ({"world": 8, "tp": 8, "ep": 1}, Layout(8, 8, 1, 1)),
    ],
)
def test_defaults(arguments: dict[str, int], expected: Layout) -> None:
    assert Layout.of(**arguments) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"world": 6, "tp": 4},
        {"world": 6, "dp": 4},
        {"world": 6, "ep": 4},
        {"world": 6, "tp": 2, "dp": 2},
        {"world": 6, "tp": 0},
        {"world": 6, "ep": -1},
    ],
)
def test_what_does_not_divide_is_refused_with_the_choices(arguments: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="tp1 dp6, tp2 dp3, tp3 dp2, tp6 dp1; each with ep one of 1, 2, 3, 6"):
        Layout.of(**arguments)


@pytest.mark.parametrize(
    ("layout", "mode", "expert_tp", "lockstep"),
    [
        (Layout(4, 4, 1, 2), "tensor_parallel", 2, 4),
        (Layout(4, 2, 2, 2), "tensor_parallel", 1, 2),
        (Layout(4, 2, 2, 4), "data_parallel", 1, 4),
        (Layout(4, 1, 4, 1), "tensor_parallel", 1, 1),
        (Layout(6, 2, 3, 3), "data_parallel", 1, 6),
        (Layout(12, 6, 2, 4), "data_parallel", 1, 12),
    ],
)
def test_modes(layout: Layout, mode: str, expert_tp: int, lockstep: int) -> None:
    assert (layout.moe_mode, layout.expert_tp, layout.lockstep) == (mode, expert_tp, lockstep)


def test_a_rank_outside_is_refused() -> None:
    with pytest.raises(LayoutError, match="rank 4 is not in 0…3"):
        Layout.of(4).at(4)
