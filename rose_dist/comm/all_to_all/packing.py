"""The arithmetic that all CPU implementations share: checking, ordering rows by expert, and the weighted sum."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rose_dist.comm.all_to_all.protocol import AllToAllConfig, Routing
from rose_dist.kernels.quantize import quantize

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

_SUM_ELEMENTS = 1 << 18
"""Elements of the products that `weighted_sum` holds at once."""


def check_dispatch(
    config: AllToAllConfig,
    x: torch.Tensor,
    routing: Routing,
    scales: torch.Tensor | None,
    rows: torch.Tensor | int | None,
) -> int:
    """The number of live rows. Raises `ValueError` for whatever construction doesn't allow."""
    check_shapes(config, x, routing, scales)
    return check_live(x.shape[0], rows)


def check_shapes(config: AllToAllConfig, x: torch.Tensor, routing: Routing, scales: torch.Tensor | None) -> None:
    """Raise `ValueError` for shapes or dtypes that construction doesn't allow."""
    tokens = x.shape[0]
    if tokens > config.max_tokens:
        raise ValueError(f"{tokens} tokens are more than the {config.max_tokens} that this all-to-all was built for")
    _expect("x", x, (tokens, config.hidden), config.given_dtype)
    _expect("routing.ids", routing.ids, (tokens, config.top_k), torch.int32)
    _expect("routing.weights", routing.weights, (tokens, config.top_k), torch.float32)
    if (scales is not None) != (config.given_scales > 0):
        raise ValueError(
            f"built for {config.given_scales} scales a row, but scales are {'' if scales is None else 'not '}None"
        )
    if scales is not None:
        _expect("scales", scales, (tokens, config.scale_dim), config.scale_dtype)


def travelling(
    config: AllToAllConfig, x: torch.Tensor, scales: torch.Tensor | None, live_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows and scales as they travel: quantised if the configuration says so. live_rows: as for `quantize`."""
    if config.quantized is None:
        return x, scales
    return quantize(x, config.quantized, live_rows=live_rows)


def check_live(tokens: int, rows: torch.Tensor | int | None) -> int:
    """The number of live rows of `tokens`, read on the host."""
    live = tokens if rows is None else int(rows)
    if not 0 <= live <= tokens:
        raise ValueError(f"rows is 0 to the {tokens} rows of x, got {live}")
    return live


def check_combine(config: AllToAllConfig, expert_out: torch.Tensor, rows: int) -> None:
    _expect("expert_out", expert_out, (rows, config.hidden), config.expert_dtype)


def check_out(config: AllToAllConfig, out: torch.Tensor, tokens: int) -> None:
    if out.shape != (tokens, config.hidden):
        raise ValueError(f"out is {[tokens, config.hidden]}, got {list(out.shape)}")


def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {list(shape)} of {dtype}, got {list(tensor.shape)} of {tensor.dtype}")


@dataclass(frozen=True)
class Packing:
    """Rows ordered by expert, then by token, then by place in the top k."""

    tokens: Int64Array
    """[rows], the token that each packed row is of."""
    slots: Int64Array
    """[tokens, top_k], the packed row of each pair; −1 if it has none."""
    counts: Int64Array
    """[experts], rows of each."""

    @classmethod
    def of(cls, routing: Routing, live: int, num_experts: int, experts: range) -> Packing:
        """Of the first `live` tokens, the pairs that name one of `experts`, consecutive ids.

        Raises `ValueError` for ids outside −1 … num_experts − 1.
        """
        ids = routing.ids[:live].numpy()
        bins = ids.ravel().astype(np.int64) + 1  # bin 0 holds the skipped ones
        if bins.size and bins.view(np.uint64).max() > num_experts:
            raise ValueError(f"expert ids are −1 to {num_experts - 1}, got {ids.min()} to {ids.max()}")
        sizes = np.bincount(bins, minlength=num_experts + 1)
        counts = sizes[experts.start + 1 : experts.stop + 1]
        before = int(sizes[: experts.start + 1].sum())
        order = bins.argsort(kind="stable")[before : before + int(counts.sum())]
        slots = np.full(bins.size, -1, np.int64)
        slots[order] = np.arange(order.size)
        return cls(order // ids.shape[1], slots.reshape(ids.shape), counts)


def starts(counts: Int64Array) -> Int64Array:
    """[n] counts to [n + 1] offsets: where each part starts, and the total."""
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def weighted_sum(rows: torch.Tensor, slots: Int64Array, weights: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] fp32: the sum over j of weights[:, j] · rows[slots[:, j]], in the order of j.

    `rows` [rows, hidden] of any floating dtype, `slots` [tokens, top_k] with −1 for nothing, `weights` [tokens,
    top_k] fp32. Each product and each partial sum is rounded to fp32.
    """
    tokens, top_k = slots.shape
    total = np.zeros((tokens, rows.shape[1]), np.float32)
    if rows.shape[0]:
        block = max(1, _SUM_ELEMENTS // (top_k * rows.shape[1]))
        for start in range(0, tokens, block):
            part = slice(start, start + block)
            _add_products(rows, slots[part], weights[part].numpy(), total[part])
    return torch.from_numpy(total)


def _add_products(rows: torch.Tensor, slots: Int64Array, weights: FloatArray, total: FloatArray) -> None:
    """In numpy, where a small array's operation costs a third of torch's; torch knows bf16."""
    index = torch.from_numpy(np.maximum(slots, 0).ravel())
    products: FloatArray = rows.index_select(0, index).float().numpy().reshape(*slots.shape, -1)
    products *= weights[:, :, None]
    if slots.min() < 0:
        products[slots < 0] = 0.0  # whatever row 0 holds, NaN included
    for j in range(slots.shape[1]):
        total += products[:, j]


def write_out(total: torch.Tensor, out: torch.Tensor, live: int, accumulate: bool) -> None:
    """Round the fp32 sums [live, hidden] into `out`'s first `live` rows, or add them to what stands there."""
    if accumulate:
        total = out[:live].float() + total
    out[:live].copy_(total)
