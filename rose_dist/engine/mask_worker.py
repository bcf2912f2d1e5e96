"""Grammar masks, computed by a thread of their own while the model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose_dist.engine.grammar import GrammarCompiler, GrammarError
from rose_dist.engine.request import Request
from rose_dist.engine.transfer import to_device


@dataclass(frozen=True)
class Masks:
    """
    rows: of the logits, those whose request has a grammar.
    forbidden: bool [rows, ids].
    """

    rows: list[int]
    forbidden: Tensor

    def apply(self, logits: Tensor) -> None:
        """−inf where a grammar does not allow the token, in place."""
        forbidden = to_device(self.forbidden[:, : logits.shape[1]], logits.device)
        rows = to_device(torch.tensor(self.rows), logits.device)
        logits[rows] = logits[rows].masked_fill_(forbidden, -torch.inf)


class MaskWorker:
    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, "grammar-masks")

    def start(self, requests: Sequence[Request]) -> Future[Masks] | None:
        """Begin with the masks for the next token of `requests`; None if none of them has a grammar."""
        constrained = [row for row, request in enumerate(requests) if request.grammar is not None and not request.done]
        return self._thread.submit(self._masks, requests, constrained) if constrained else None

    def _masks(self, requests: Sequence[Request], rows: list[int]) -> Masks:
        bits = self._compiler.empty_masks(len(rows))
        grammars = [(grammar, i) for i, row in enumerate(rows) if (grammar := requests[row].grammar) is not None]
        with contextlib.suppress(GrammarError):  # the request at fault ends when it is told its token
            self._compiler.fill_masks(grammars, bits)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        return Masks(rows, torch.from_numpy(allowed == 0))
