"""Drawing a batch's tokens on the GPU with one kernel: what it needs to know of each request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.draw import bits
from rose_dist.engine.request import Request
from rose_dist.engine.transfer import ToHost, to_device
from rose_dist.kernels.draw import NO_DRAW, DrawRule, draw, fits, fits_columns, rule_words, workspace
from rose_dist.kernels.host_copy import tell_host


class DeviceDraw:
    """Draws into `sampled`, int64 [most rows]: what the next step takes its tokens from."""

    def __init__(self, sampled: Tensor, columns: int) -> None:
        self.sampled = sampled
        locked = sampled.device.type == "cuda"
        self._told = [torch.zeros(len(sampled), dtype=torch.int64, pin_memory=locked) for _ in range(2)]
        here = sampled.is_cuda and fits_columns(columns)
        self._space = workspace(len(sampled), columns, sampled.device) if here else None
        self._requests: list[Request] = []
        self._words = rule_words([])
        self._seeds = np.zeros(0, np.uint64)

    @property
    def serves(self) -> bool:
        """Whether a step of this vocabulary can draw its own tokens."""
        return self._space is not None

    def fits(self, logits: Tensor) -> bool:
        """Whether the kernel takes them."""
        return self._space is not None and fits(logits)

    def rules(self, requests: Sequence[Request]) -> npt.NDArray[np.int64]:
        """int64 [4, requests]: for their next tokens, see `kernels.draw.draw`."""
        if self._requests != requests:
            self._requests = list(requests)
            chosen = [request.generate.sampling for request in requests]
            self._words = rule_words([DrawRule(s.temperature, s.top_k, s.top_p, s.min_p) for s in chosen])
            self._seeds = np.array([request.seed & (1 << 64) - 1 for request in requests], np.uint64)
        positions = np.array([request.output_length for request in requests], np.uint64)
        return np.concatenate((self._words, bits(self._seeds, positions).view(np.int64)[None]))

    def draw(self, logits: Tensor, rules: Tensor) -> Tensor:
        """Tokens for logits [rows, vocabulary] by `rules` [4, rows], both on the GPU; int64 [rows], in `sampled`."""
        assert self._space is not None
        tokens = self.sampled[: len(logits)]
        draw(logits, rules, tokens, self._space)
        return tokens

    def next_told(self) -> int:
        """The address of the host's memory that the next decode step writes its tokens to. Two take turns: the step
        before may still do so, and the one before that has been read.
        """
        self._told.reverse()
        return self._told[0].data_ptr()

    def tell(self, rows: int, place: Tensor) -> None:
        """Have the step write the tokens of so many rows there; `place`, int64 [1] on the GPU, holds the address."""
        tell_host(self.sampled[:rows], place)

    def told(self, rows: int) -> ToHost:
        """What the last decode step has drawn."""
        return ToHost.written(self._told[0][:rows], self.sampled.device)

    def warm_up(self, logits: Tensor) -> None:
        """Load the kernel for such logits, if there is one."""
        if self.fits(logits):
            self.draw(logits, torch.from_numpy(NO_DRAW).to(logits.device).repeat(1, len(logits)))

    def draw_for(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """The same for the requests behind the rows."""
        return self.draw(logits, to_device(torch.from_numpy(self.rules(requests)), logits.device))
