"""DeepGEMM's grouped GEMMs as they are on Hopper, in torch: what they demand, what they read, what they overwrite.

The demands are those of sgl-deep-gemm 0.1.5.post1 (its host code, and what its tensor copies need), and one of this
project's own: activations' scales come in the order that the kernel reads, or else it would order them in one more
launch. What the kernel computes from anything becomes NaN here.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = TILE = 128


class DeepGemmError(RuntimeError):
    """What DeepGEMM's host code, or a tensor copy, would fail with."""


class EmulatedDeepGemm:
    """`calls` names the functions that were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, grouped_layout: Tensor, *,
        use_psum_layout: bool = False, expected_m_for_psum_layout: int | None = None,
    ) -> None:  # fmt: skip
        self.calls.append("contiguous" if use_psum_layout else "contiguous by rows")
        (codes, scales), (weight, weight_scales) = map(plain, a), map(plain, b)
        d, grouped_layout = plain(d), plain(grouped_layout)
        (rows, inputs), (groups, outputs, _) = sizes(codes, 2), sizes(weight, 3)
        check_product(codes, weight, d, (rows, outputs), inputs)
        demand(grouped_layout.is_contiguous() and grouped_layout.dtype == torch.int32, "grouped_layout: dense int32")
        demand(tuple(grouped_layout.shape) == ((groups,) if use_psum_layout else (rows,)), "grouped_layout's length")
        demand(use_psum_layout or expected_m_for_psum_layout is None, "expected_m is for ends only")
        check_scales(scales, (rows, ceil(inputs)), None)
        check_weight_scales(weight_scales, groups, outputs, inputs)
        if use_psum_layout:
            start = 0
            for group, end in enumerate(grouped_layout.tolist()):
                up = -(-end // TILE) * TILE
                demand(start <= end and up <= rows, f"ends {grouped_layout.tolist()} of {rows} rows")
                d[start:end] = product(codes[start:end], scales[start:end], weight[group], weight_scales[group])
                d[end:up] = torch.nan
                start = up
            return
        demand(rows % TILE == 0, f"{rows} rows are no whole tiles")
        for start in range(0, rows, TILE):
            tile = slice(start, start + TILE)
            d[tile] = 0
            groups_named = set(grouped_layout[tile].tolist()) - {-1}
            demand(len(groups_named) <= 1, "a tile of two experts")
            for group in groups_named:
                d[tile] = product(codes[tile], scales[tile], weight[group], weight_scales[group])

    def m_grouped_fp8_fp4_gemm_nt_masked(
        self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, masked_m: Tensor, expected_m: int
    ) -> None:
        self.calls.append("masked")
        (codes, scales), (weight, weight_scales) = map(plain, a), map(plain, b)
        d, masked_m = plain(d), plain(masked_m)
        (groups, rows, inputs), (_, outputs, _) = sizes(codes, 3), sizes(weight, 3)
        demand(weight.shape[0] == groups and masked_m.numel() == groups, "groups of a, b and masked_m")
        check_product(codes, weight, d, (groups, rows, outputs), inputs)
        demand(masked_m.is_contiguous() and masked_m.dtype == torch.int32, "masked_m: dense int32")
        demand(expected_m > 0, "expected_m above 0")
        # The last tile of a group is written whole: it must not reach into the next group.
        demand(rows % TILE == 0, f"{rows} rows a group are no whole tiles")
        check_scales(scales, (groups, rows, ceil(inputs)), rows)
        check_weight_scales(weight_scales, groups, outputs, inputs)
        for group, count in enumerate(masked_m.tolist()):
            demand(0 <= count <= rows, f"masked_m {count} of {rows} rows")
            if count:
                d[group, :count] = product(
                    codes[group, :count], scales[group, :count], weight[group], weight_scales[group]
                )
                d[group, count : -(-count // TILE) * TILE] = torch.nan


def product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """fp32 sums, block by block of inputs; [rows, outputs]."""
    outputs, inputs = weight.shape
    total = torch.zeros(codes.shape[0], outputs)
    for block in range(ceil(inputs)):
        part = slice(block * BLOCK, min((block + 1) * BLOCK, inputs))
        by_output = weight_scales[:, block].repeat_interleave(BLOCK)[:outputs]
        total += (codes[:, part].float() @ weight[:, part].float().T) * scales[:, block, None] * by_output
    return total.bfloat16()


def check_product(codes: Tensor, weight: Tensor, d: Tensor, shape: tuple[int, ...], inputs: int) -> None:
    for name, tensor in (("a", codes), ("b", weight), ("d", d)):
        if tensor.dim() == 3:
            demand(tensor.stride(0) == tensor.shape[1] * tensor.shape[2], f"{name}'s groups stand side by side")
        demand(tensor.stride(-1) == 1, f"{name}'s rows are dense")
        demand(tensor.stride(-2) * tensor.element_size() % 16 == 0, f"{name}'s rows start at multiples of 16 bytes")
        demand(tensor.data_ptr() % 16 == 0, f"{name} starts at a multiple of 16 bytes")
    demand(codes.dtype == weight.dtype == torch.float8_e4m3fn, "a and b are e4m3")
    demand(d.dtype == torch.bfloat16, "d is bf16")
    demand(weight.shape[2] == inputs, "inputs of a and b")
    demand(tuple(d.shape) == shape, f"d is {shape}")
    demand(min(*weight.shape, *shape[1:]) > 0 and weight.shape[1] % 8 == 0, "outputs are a multiple of 8")


def check_scales(scales: Tensor, shape: tuple[int, ...], group_rows: int | None) -> None:
    demand(scales.dtype == torch.float32, "a's scales are fp32")
    demand(tuple(scales.shape) == shape, f"a's scales are {shape}, not {tuple(scales.shape)}")
    aligned = -(-shape[-2] // 4) * 4
    demand(scales.stride(-1) == aligned and scales.stride(-2) == 1, f"a's scales by columns, not {scales.stride()}")
    if group_rows is not None:
        demand(scales.stride(0) == aligned * shape[-1], "a's scales of groups stand side by side")
    demand(scales.data_ptr() % 16 == 0, "a's scales start at a multiple of 16 bytes")


def check_weight_scales(scales: Tensor, groups: int, outputs: int, inputs: int) -> None:
    demand(scales.dtype == torch.float32, "b's scales are fp32")
    demand(tuple(scales.shape) == (groups, ceil(outputs), ceil(inputs)), f"b's scales are {tuple(scales.shape)}")
    demand(scales.is_contiguous(), "b's scales are dense")


def sizes(tensor: Tensor, dimensions: int) -> tuple[int, ...]:
    demand(tensor.dim() == dimensions, f"{tensor.dim()} dimensions instead of {dimensions}")
    return tuple(tensor.shape)


def ceil(values: int) -> int:
    return -(-values // BLOCK)


def demand(met: bool, what: str) -> None:
    if not met:
        raise DeepGemmError(what)


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself without an emulated GPU's disguise."""
    return tensor.as_subclass(torch.Tensor)
