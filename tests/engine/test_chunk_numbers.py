"""Chunks of prompts as numbers on the device, against what the planners make of the same step."""

from __future__ import annotations

import torch

from rose_dist.engine.chunk_numbers import MOST_KEYS, MOST_SEQUENCES, takes
from rose_dist.engine.paged_planner import PagedPlanner
from rose_dist.engine.pass_numbers import PassArrays, PassNumbers
from rose_dist.engine.step import SequenceStep
from rose_dist.engine.step_inputs import StepInputs
from rose_dist.engine.token_numbers import TokenNumbers
from rose_dist.layers.attention_work import PagedChunks
from rose_dist.layers.forward_batch import KVGroup

GROUPS = (KVGroup((0,), None, 1, 8), KVGroup((1,), 20, 1, 8))
CPU = torch.device("cpu")


def chunk(tokens: int, start: int, first: int = 0) -> SequenceStep:
    """Blocks of 16 in no order."""
    blocks = [(7 * i + start + first) % 64 for i in range(-(-(start + tokens) // 16))]
    return SequenceStep([1] * tokens, start, [(0, blocks), (0, blocks[::-1])], True)


def test_they_are_what_planners_make_of_a_step() -> None:
    sequences = [chunk(5, 3), chunk(2, 40), chunk(33, 16, 5)]
    assert takes(sequences, GROUPS)
    memory = torch.full((PassNumbers.nbytes(2, 48),), 255, dtype=torch.uint8)
    held = PassNumbers.laid_out(memory, 2, 48)
    PassArrays.of(held).fill(sequences, GROUPS, 16, [4, 6, 39])
    assert held.wanted[:3].tolist() == [4, 6, 39]
    assert torch.equal(held.tokens.tensor[:4], torch.from_numpy(TokenNumbers.array(sequences, 2, 16, 48))[:4])
    assert held.tokens.live.tolist() == [40]
    numbers = held.chunks
    for number, group in enumerate(GROUPS):
        planner = PagedPlanner(number, group.window, 16, group.storage(64, torch.bfloat16, CPU), StepInputs(CPU), None)
        (planned,) = planner.plan(sequences, torch.zeros(40)).work
        work = numbers.work(number, 64, group.window)
        assert isinstance(planned, PagedChunks)
        assert isinstance(planned.slots, torch.Tensor)
        assert isinstance(work.slots, torch.Tensor)
        assert work.shape is not None
        assert work.shape.tolist() == [len(sequences), planned.most_queries]
        assert torch.equal(work.query_starts[:4], planned.query_starts)
        assert torch.equal(work.key_starts[:4], planned.key_starts)
        assert torch.equal(work.slots[: len(planned.slots)], planned.slots)
        assert work.window == planned.window


def test_what_whole_passes_do_not_serve() -> None:
    assert not takes([chunk(1, 30), chunk(5, 0)], GROUPS)
    assert not takes([chunk(2, 0)] * (MOST_SEQUENCES + 1), GROUPS)
    assert takes([chunk(2, 0)] * MOST_SEQUENCES, GROUPS)
    assert not takes([chunk(2, MOST_KEYS - 1)], GROUPS)
    assert takes([chunk(2, MOST_KEYS - 2)], GROUPS)
