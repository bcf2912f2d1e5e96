"""Decode steps at a ladder of batch sizes, on a GPU as CUDA graphs."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.decode_batch import DecodeBatch
from rose_dist.engine.device_draw import DeviceDraw
from rose_dist.engine.step import Step
from rose_dist.models.gpt_oss import GptOssForCausalLM

logger = logging.getLogger(__name__)


class DecodeGraphs:
    """A step takes the next size up. Sizes that are not captured are run as they are: on a CPU all.

    On a GPU a step's tokens are drawn by the graph too, of the rows that have a rule.
    """

    def __init__(
        self, model: GptOssForCausalLM, batch: DecodeBatch, ladder: Sequence[int], device_draw: DeviceDraw
    ) -> None:
        self.batch = batch
        self._device_draw = device_draw
        self.ladder = tuple(sorted(ladder))
        self._model = model
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}

    def size_for(self, sequences: int) -> int:
        return self.ladder[bisect_left(self.ladder, sequences)]

    def run(self, step: Step, rules: npt.NDArray[np.int64] | None = None) -> Tensor | None:
        """fp32 [sequences, vocabulary]. `rules`: as for `DecodeBatch.fill`."""
        size = self.size_for(len(step.sequences))
        self.batch.fill(step, size, rules, self._device_draw.next_told())
        if size in self._graphs:
            graph, logits = self._graphs[size]
            graph.replay()
        else:
            logits = self._forward(size)
        return None if logits is None else logits[: len(step.sequences)]

    def _forward(self, size: int) -> Tensor | None:
        logits: Tensor | None = self._model(self.batch.forward_batch(size))
        if logits is not None and self._device_draw.fits(logits):
            self._device_draw.draw(logits, self.batch.rules(size))
            self._device_draw.tell(size, self.batch.told)
        return logits

    @torch.inference_mode()
    def capture(self) -> None:
        """All sizes, the largest first: the smaller ones find room in its memory."""
        started = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for size in reversed(self.ladder):
            self.batch.fill(Step(), size)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                self._forward(size)  # loads kernels and makes libraries allocate what they keep
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                logits = self._forward(size)
            self._graphs[size] = (graph, logits)
        logger.info("%d decode graphs captured in %.1f s", len(self._graphs), time.monotonic() - started)
