"""Steps with chunks of prompts in them, up to some thousand tokens, from CUDA graphs, for a ladder of token counts.

With few tokens the host takes longer to launch a layer's kernels than the GPU takes to run them. Attention's shapes
hang on the step, those of everything else on its number of tokens alone. So a pass is captured in pieces, cut at every
attention; a step launches a graph and its own attention layer by layer. Where our own kernel attends, a pass is
captured with attention in it too: that finds on the device what the step's chunks are (`ChunkNumbers`), and hardly any
layer waits for a launch of the host's. That serves steps of chunks alone.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rose_dist.engine import chunk_numbers
from rose_dist.engine.pass_numbers import PassNumbers, PassStaging
from rose_dist.engine.step import Step
from rose_dist.engine.token_numbers import TokenNumbers
from rose_dist.kernels.paged_prefill import own_kernel
from rose_dist.layers.attention_work import AttentionWork
from rose_dist.layers.forward_batch import ForwardBatch, GroupBatch, KVStorage
from rose_dist.models.gpt_oss import GptOssForCausalLM

logger = logging.getLogger(__name__)


class PrefillGraphs:
    """Captured once the model is there and its kernels have run; serves steps of 1 to `ladder[-1]` tokens."""

    def __init__(
        self, model: GptOssForCausalLM, storages: Sequence[KVStorage], sampled: Tensor, ladder: Sequence[int],
        block_size: int,
    ) -> None:  # fmt: skip
        """`sampled`: the tokens of the step before, see `ModelRunner`."""
        self._model, self._storages, self._sampled = model, tuple(storages), sampled
        self.ladder = tuple(sorted(ladder))
        device, rows = storages[0].keys.device, self.ladder[-1]
        self._memory = torch.zeros(PassNumbers.nbytes(len(storages), rows), dtype=torch.uint8, device=device)
        self._staging = PassStaging(len(storages), self.ladder, device)
        self._block_size = block_size
        self._groups = model.kv_groups
        self._attends = own_kernel(storages[0].keys[0])
        self._passes: dict[int, _Pass] = {}

    def rows_for(self, tokens: int) -> int | None:
        """How many rows `run` takes for so many tokens; None if it does not serve them, and before `capture`."""
        if not self._passes or not 0 < tokens <= self.ladder[-1]:
            return None
        return self.ladder[bisect_left(self.ladder, tokens)]

    @torch.inference_mode()
    def capture(self) -> None:
        """All sizes, the largest first: the smaller ones find room in its memory."""
        started, free = time.monotonic(), torch.cuda.mem_get_info()[0]
        gc.collect()
        pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for size in reversed(self.ladder):
            nothing = TokenNumbers.array((), len(self._storages), 1, size)
            self._fixed(size).tokens.tensor.copy_(torch.from_numpy(nothing))
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                self._forward(
                    size, partial(_Cut, recording=_Recording())
                )  # loads kernels and makes libraries allocate what they keep
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                self._passes[size] = self._capture(size, pool)
        torch.cuda.synchronize()
        logger.info(
            "prefill graphs of %d sizes captured in %.1f s, in %.2f GB",
            len(self._passes),
            time.monotonic() - started,
            (free - torch.cuda.mem_get_info()[0]) / 1e9,
        )

    def run(self, batch: ForwardBatch, numbers: TokenNumbers) -> Tensor | None:
        """What the model gives for `batch`: fp32 [wanted rows, vocabulary], or None on a rank without logits.

        Args:
            numbers: of the batch's tokens, `rows_for` them.
        """
        captured = self._passes[numbers.rows]
        captured.numbers.tokens.tensor.copy_(numbers.tensor)
        for graph, call in zip(captured.graphs, captured.calls, strict=False):
            graph.replay()
            for work in batch.groups[call.group].work:
                work.attend(call.q, call.keys, call.values, call.sinks, call.scale, call.out)
        captured.graphs[-1].replay()
        logits: Tensor | None = self._model.lm_head(captured.hidden[batch.logits_rows])
        return logits

    def serves_whole(self, step: Step) -> bool:
        """Whether `run_whole` takes it."""
        return self._attends and chunk_numbers.takes(step.sequences, self._groups)

    def run_whole(self, step: Step, rows: int, wanted: Sequence[int]) -> Tensor | None:
        """As `run`, for a step of chunks alone.

        Args:
            rows: `rows_for` its tokens.
            wanted: those of the step's rows whose logits are.
        """
        captured = self._passes[rows]
        assert captured.whole is not None
        staged = self._staging.next(rows)
        staged.fill(step.sequences, self._groups, self._block_size, wanted)
        self._staging.copy(staged, captured.numbers.memory)
        for graph in captured.whole.graphs:
            graph.replay()
        logits: Tensor | None = self._model.lm_head(captured.whole.hidden[captured.numbers.wanted[: len(wanted)]])
        return logits

    def _fixed(self, size: int) -> PassNumbers:
        """Where the graphs of a size read their numbers."""
        return PassNumbers.laid_out(self._memory, len(self._storages), size)

    def _forward(self, size: int, work: Callable[[int], AttentionWork]) -> Tensor:
        """work: of each KV group."""
        numbers = self._fixed(size).tokens
        groups = tuple(
            GroupBatch(storage, numbers.slots(number), (work(number),)) for number, storage in enumerate(self._storages)
        )
        batch = ForwardBatch(
            numbers.token_ids, numbers.positions, None, groups, live_rows=numbers.live, sampled=self._sampled
        )
        hidden: Tensor = self._model.model(batch)
        return hidden

    def _capture(self, size: int, pool: Any) -> _Pass:
        recording = _Capture(pool)
        recording.begin()
        try:
            hidden = self._forward(size, partial(_Cut, recording=recording))
        finally:
            recording.end()
        calls = [
            _Call(**values | {name: borrowed(values[name]) for name in ("q", "out")}) for values in recording.calls
        ]
        whole = self._capture_whole(size, pool) if self._attends else None
        return _Pass(recording.graphs, calls, self._fixed(size), borrowed(Place(hidden)), whole)

    def _capture_whole(self, size: int, pool: Any) -> _Whole:
        recording, chunks = _LongCapture(pool), self._fixed(size).chunks

        def work(number: int) -> AttentionWork:
            return _Counted(chunks.work(number, size, self._groups[number].window), recording)

        recording.begin()
        try:
            hidden = self._forward(size, work)
        finally:
            recording.end()
        return _Whole(recording.graphs, borrowed(Place(hidden)))


@dataclass(frozen=True)
class _Call:
    """A layer's attention; `q` and `out` lie in the graphs' memory, which later pieces use for other things."""

    group: int
    q: Tensor
    keys: Tensor
    values: Tensor
    sinks: Tensor
    scale: float
    out: Tensor


@dataclass(frozen=True)
class _Whole:
    """hidden: as of a `_Pass`."""

    graphs: list[torch.cuda.CUDAGraph]
    hidden: Tensor


@dataclass(frozen=True)
class _Pass:
    """
    graphs: one more than calls, which come between them.
    numbers: what the graphs read.
    hidden: [size, hidden], what the last graph leaves, until another one runs: it lies in their memory too.
    whole: the same pass with attention in its graphs, which are few.
    """

    graphs: list[torch.cuda.CUDAGraph]
    calls: list[_Call]
    numbers: PassNumbers
    hidden: Tensor
    whole: _Whole | None


class _Recording:
    """Takes the place of attention in a pass; by itself it does nothing."""

    def cut(self, **call: Any) -> None:
        return None


class _Capture(_Recording):
    """Captures a pass in pieces."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.calls: list[dict[str, Any]] = []

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.graphs.append(graph)

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def cut(self, **call: Any) -> None:
        self.end()
        # Held on to, the memory of every layer's tensors would be kept apart; only its place is needed.
        self.calls.append(call | {name: Place(call[name]) for name in ("q", "out")})
        self.begin()


class _LongCapture(_Capture):
    """Captures a pass, attention in it, in graphs of 1, 1, 2, 4, 8, … layers. An H200 began one of 36 layers 0.9 ms
    after its launch; so, each is launched while the one before runs.
    """

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self._attended = 0

    def attended(self) -> None:
        self._attended += 1
        if self._attended & (self._attended - 1) == 0:
            self.end()
            self.begin()


@dataclass(frozen=True)
class _Counted(AttentionWork):
    work: AttentionWork
    recording: _LongCapture

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, scale: float, out: Tensor) -> None:
        self.work.attend(q, keys, values, sinks, scale, out)
        self.recording.attended()


@dataclass(frozen=True)
class _Cut(AttentionWork):
    group: int
    recording: _Recording

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor, scale: float, out: Tensor) -> None:
        self.recording.cut(group=self.group, q=q, keys=keys, values=values, sinks=sinks, scale=scale, out=out)


class Place:
    """Where a bf16 tensor lies, without holding its memory."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        assert size == 2
        self.dtype = tensor.dtype
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "<i2",
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "data": (tensor.data_ptr(), False),
        }


def borrowed(place: Place) -> Tensor:
    """The tensor there."""
    return torch.as_tensor(place, device="cuda").view(place.dtype)
