"""From logits to tokens, on the logits' device.

Every row is drawn by its own request's rules and seed, whatever else is in the batch. Nothing waits for the device
until the tokens are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rose_dist.engine.device_draw import DeviceDraw
from rose_dist.engine.draw import DrawRules
from rose_dist.engine.logit_rules import adjust, adjusts
from rose_dist.engine.mask_worker import Masks
from rose_dist.engine.protocol import TokenLogprobs
from rose_dist.engine.request import Request
from rose_dist.engine.transfer import ToHost, to_device


@dataclass(frozen=True)
class Sampled:
    """logprobs: None unless the request asked for them."""

    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Drawn:
    """What a step has drawn, on its way to the host."""

    tokens: ToHost
    logprobs: _Logprobs | None

    def result(self) -> list[Sampled]:
        """Waits for the device."""
        tokens = self.tokens.result().tolist()
        found = {} if self.logprobs is None else self.logprobs.by_row()
        return [Sampled(token, found.get(row)) for row, token in enumerate(tokens)]


class Sampler:
    def __init__(self, device_draw: DeviceDraw) -> None:
        """Tokens are left where `device_draw` leaves them."""
        self._device_draw = device_draw
        self._rules: _Rules | None = None

    def early_rules(self, requests: list[Request]) -> npt.NDArray[np.int64] | None:
        """For `ModelRunner.run`, which then draws the tokens itself; None if that needs more than their logits."""
        if any(request.grammar is not None or adjusts(request) for request in requests):
            return None
        return self._device_draw.rules(requests)

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, requests: list[Request], masks: Masks | None, *, drawn_early: bool = False
    ) -> Drawn:
        """Draw the next token of each request.

        Args:
            logits: fp32 [requests, vocabulary]; overwritten.
            masks: of the requests that have a grammar; None if none has.
            drawn_early: the tokens are there already.
        """
        if self._rules is None or self._rules.requests != requests:
            self._rules = _Rules.of(requests, logits)
        rules = self._rules
        plain = torch.log_softmax(logits[rules.logprob_rows], -1) if rules.logprob_counts else None
        if drawn_early:
            tokens = self._device_draw.sampled[: len(requests)]
        else:
            adjust(logits, requests, rules.adjusted)
            if masks is not None:
                masks.apply(logits)
            tokens = self._draw(logits, requests, rules)
        logprobs = None
        if plain is not None:
            logprobs = _Logprobs.of(plain, tokens[rules.logprob_rows], rules)
        return Drawn(self._device_draw.told(len(requests)) if drawn_early else ToHost.of(tokens), logprobs)

    def _draw(self, logits: Tensor, requests: list[Request], rules: _Rules) -> Tensor:
        if self._device_draw.fits(logits):
            return self._device_draw.draw_for(logits, requests)
        tokens = logits.argmax(-1)
        for group in rules.draws:
            tokens[group.rows] = group.draw(logits, requests)
        self._device_draw.sampled[: len(requests)] = tokens
        return tokens


@dataclass(frozen=True)
class _Rules:
    """What stays the same as long as the batch does.

    adjusted: rows whose logits are changed before drawing.
    logprob_rows: int64 [rows that want log probabilities], on the device; logprob_counts: row → how many likeliest.
    """

    requests: list[Request]
    adjusted: list[int]
    logprob_rows: Tensor
    logprob_counts: dict[int, int]

    @staticmethod
    def of(requests: list[Request], logits: Tensor) -> _Rules:
        wanted = {
            row: min(request.generate.sampling.logprobs, logits.shape[1])
            for row, request in enumerate(requests)
            if request.generate.sampling.logprobs is not None
        }
        return _Rules(
            list(requests),
            [row for row, request in enumerate(requests) if adjusts(request)],
            to_device(torch.tensor(list(wanted), dtype=torch.int64), logits.device),
            wanted,
        )

    @cached_property
    def draws(self) -> list[DrawRules]:
        """Where there is no kernel that draws."""
        return DrawRules.groups(self.requests, self.logprob_rows.device)


@dataclass(frozen=True)
class _Logprobs:
    """Of the rows in `counts`, in order."""

    counts: dict[int, int]
    chosen: ToHost
    values: ToHost
    ids: ToHost

    @staticmethod
    def of(plain: Tensor, tokens: Tensor, rules: _Rules) -> _Logprobs:
        values, ids = torch.topk(plain, max(rules.logprob_counts.values()))
        chosen = plain.gather(1, tokens[:, None])[:, 0]
        return _Logprobs(rules.logprob_counts, *map(ToHost.of, (chosen, values, ids)))

    def by_row(self) -> dict[int, TokenLogprobs]:
        columns = (copied.result().tolist() for copied in (self.chosen, self.ids, self.values))
        rows = zip(self.counts.items(), *columns, strict=True)
        return {
            row: TokenLogprobs(chosen, list(zip(ids[:count], values[:count], strict=True)))
            for (row, count), chosen, ids, values in rows
        }
