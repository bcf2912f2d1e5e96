"""The inputs of decode steps, at fixed places on the device, so that a captured graph finds them there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.kv_cache import GroupSpec
from rose_dist.engine.step import SequenceStep, Step
from rose_dist.kernels.draw import NO_DRAW, RULE_WORDS
from rose_dist.kernels.host_copy import read_host
from rose_dist.kernels.paged_attention import DecodeWorkspace
from rose_dist.layers.attention_work import PagedDecode
from rose_dist.layers.forward_batch import ForwardBatch, GroupBatch, KVStorage


@dataclass(frozen=True)
class TableShape:
    """
    width: most blocks that a sequence has in its table.
    """

    width: int
    window: int | None
    block_size: int

    @staticmethod
    def of(spec: GroupSpec, block_size: int, max_context: int) -> TableShape:
        width = min(spec.blocks, -(-max_context // block_size))
        if spec.window is not None:
            # One block where the window begins and one where it ends.
            width = min(width, -(-spec.window // block_size) + 2)
        return TableShape(width, spec.window, block_size)


class DecodeBatch:
    """Inputs for up to `rows` sequences of one token each.

    A step writes its numbers into page-locked memory and sends them with one copy; of the block tables it sends the
    rows that have changed. Two such memories take turns: while a step fills one, the copy out of the other may still be
    under way. The step before that must have ended, which whoever reads its tokens knows.
    """

    def __init__(
        self, rows: int, shapes: Sequence[TableShape], storages: Sequence[KVStorage], sampled: Tensor,
        workspace: DecodeWorkspace | None,
    ) -> None:  # fmt: skip
        """`sampled`: the tokens of the step before, see `ModelRunner`."""
        self.rows, self.shapes, self.storages, self._sampled = rows, tuple(shapes), tuple(storages), sampled
        self._workspace = workspace
        device = sampled.device
        groups = len(self.shapes)
        # int64: token ids, positions, each group's slots, the rules of drawing, and where tokens are told. Then int32,
        # two lines in one: how many rows are live, and each group's first blocks and lengths.
        self._rule_lines = slice(2 + groups, 2 + groups + RULE_WORDS)
        self._wide_lines = self._rule_lines.stop + 1
        self._numbers = _Input((self._wide_lines + groups + 1, rows), torch.int64, device)
        changes = sum(rows * (shape.width + 1) for shape in self.shapes)
        self._changes = _Input((changes,), torch.int32, device)
        self._tables = [torch.zeros(rows, shape.width, dtype=torch.int32, device=device) for shape in self.shapes]
        self._sent: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in self.shapes]

    def forward_batch(self, size: int) -> ForwardBatch:
        """What the model takes for a batch of `size` rows; all tensors stay at their place."""
        numbers = self._numbers.device
        wide, narrow = numbers[:, :size], self._narrow(numbers)[:, :size]
        live = narrow[0, :1]
        groups = tuple(
            GroupBatch(
                storage,
                wide[2 + i],
                (
                    PagedDecode(
                        slice(0, size), table[:size], narrow[1 + 2 * i], narrow[2 + 2 * i], shape.window,
                        shape.block_size, self._workspace, live,
                    ),
                ),
            )
            for i, (shape, storage, table) in enumerate(zip(self.shapes, self.storages, self._tables, strict=True))
        )  # fmt: skip
        return ForwardBatch(wide[0], wide[1], None, groups, live_rows=live, sampled=self._sampled)

    def rules(self, size: int) -> Tensor:
        """int64 [4, size], what `fill` was given."""
        return self._numbers.device[self._rule_lines, :size]

    @property
    def told(self) -> Tensor:
        """int64 [1], what `fill` was given."""
        return self._numbers.device[self._wide_lines - 1, :1]

    def _narrow(self, numbers: Tensor) -> Tensor:
        """int32 [lines, rows], the part of the numbers that is."""
        return numbers[self._wide_lines :].view(torch.int32).view(-1, self.rows)

    def fill(self, step: Step, size: int, rules: npt.NDArray[np.int64] | None = None, told: int = 0) -> None:
        """Send a step's inputs; rows of the `size` that it does not need get token 0 and write to the spare slot.

        Args:
            rules: int64 [4, sequences], by which the step's tokens are drawn, see `DeviceDraw`; None: not at all.
            told: see `DeviceDraw.next_told`.
        """
        sequences = step.sequences
        count = len(sequences)
        wide = self._numbers.next()
        narrow = wide[self._wide_lines :].view(np.int32).reshape(-1, self.rows)
        wide[self._wide_lines - 1, 0] = told
        drawing = wide[self._rule_lines]
        drawing[:, :size] = NO_DRAW
        if rules is not None:
            drawing[:, :count] = rules
        narrow[0, 0] = count
        wide[:2, count:size] = 0
        wide[0, :count] = [sequence.tokens[0] for sequence in sequences]
        starts = np.array([sequence.start for sequence in sequences], np.int64)
        wide[1, :count] = starts
        for group, (shape, storage) in enumerate(zip(self.shapes, self.storages, strict=True)):
            first, lengths = narrow[1 + 2 * group], narrow[2 + 2 * group]
            first[:count] = [sequence.tables[group][0] for sequence in sequences]
            lengths[:count] = starts + 1
            first[count:size] = lengths[count:size] = 0
            last = [sequence.tables[group][1][-1] for sequence in sequences]
            slots = wide[2 + group]
            slots[:count] = np.array(last, np.int64) * shape.block_size + starts % shape.block_size
            slots[count:size] = storage.spare
        self._numbers.send()
        self._send_tables(sequences)

    def _send_tables(self, sequences: Sequence[SequenceStep]) -> None:
        packed, used = self._changes.next(), 0
        updates = []
        for group, (sent, shape) in enumerate(zip(self._sent, self.shapes, strict=True)):
            held = [sequence.tables[group][1] for sequence in sequences]
            rows = [row for row, blocks in enumerate(held) if sent[row] != blocks]
            if not rows:
                continue
            width = max(len(held[row]) for row in rows)
            assert width <= shape.width, f"{width} blocks in a table for {shape.width}"
            begin, used = used, used + len(rows) * (width + 1)
            packed[begin : begin + len(rows)] = rows
            lines = packed[begin + len(rows) : used].reshape(len(rows), width)
            for line, row in zip(lines, rows, strict=True):
                sent[row] = held[row]
                line[: len(held[row])] = held[row]
            updates.append((group, begin, len(rows), width))
        if updates:
            self._changes.send(used)
        for group, begin, count, width in updates:
            changes = self._changes.device[begin : begin + count * (width + 1)]
            self._tables[group][:, :width].index_copy_(0, changes[:count].long(), changes[count:].view(count, width))


class _Input:
    """A tensor on the device and the memories on the host that are sent there in turn."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        locked = device.type == "cuda"
        self._hosts = [torch.zeros(shape, dtype=dtype, pin_memory=locked) for _ in range(2)]

    def next(self) -> npt.NDArray[np.int64 | np.int32]:
        """The memory to be filled for the next `send`."""
        self._hosts.reverse()
        array: npt.NDArray[np.int64 | np.int32] = self._hosts[0].numpy()
        return array

    def send(self, count: int | None = None) -> None:
        """Copy what was filled, or its first `count` elements, in the order of the current stream."""
        if count is None and self.device.is_cuda:
            read_host(self._hosts[0], self.device)
        else:
            self.device[:count].copy_(self._hosts[0][:count], non_blocking=True)
