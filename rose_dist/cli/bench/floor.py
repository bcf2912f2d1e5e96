"""What a decode step must read at least, and how fast this machine moves bytes."""

from __future__ import annotations

import statistics
import time

import torch

from rose_dist.models.gpt_oss import GptOssForCausalLM


def floor_bytes(model: GptOssForCausalLM, batch: int, context: int, touched: float) -> float:
    """Bytes of weights and cache that one step of `batch` tokens with `context` tokens each must read on this rank.

    `touched`: share of the experts that the tokens go to, each of which counts once; with even routing it is
    1 − (1 − top-k/experts)^batch. Of the embedding a row a token counts, activations don't.
    """
    config = model.config
    weights = 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name and not config.tie_word_embeddings:
            weights += batch * parameter.shape[1] * parameter.element_size()
        else:
            weights += parameter.nbytes * (touched if ".experts." in name else 1.0)
    dtype = model.lm_head.weight.dtype
    cache = sum(
        group.bytes_per_token(dtype) * min(context, context if group.window is None else group.window)
        for group in model.kv_groups
    )
    return weights + batch * cache


def copy_rate(device: torch.device, size: int = 4 << 30) -> float:
    """Bytes a second of a copy inside the device's memory that moves `size` bytes, read and written counted."""
    if device.type == "cpu":
        size = 1 << 28
    source = torch.randn(size // 8, device=device)
    target = torch.empty_like(source)
    samples = []
    for _ in range(12):
        synchronize(device)
        begun = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        samples.append(time.perf_counter() - begun)
    return size / statistics.median(samples[2:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
