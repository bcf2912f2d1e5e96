"""Collectives of a group against the same computed in one place."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rose_dist.comm.group import Group
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from tests.ranks import run_ranks

WORLDS = (1, 2, 3, 4)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(100).to(dtype)


def check_all_reduce(world: World, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
    for shape in shapes:
        parts = [values(rank, shape, dtype) for rank in range(world.size)]
        narrow = dtype in (torch.bfloat16, torch.float16)
        expected = parts[0].float() if narrow else parts[0].clone()
        for part in parts[1:]:
            expected = expected + part
        mine = parts[world.rank].clone()
        world.group.all_reduce(mine)
        assert torch.equal(mine, expected.to(dtype)), shape


@pytest.mark.mpi(4)
@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_sums_in_rank_order(n: int, dtype: torch.dtype) -> None:
    """Below and above the sizes where the algorithm changes, and odd ones; the bits must not depend on it."""
    large = [(1_100_003,)] if dtype in (torch.float32, torch.bfloat16) else []
    run_ranks(n, check_all_reduce, dtype, [(), (0, 5), (1, 2880), (2, 5761), (3, 20_001), *large])


def check_gathers(world: World, dtype: torch.dtype) -> None:
    group = world.group
    for rows in ([0] * 4, [3, 0, 1, 2], [0, 0, 0, 5], [1, 1, 1, 1]):
        counts = rows[: world.size]
        parts = [values(rank, (count, 3, 5), dtype) for rank, count in enumerate(counts)]
        expected = torch.cat(parts)
        assert torch.equal(group.all_gather_rows(parts[world.rank]), expected)
        assert torch.equal(group.all_gather_rows(parts[world.rank], counts), expected)
    root = world.size - 1
    parts = [values(rank, (2, 7), dtype) for rank in range(world.size)]
    gathered = group.gather(parts[world.rank], root)
    assert (gathered is not None) == (world.rank == root)
    for got, part in zip(gathered or [], parts, strict=False):
        assert torch.equal(got, part)
    for tensor, expected in ((parts[world.rank].clone(), parts[root]), (torch.tensor(world.rank), torch.tensor(root))):
        group.broadcast(tensor, root)
        assert torch.equal(tensor, expected)
    empty = group.gather(torch.empty(0, 7, dtype=dtype), root)
    assert empty is None or [part.shape for part in empty] == [(0, 7)] * world.size


@pytest.mark.mpi(4)
@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_gathers_and_broadcast(n: int, dtype: torch.dtype) -> None:
    run_ranks(n, check_gathers, dtype)


def check_messages(world: World) -> None:
    group = world.group
    root = world.size - 1
    for length in (0, 1, 4087, 4088, 4089, 100_000):
        data = bytes(index % 251 for index in range(length))
        assert group.broadcast_bytes(data if world.rank == root else None, root) == data
    assert group.all_reduce_max([world.rank, -world.rank, 2**62]) == [root, 0, 2**62]
    assert group.all_reduce_sum([1, world.rank, -(2**40)]) == [
        world.size,
        sum(range(world.size)),
        -(2**40) * world.size,
    ]
    assert group.all_gather_objects({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)]
    group.barrier()


@pytest.mark.mpi(4)
@pytest.mark.parametrize("n", WORLDS)
def test_bytes_and_integers(n: int) -> None:
    run_ranks(n, check_messages)


def check_all_to_all(world: World) -> None:
    counts = [[(3 * source + 5 * target) % 4 for target in range(world.size)] for source in range(world.size)]
    blocks = [
        [values(10 * source + target, (n, 6), torch.bfloat16) for target, n in enumerate(row)]
        for source, row in enumerate(counts)
    ]
    mine = torch.cat(blocks[world.rank])
    expected = torch.cat([row[world.rank] for row in blocks])
    received = torch.empty_like(expected)
    incoming = [row[world.rank] for row in counts]
    world.group.all_to_all_rows(mine, counts[world.rank], received, incoming)
    assert torch.equal(received, expected)
    received = torch.empty_like(expected)
    world.group.start_all_to_all_rows(mine, counts[world.rank], received, incoming).wait()
    assert torch.equal(received, expected)


@pytest.mark.mpi(4)
@pytest.mark.parametrize("n", WORLDS)
def test_all_to_all_rows(n: int) -> None:
    run_ranks(n, check_all_to_all)


def check_subgroups(world: World, layout: Layout) -> None:
    """P-GROUP: a group's call must not need the ranks outside it."""
    groups = world.groups(layout)
    place = groups.place
    for group, members in (
        (groups.tp, place.tp_members),
        (groups.ep, place.ep_members),
        (groups.lockstep, place.lockstep_members),
    ):
        assert (group.size, group.rank) == (len(members), list(members).index(world.rank))
        if members[0] == 0:
            tensor = torch.tensor([2.0**world.rank])
            group.all_reduce(tensor)
            assert tensor.item() == sum(2.0**rank for rank in members)
    world.group.barrier()
    groups.free()
    groups.free()


@pytest.mark.mpi(6)
@pytest.mark.parametrize(
    "layout",
    [Layout(4, 2, 2, 2), Layout(4, 2, 2, 4), Layout(4, 4, 1, 2), Layout(4, 1, 4, 2), Layout(6, 2, 3, 3)],
    ids=str,
)
def test_subgroups(layout: Layout) -> None:
    run_ranks(layout.world, check_subgroups, layout)


def check_many_groups(world: World) -> None:
    for _ in range(300):
        world.groups(Layout.of(2, tp=2)).free()


@pytest.mark.mpi(2)
def test_groups_are_given_back() -> None:
    run_ranks(2, check_many_groups)


def test_a_group_of_one_makes_no_mpi_call() -> None:
    group = Group(None)
    tensor = torch.arange(3.0)
    group.all_reduce(tensor)
    group.barrier()
    group.broadcast(tensor)
    received = torch.empty(3)
    group.all_to_all_rows(tensor, [3], received, [3])
    assert torch.equal(received, torch.arange(3.0))
    assert group.all_gather_rows(tensor) is tensor
    assert group.gather(tensor) == [tensor]
    assert group.broadcast_bytes(b"x") == b"x"
    assert group.all_reduce_max([4]) == group.all_reduce_sum([4]) == [4]


def test_layouts_and_a_world_of_one_need_no_mpi() -> None:
    program = """
import sys
import rose_dist.comm.layout
assert "torch" not in sys.modules and "mpi4py" not in sys.modules
from rose_dist.comm.world import World
with World.join() as world:
    groups = world.groups(rose_dist.comm.layout.Layout.of(1))
    assert (world.rank, world.size, world.local_rank, world.local_size, groups.ep.size) == (0, 1, 0, 1, 1)
assert "mpi4py.MPI" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
