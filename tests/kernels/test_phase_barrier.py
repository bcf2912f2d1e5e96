"""The grid barrier inside slot assignment: any grid from launch to launch, and caught when weakened."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import expert_slots
from rose_dist.kernels.arch import HOPPER
from rose_dist.kernels.cute.moe_dispatch_prefill import AssignSlots
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.peer_regions import ASSIGN_STAGE
from rose_dist.kernels.sync import REPORT_WORDS, WaitExpiredError, WaitReport
from tests.kernels.emulation import compiled, stream
from tests.ptx.errors import PtxError
from tests.ptx.machine import Machine

EXPERTS, TOP_K, TOKENS, MOST_BLOCKS = 9, 3, 70, 4
KERNEL = AssignSlots(HOPPER, EXPERTS, TOP_K, PackedLayout(), warps=1)
LONG = 1 << 40


class Assignment:
    """One emulated GPU with the buffers of slot assignment."""

    def __init__(self) -> None:
        self.machine = Machine()
        empty = lambda *shape: self.machine.empty(shape, torch.int32)  # noqa: E731
        self.slots, self.counts, self.histograms = empty(TOKENS, TOP_K), empty(EXPERTS), empty(MOST_BLOCKS, EXPERTS)
        self.offsets = self.machine.empty(EXPERTS + 1, torch.int64)
        self.barrier, self.report = self.machine.zeros(1, torch.int32), self.machine.zeros(REPORT_WORDS, torch.int32)

    def run(
        self, blocks: int, seed: int, weaken: tuple[str, str] = ("", ""), limit: int = LONG, **options: int
    ) -> bool:
        """Whether fresh routing got the right slots."""
        torch.manual_seed(seed)
        ids = self.machine.tensor(torch.randint(-1, EXPERTS, (TOKENS, TOP_K), dtype=torch.int32))
        host = compiled(KERNEL)
        addresses = (t.data_ptr() for t in (self.counts, self.offsets, self.histograms, self.barrier, self.report))
        launches = host(ids.data_ptr(), 0, self.slots.data_ptr(), 0, *addresses, limit, 0, TOKENS, blocks, 5, stream())
        if weaken[0]:
            launches = [dataclasses.replace(one, program=host.changed(*weaken)) for one in launches]
        self.machine.run(launches, seed=seed, **options)  # type: ignore[arg-type]
        slots, counts, _ = expert_slots.reference(ids, TOKENS, 0, EXPERTS, PackedLayout())
        return torch.equal(self.slots, slots) and torch.equal(self.counts, counts)


def test_any_number_of_blocks_from_launch_to_launch() -> None:
    assignment = Assignment()
    for seed, blocks in enumerate((4, 1, 3, 2, 4)):
        assert assignment.run(blocks, seed)
        assert assignment.barrier.item() & 0x7FFFFFFF == 0
    assert not assignment.report.any()


@pytest.mark.parametrize(
    "weaken",
    [
        ("red.release.gpu", "red.relaxed.gpu"),
        ("ld.acquire.gpu", "ld.relaxed.gpu"),
        ("red.release.gpu", "red.release.cta"),
    ],
)
def test_a_weakened_barrier_is_caught(weaken: tuple[str, str]) -> None:
    wrong = 0
    for seed in range(10):
        try:
            wrong += not Assignment().run(4, seed, weaken)
        except PtxError:
            wrong += 1
    assert wrong > 0


def test_a_block_that_comes_too_late_is_reported_and_nothing_is_placed_before() -> None:
    assignment = Assignment()
    assignment.run(2, 0, limit=20_000, resident=1)
    first = assignment.slots.flatten()[: TOKENS * TOP_K // 2]
    assert (first == -1).all()
    report = WaitReport({ASSIGN_STAGE: "the slot assignment"})
    report._words.copy_(assignment.report)
    with pytest.raises(WaitExpiredError, match="rank 5 waited for rank 5 in the slot assignment"):
        report.check()
