"""Expert choice: router logits become the k experts of every token and their weights."""

from __future__ import annotations

import torch
from torch import Tensor


def topk_softmax(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of a token, weighted by the softmax over those k alone (GPT-OSS).

    Args:
        logits: [tokens, experts].
        k: experts a token, 1 ≤ k ≤ experts.

    Returns:
        ids: int32 [tokens, k], best first.
        weights: fp32 [tokens, k], each row sums to 1.
    """
    values, ids = torch.topk(logits, k, dim=-1)
    return ids.to(torch.int32), torch.softmax(values.float(), dim=-1)
