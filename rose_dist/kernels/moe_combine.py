"""MoE combine on one GPU: each token's result is the weighted sum of its experts' rows, in registers.

out[t] = Σ_j weights[t, j] · (rows[slots[t, j]] + bias[ids[t, j]]), added up in the order of j. Each product and each
partial sum is rounded to fp32, so the bits depend on nothing but the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, launch


def reference(
    rows: Tensor, slots: Tensor, weights: Tensor, ids: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """[tokens, hidden] fp32 in torch: `rows` [rows, hidden], `slots` int32 [tokens, k] with −1 for nothing, `weights`
    fp32 [tokens, k]; `ids` [tokens, k] count from the first row of `bias` [experts, hidden].
    """
    total = torch.zeros(slots.shape[0], rows.shape[1], device=rows.device)
    for j in range(slots.shape[1]):
        held = slots[:, j] >= 0
        values = rows[slots[held, j].long()].float()
        if bias is not None:
            assert ids is not None
            values = values + bias[ids[held, j].long()].float()
        total[held] = total[held] + weights[held, j, None] * values
    return total


def combine(
    rows: Tensor, slots: Tensor, weights: Tensor, out: Tensor, *, tokens: int, accumulate: bool = False,
    ids: Tensor | None = None, bias: Tensor | None = None, first_expert: int = 0, live_rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Write `tokens` rows of `out` [.., hidden] on the GPU, or fewer if `live_rows`, int32 [1], says so.

    Args:
        rows: [packed rows, hidden], rows 16-byte aligned.
        slots: int32 [tokens, k], each pair's row, −1 for nothing.
        weights: fp32 [tokens, k].
        accumulate: add what stands in `out` to the sum, before it is rounded.
        ids: int32 [tokens, k], needed with `bias` [experts, hidden], whose first row is of `first_expert`.
    """
    hidden, top_k = out.shape[-1], slots.shape[1]
    checks.dtype("rows", rows, torch.bfloat16, torch.float16, torch.float32)
    checks.dtype("out", out, torch.bfloat16, torch.float16, torch.float32)
    checks.rows("rows", rows)
    checks.dense("out", out)
    checks.multiple("the row size", hidden * rows.element_size(), 16, "rows are read 16 bytes at a time")
    if tokens:
        from rose_dist.kernels.cute import moe_combine as cute  # noqa: PLC0415 - it loads the compiler

        launcher = cute.launcher(
            launch.device(out).arch, top_k, hidden, rows.dtype, out.dtype, bias.dtype if bias is not None else None,
            accumulate,
        )  # fmt: skip
        stride = rows.stride(0)
        launch.run(
            launcher, out, rows, stride, slots, weights, ids, bias, first_expert, live_rows, out, tokens
        )  # fmt: skip
