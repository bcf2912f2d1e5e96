"""MoE combine on one GPU: each token's result is the weighted sum of its experts' rows, in registers.

out[t] = Σ_j weights[t, j] · (rows[slots[t, j]] + bias[ids[t, j]]), added up in the order of j. Each product and each
partial sum is rounded to fp32, so the bits depend on nothing but the inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, jit, launch

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


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
    launcher = _prepare(rows, slots, weights, out, tokens, accumulate, ids, bias, live_rows)
    if tokens:
        stride = rows.stride(0)
        launch.run(launcher, out, rows, stride, slots, weights, ids, bias, first_expert, live_rows, out, tokens)


@checks.once
def _prepare(
    rows: Tensor, slots: Tensor, weights: Tensor, out: Tensor, tokens: int, accumulate: bool, ids: Tensor | None,
    bias: Tensor | None, live_rows: Tensor | None,
) -> jit.Launcher:  # fmt: skip
    _check(rows, slots, weights, out, tokens, ids, bias, live_rows)
    from rose_dist.kernels.cute import moe_combine as cute  # noqa: PLC0415 - it loads the compiler

    return cute.launcher(
        launch.device(out).arch, slots.shape[1], out.shape[1], rows.dtype, out.dtype,
        bias.dtype if bias is not None else None, accumulate,
    )  # fmt: skip


def _check(
    rows: Tensor, slots: Tensor, weights: Tensor, out: Tensor, tokens: int, ids: Tensor | None, bias: Tensor | None,
    live_rows: Tensor | None,
) -> None:  # fmt: skip
    checks.shape("rows", rows, None, None)
    checks.dtype("rows", rows, *_FLOATS)
    checks.rows("rows", rows)
    hidden = rows.shape[1]
    checks.multiple("the row size", hidden * rows.element_size(), 16, "rows are read 16 bytes at a time")
    checks.shape("out", out, None, hidden)
    checks.dtype("out", out, *_FLOATS)
    checks.same_device("out", out, rows.device)
    checks.dense("out", out)
    checks.shape("slots", slots, None, None)
    of_pairs = (("slots", slots, torch.int32), ("weights", weights, torch.float32), ("ids", ids, torch.int32))
    for name, tensor, dtype in of_pairs:
        if tensor is not None:
            checks.shape(name, tensor, None, slots.shape[1])
            checks.dtype(name, tensor, dtype)
            checks.same_device(name, tensor, rows.device)
            checks.dense(name, tensor, 4)
    for name, tensor in (("out", out), ("slots", slots), ("weights", weights), ("ids", ids)):
        if tensor is not None and len(tensor) < tokens:
            raise checks.fail(name, f"has {len(tensor)} rows, fewer than the {tokens} tokens")
    if bias is not None:
        if ids is None:
            raise checks.fail("ids", "are needed to choose each row's bias")
        checks.shape("bias", bias, None, hidden)
        checks.dtype("bias", bias, *_FLOATS)
        checks.same_device("bias", bias, rows.device)
        checks.dense("bias", bias)
    checks.live_rows(live_rows, rows.device)
