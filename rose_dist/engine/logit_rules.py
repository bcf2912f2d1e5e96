"""Penalties, biases and forbidden stop ids: what is done to logits before a token is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from rose_dist.engine.request import Request
from rose_dist.engine.transfer import to_device


def adjusts(request: Request) -> bool:
    """Whether `adjust` may change the request's logits."""
    sampling = request.generate.sampling
    return bool(
        sampling.repetition_penalty != 1
        or sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.logit_bias
        or request.generate.min_tokens
    )


def adjust(logits: Tensor, requests: Sequence[Request], rows: Sequence[int]) -> None:
    """Change some elements of these rows of `logits` [requests, vocabulary], in place."""
    scaled: list[tuple[int, int, float]] = []
    added: list[tuple[int, int, float]] = []
    for row in rows:
        request = requests[row]
        factor = request.generate.sampling.repetition_penalty
        if factor != 1:
            scaled += [(row, token, factor) for token in sorted(set(request.tokens))]
        added += [(row, token, value) for token, value in _additions(request)]
    if scaled:
        places, factors = _moved(scaled, logits)
        values = logits[places]
        logits[places] = torch.where(values > 0, values / factors, values * factors)
    if added:
        places, values = _moved(added, logits)
        logits.index_put_(places, values, accumulate=True)


def _additions(request: Request) -> list[tuple[int, float]]:
    sampling = request.generate.sampling
    additions = list(sampling.logit_bias.items())
    if sampling.presence_penalty or sampling.frequency_penalty:
        additions += [
            (token, -(sampling.presence_penalty + sampling.frequency_penalty * times))
            for token, times in Counter(request.output).items()
        ]
    if request.output_length < request.generate.min_tokens:
        additions += [(token, -torch.inf) for token in request.stop_ids]
    return additions


def _moved(entries: list[tuple[int, int, float]], like: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    rows, tokens, values = zip(*entries, strict=True)
    places = to_device(torch.tensor([rows, tokens]), like.device)
    return (places[0], places[1]), to_device(torch.tensor(values, dtype=like.dtype), like.device)
