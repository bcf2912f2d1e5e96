"""The cut of decode attention's work, by a kernel that only writes down which parts its blocks take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from rose_dist.kernels import jit, ptx, vector
from rose_dist.kernels.arch import HOPPER
from rose_dist.kernels.attention_tiling import MIN_TILES, TILE
from rose_dist.kernels.cute.split_items import Batch, Part, after, group_of_block, is_whole, run_of_block
from rose_dist.kernels.dsl import Int32, Int64, Stream, Uint32, cute
from rose_dist.kernels.paged_attention import UNLIMITED
from rose_dist.kernels.variants import WARP
from tests.kernels.emulation import Emulator

WORDS = 8
"""Of a part that is written down, as in `Taken` and its run's end."""


@dataclass(frozen=True)
class WriteDown(jit.Kernel):
    """Into `parts` [blocks, most + 1, WORDS], a block's parts one after another; −1 behind the last."""

    @cute.jit
    def __call__(
        self, lengths: Int64, parts: Int64, live_rows: Int64, blocks: Int32, most: Int32, requests: Int32,
        window: Int32, most_splits: Int32, groups: Int32, stream: Stream,
    ) -> None:  # fmt: skip
        self.kernel(lengths, parts, live_rows, most, requests, window, most_splits, groups).launch(
            grid=[blocks, 1, 1], block=[WARP, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, lengths: Int64, parts: Int64, live_rows: Int64, most: Int32, requests: Int32, window: Int32,
        most_splits: Int32, groups: Int32,
    ) -> None:  # fmt: skip
        batch = Batch(lengths, requests, vector.live_rows(live_rows, requests), window, most_splits, groups)
        part, end = run_of_block(batch)
        at = parts + Int64(cute.arch.block_idx()[0]) * (most + 1) * (WORDS * 4)
        row, length, split, place, begin, upto = part.values
        while row >= 0:
            current = Part(row, length, split, place, begin, upto)
            whole = vector.select(is_whole(batch, current, end), Int32(1), Int32(0))
            self.write(at, [row, length, split, place])
            self.write(at + 16, [begin, upto, whole, end])
            at += WORDS * 4
            row, length, split, place, begin, upto = after(batch, current, end).values
        self.write(at, [row, group_of_block(batch), length, length])
        self.write(at + 16, [length, length, length, end])

    @cute.jit
    def write(self, at: Int64, values: list[Int32]) -> None:
        if cute.arch.thread_idx()[0] == 0:
            ptx.store_16b(at, tuple(Uint32(value) for value in values))


@dataclass(frozen=True)
class Taken:
    """A part as a block has it."""

    request: int
    length: int
    split: int
    place: int
    begin: int
    end: int
    whole: int


@dataclass(frozen=True)
class Run:
    group: int
    parts: list[Taken]
    end: int


@dataclass(frozen=True)
class Case:
    lengths: list[int]
    live: int
    window: int
    most_splits: int
    groups: int
    teams: int

    def length(self, request: int) -> int:
        return self.lengths[request] if request < self.live else 0

    def seen(self, request: int) -> int:
        """Tiles of keys that are seen, from that of the first such key on."""
        length = self.length(request)
        keys = range(max(0, length - self.window), length)
        return len({key // TILE for key in keys[:: TILE - 1]} | {key // TILE for key in keys[-1:]})

    def splits(self, request: int) -> int:
        return max(1, min(self.seen(request) // MIN_TILES, self.most_splits))

    @property
    def total(self) -> int:
        return sum(max(1, self.seen(request)) for request in range(len(self.lengths)))


@pytest.fixture(scope="module")
def gpu() -> Emulator:
    return Emulator(HOPPER, 132)


def cut(gpu: Emulator, case: Case) -> list[Run]:
    """What each block takes."""
    most = sum(case.splits(request) for request in range(len(case.lengths)))
    blocks = case.teams * case.groups
    parts = gpu.tensor(torch.full((blocks, most + 1, WORDS), -2, dtype=torch.int32))
    lengths = gpu.tensor(torch.tensor(case.lengths, dtype=torch.int32))
    live = gpu.tensor(torch.tensor([case.live], dtype=torch.int32))
    gpu.run(
        WriteDown(HOPPER), lengths, lengths, parts, live, blocks, most, len(case.lengths), case.window,
        case.most_splits, case.groups,
    )  # fmt: skip
    runs = []
    for written in gpu.plain(parts).tolist():
        count = next(i for i, values in enumerate(written) if values[0] == -1)
        assert all(values[7] == written[count][7] for values in written[:count])
        runs.append(Run(written[count][1], [Taken(*values[:7]) for values in written[:count]], written[count][7]))
    return runs


def check(case: Case, runs: list[Run]) -> None:
    """Whatever the lengths are."""
    for group in range(case.groups):
        own = [run for run in runs if run.group == group]
        assert len(own) == case.teams
        check_parts(case, [part for run in own for part in run.parts])
        check_runs(case, own)


def check_parts(case: Case, parts: list[Taken]) -> None:
    """All parts of all requests, one after another, with every tile once."""
    names = [(part.request, part.split) for part in parts]
    assert names == [(r, split) for r in range(len(case.lengths)) for split in range(case.splits(r))]
    place = 0
    for request in range(len(case.lengths)):
        own, seen = [part for part in parts if part.request == request], case.seen(request)
        assert all(part.place == place and part.length == case.length(request) for part in own)
        assert [tile for part in own for tile in range(part.begin, part.end)] == list(range(seen))
        sizes = [part.end - part.begin for part in own]
        assert max(sizes) - min(sizes) <= 1
        place += max(1, seen)


def check_runs(case: Case, runs: list[Run]) -> None:
    """Equal ones for at least fifteen sixteenths of the teams, with the parts that begin in them."""
    borders = [0, *(run.end for run in runs)]
    used = [b - a for a, b in pairwise(borders) if a < case.total]
    assert sum(used) == case.total
    assert max(used) - min(used) <= 1
    assert len(used) >= min(case.total, math.ceil(case.teams * 15 / 16))
    for begin, run in zip(borders, runs, strict=False):
        assert all(begin <= part.place + part.begin < run.end for part in run.parts)
        for part in run.parts:
            last = (case.splits(part.request) - 1) * max(1, case.seen(part.request)) // case.splits(part.request)
            assert part.whole == (part.split == 0 and part.place + last < run.end)


LENGTHS = st.one_of(st.integers(0, 40), st.integers(0, 700), st.sampled_from([0, 1, 16, 128, 129, 144, 145, 1024]))
CASES = st.builds(
    Case,
    lengths=st.one_of(
        st.lists(LENGTHS, min_size=1, max_size=40),
        st.builds(lambda length, count: [length] * count, LENGTHS, st.integers(1, 70)),
    ),
    live=st.integers(0, 80),
    window=st.sampled_from([1, 17, 128, 130, UNLIMITED]),
    most_splits=st.sampled_from([1, 3, 8, 32]),
    groups=st.integers(1, 2),
    teams=st.integers(1, 34),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(CASES)
@example(Case([0] * 3, 3, UNLIMITED, 8, 1, 7))
@example(Case([700, 0, 1, 16, 17, 256], 6, UNLIMITED, 32, 2, 11))
@example(Case([700] * 33, 0, 128, 8, 1, 33))
def test_every_part_is_taken_once_in_equal_runs(gpu: Emulator, case: Case) -> None:
    check(case, cut(gpu, case))


@pytest.mark.parametrize("requests", [32, 64, 128, 264])
@pytest.mark.parametrize("window", [128, UNLIMITED])
def test_requests_of_one_length_have_whole_runs(gpu: Emulator, requests: int, window: int) -> None:
    """On 132 SMs: windows of 9 tiles, and keys of 16 tiles in two parts."""
    case = Case([250] * requests, requests, window, 8, 1, 132)
    runs = cut(gpu, case)
    check(case, runs)
    parts = case.splits(0)
    each = max(1, requests // 132) * parts if requests * parts > 132 else 1
    assert {len(run.parts) for run in runs if run.parts} == {each}
