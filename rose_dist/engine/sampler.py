"""From logits to tokens. Every row is drawn by its own request's rules and seed, whatever else is in the batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rose_dist.engine.mask_worker import Masks
from rose_dist.engine.protocol import SamplingParams, TokenLogprobs
from rose_dist.engine.request import Request


@dataclass(frozen=True)
class Sampled:
    """logprobs: None unless the request asked for them."""

    token: int
    logprobs: TokenLogprobs | None = None


@torch.inference_mode()
def sample(logits: Tensor, requests: list[Request], masks: Masks | None) -> list[Sampled]:
    """Draw the next token of each request.

    Args:
        logits: fp32 [requests, vocabulary]; may be overwritten.
        masks: of the requests that have a grammar; None if none has.
    """
    logprobs = _logprobs(logits, requests)
    for row, request in zip(logits, requests, strict=True):
        _adjust(row, request)
    if masks is not None:
        masks.apply(logits)
    tokens = logits.argmax(-1).tolist()
    drawn = [i for i, request in enumerate(requests) if request.generate.sampling.temperature > 0]
    for i in drawn:
        tokens[i] = _draw(logits[i], requests[i].generate.sampling, _uniform(requests[i]))
    return [
        Sampled(token, None if row is None else _token_logprobs(row, token, request.generate.sampling.logprobs or 0))
        for token, row, request in zip(tokens, logprobs, requests, strict=True)
    ]


def _logprobs(logits: Tensor, requests: list[Request]) -> list[Tensor | None]:
    """Log probabilities of the unmodified distribution, for the rows that want them."""
    return [
        None if request.generate.sampling.logprobs is None else torch.log_softmax(row, -1)
        for row, request in zip(logits, requests, strict=True)
    ]


def _token_logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    values, ids = torch.topk(row, min(count, row.shape[0]))
    return TokenLogprobs(float(row[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))


def _adjust(row: Tensor, request: Request) -> None:
    """Penalties, bias and the stop ids that `min_tokens` forbids, in place."""
    sampling = request.generate.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(request.tokens)))
        values = row[seen]
        factor = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(request.output)
        if counts:
            times = torch.tensor(list(counts.values()), dtype=row.dtype)
            row[torch.tensor(list(counts))] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.logit_bias:
        row[torch.tensor(list(sampling.logit_bias))] += torch.tensor(list(sampling.logit_bias.values()))
    if request.stop_ids and request.output_length < request.generate.min_tokens:
        row[torch.tensor(list(request.stop_ids))] = -torch.inf


def _draw(row: Tensor, sampling: SamplingParams, uniform: float) -> int:
    """The token at `uniform` of the cumulative distribution, likeliest first, after top-k, top-p and min-p."""
    weights, ids = torch.softmax(row.double() / sampling.temperature, -1).sort(descending=True, stable=True)
    keep = row.shape[0] if sampling.top_k == 0 else min(sampling.top_k, row.shape[0])
    cumulative = weights[:keep].cumsum(0)
    if sampling.top_p < 1:
        # The fewest tokens that reach top_p of what top_k left.
        keep = min(keep, int(torch.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1)
    if sampling.min_p > 0:
        keep = min(keep, int((weights[:keep] >= sampling.min_p * weights[0]).sum()))
    drawn = int(torch.searchsorted(cumulative[:keep], uniform * cumulative[keep - 1], right=True))
    return int(ids[min(drawn, keep - 1)])


def _uniform(request: Request) -> float:
    """In [0, 1), from the request's seed and the position alone: no state, so preemption can't change it."""
    bits = np.random.Philox(key=request.seed & (1 << 64) - 1, counter=request.output_length)
    return float(np.random.Generator(bits).random())
