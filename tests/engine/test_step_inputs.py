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
from rose_dist.engine.token_numbers import TokenNumbers
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
    blocks = list(range(256))[::-1]
    step = [SequenceStep([1] * 4000, 0, [(0, blocks)] * 2, True)]
    numbers = TokenNumbers(inputs.put(TokenNumbers.array(step, 2, 16, 4000)))
    groups = [
        PagedPlanner(i, window, 16, storage, inputs, None).plan(step, numbers.slots(i))
        for i, window in enumerate((None, 128))
    ]
    inputs.send()
    assert inputs.rooms == [ROOM]
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
    (work,) = planner.plan([SequenceStep([1] * (end - 24), 24, [(0, blocks)], True)], torch.empty(0)).work
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


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 2)), max_size=5), st.integers(0, 3))
def test_every_token_has_its_numbers(kinds: list[tuple[int, int, int]], spare: int) -> None:
    """By the definitions: token after token, block by block."""
    drawn = np.random.default_rng(1)
    sequences = []
    for start, count, released in sorted(kinds, key=lambda kind: kind[1] > 1):
        end = start + count
        first = min(released, start // 4)
        tables = [(at, drawn.integers(0, 99, -(-end // 4) - at).tolist()) for at in (0, first)]
        sequences.append(SequenceStep(drawn.integers(-5, 99, count).tolist(), start, tables, True))
    tokens = [(s, s.start + i, token) for s in sequences for i, token in enumerate(s.tokens)]
    numbers = TokenNumbers(torch.from_numpy(TokenNumbers.array(sequences, 2, 4, len(tokens) + spare)))
    assert numbers.token_ids.tolist() == [token for _, _, token in tokens] + [0] * spare
    assert numbers.positions.tolist() == [position for _, position, _ in tokens] + [0] * spare
    for group in range(2):
        expected = [s.tables[group][1][p // 4 - s.tables[group][0]] * 4 + p % 4 for s, p, _ in tokens]
        assert numbers.slots(group).tolist() == expected + [-1] * spare
    assert numbers.rows == 0 or numbers.live.tolist() == [len(tokens)]
