"""A step's arrays go to the device in few copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rose_dist.engine.paged_planner import PagedPlanner
from rose_dist.engine.step import SequenceStep
from rose_dist.engine.step_inputs import ROOM, StepInputs
from rose_dist.layers.attention_work import PagedChunks
from rose_dist.layers.forward_batch import KVStorage

CPU = torch.device("cpu")


class Remote(StepInputs):
    """The device's memory is the host's too."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0))
        self.rooms: list[int] = []

    def _room(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.rooms.append(size)
        host, there = (torch.full((size,), 255, dtype=torch.uint8) for _ in range(2))
        return host, there


SHAPES = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 9000)), max_size=9)


@given(SHAPES, SHAPES)
def test_all_arrays_arrive(first: Any, second: Any) -> None:
    inputs = Remote()
    arrived = []
    for shapes in (first, second):
        arrays = [
            np.random.default_rng(0).integers(0, 99, (rows, columns)).astype(np.int64 if wide else np.int32)
            for wide, rows, columns in shapes
        ]
        arrived += [(inputs.put(array), array) for array in arrays]
        inputs.send()
        for tensor, array in arrived:
            assert tensor.data_ptr() % 8 == 0
            assert tensor.dtype == torch.from_numpy(array).dtype
            assert np.array_equal(tensor.numpy(), array)
    assert sum(inputs.rooms) <= 2 * ROOM + 2 * sum(max(array.nbytes, 32) for _, array in arrived)


def test_one_copy_for_a_prompt_of_some_thousand_tokens() -> None:
    inputs = Remote()
    storage = KVStorage(*torch.zeros(2, 1, 8193, 1, 8))
    put = [np.arange(4000) for _ in range(2)]
    held = [inputs.put(array) for array in put]
    blocks = list(range(256))[::-1]
    step = [SequenceStep([1] * 4000, 0, [(0, blocks)] * 2, True)]
    groups = [PagedPlanner(i, window, 16, storage, inputs, None).plan(step) for i, window in enumerate((None, 128))]
    inputs.send()
    assert inputs.rooms == [ROOM]
    assert all(np.array_equal(tensor.numpy(), array) for tensor, array in zip(held, put, strict=True))
    for group in groups:
        (work,) = group.work
        assert isinstance(work, PagedChunks)
        assert isinstance(work.slots, torch.Tensor)
        assert torch.equal(work.slots, group.slots)
        assert group.slots.tolist() == [16 * blocks[i // 16] + i % 16 for i in range(4000)]


@pytest.mark.parametrize(
    ("blocks", "window", "expected"),
    [
        ([3, 4, 5], None, slice(48, 88)),
        ([3, 4, 5], 16, slice(57, 88)),
        ([3, 5, 4], None, None),
        ([3, 5, 4, 6], None, None),
        ([3, 5, 6], 16, None),
        ([9, 5, 6], 9, slice(80, 104)),
    ],
)
def test_slots_that_follow_one_another(blocks: list[int], window: int | None, expected: slice | None) -> None:
    """All but 8 tokens that the blocks hold; 24 of them have been computed."""
    end = 16 * len(blocks) - 8
    planner = PagedPlanner(0, window, 16, KVStorage(*torch.zeros(2, 1, 257, 1, 8)), StepInputs(CPU), None)
    (work,) = planner.plan([SequenceStep([1] * (end - 24), 24, [(0, blocks)], True)]).work
    assert isinstance(work, PagedChunks)
    first = 24 - 15 if window == 16 else 24 - 8 if window == 9 else 0
    slots = [16 * blocks[i // 16] + i % 16 for i in range(first, end)]
    assert work.key_starts.tolist() == [0, len(slots)]
    if expected is None:
        assert isinstance(work.slots, torch.Tensor)
        assert work.slots.tolist() == slots
    else:
        assert work.slots == expected
        assert list(range(expected.start, expected.stop)) == slots
