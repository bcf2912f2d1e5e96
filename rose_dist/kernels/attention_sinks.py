"""Attention sinks, put into the result of an attention that knows none.

A sink is a further logit of each query whose value is nothing (GPT-OSS's reference, `sdpa`). The weights of the keys
alone sum to exp(lse), with the sink to exp(lse) + exp(sink), so the result shrinks by
exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse − sink).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch

HEAD_DIMS = (64, 128, 256)


def apply_sinks(attended: Tensor, lse: Tensor, sinks: Tensor, out: Tensor, factor: float = 1.0) -> None:
    """out = attended · sigmoid(lse − sink) · factor.

    Args:
        attended: [tokens, query heads, head_dim], bf16 or fp16, on a CPU also fp32, dense. head_dim: 64, 128 or 256,
            on a CPU any.
        lse: fp32 [query heads, tokens], tokens dense: the natural logarithm of the sum of a query's weights.
        sinks: fp32 [query heads].
        out: like `attended`; may be it.

    Computed in fp32, rounded once. Raises `KernelArgumentError`.
    """
    launcher = _prepare(attended, lse, sinks, out)
    tokens = attended.shape[0]
    if launcher is None:
        torch.mul(attended, (torch.sigmoid(lse.t() - sinks) * factor)[..., None], out=out)
    elif tokens:
        launch.run(launcher, out, attended, lse, lse.stride(0), sinks, out, factor, tokens)


@checks.once
def _prepare(attended: Tensor, lse: Tensor, sinks: Tensor, out: Tensor) -> jit.Launcher | None:
    """The kernel for arguments that have been checked; None on a CPU."""
    checks.shape("attended", attended, None, None, None)
    tokens, query_heads, head_dim = attended.shape
    checks.dtype("attended", attended, torch.bfloat16, torch.float16, *(() if attended.is_cuda else (torch.float32,)))
    checks.shape("lse", lse, query_heads, tokens)
    checks.dtype("lse", lse, torch.float32)
    checks.rows("lse", lse, 4)
    checks.shape("sinks", sinks, query_heads)
    checks.dtype("sinks", sinks, torch.float32)
    checks.rows("sinks", sinks, 4)
    checks.shape("out", out, *attended.shape)
    checks.dtype("out", out, attended.dtype)
    for name, tensor in (("lse", lse), ("sinks", sinks), ("out", out)):
        checks.same_device(name, tensor, attended.device)
    for name, tensor in (("attended", attended), ("out", out)):
        checks.dense(name, tensor)
    if not attended.is_cuda:
        return None
    if head_dim not in HEAD_DIMS:
        raise checks.fail("attended", f"head_dim is {head_dim}; allowed: {HEAD_DIMS}")
    from rose_dist.kernels.cute import attention_sinks as cute  # noqa: PLC0415 - it loads the compiler

    arch = launch.device(attended).arch
    vector_bytes = launch.widest(arch, attended.data_ptr(), out.data_ptr())
    return cute.launcher(arch, attended.dtype, query_heads, head_dim, vector_bytes)
