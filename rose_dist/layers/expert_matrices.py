"""How the matrices of a rank's experts are held, and how a checkpoint's become that."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from rose_dist.kernels.fp8_experts import Fp8Weight
from rose_dist.kernels.mxfp4 import dequantize_mxfp4
from rose_dist.kernels.mxfp4_layout import PackedMxfp4
from rose_dist.layers.weights import parameter

MoeWeights = Literal["mxfp4", "fp8", "bf16"]
"""How the experts' matrices are held in memory: as MXFP4 blocks and scales, as e4m3 with a scale for 128 x 128 values,
or decoded to the activations' dtype.
"""
MoeActivations = Literal["bf16", "fp8"]
"""What rows the experts multiply: of the activations' dtype, or e4m3 where they are many, as `mxfp4_e4m3` says."""


class DenseMatrix(nn.Module):
    """One matrix an expert, of the activations' dtype."""

    def __init__(self, experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(experts, outputs, inputs, dtype=dtype)

    def store(self, expert: int) -> Callable[[Tensor], object]:
        """Takes the matrix as Hugging Face stores it: [1, inputs, outputs]."""
        return lambda matrix: self.weight[expert].copy_(matrix[0].T)

    def store_packed(self, expert: int) -> Callable[[Tensor, Tensor], object]:
        """Takes blocks and scales, which are decoded on the device."""
        target = self.weight[expert]

        def store(blocks: Tensor, scales: Tensor) -> None:
            target.copy_(dequantize_mxfp4(blocks[0].to(target.device), scales[0].to(target.device), target.dtype))

        return store


class PackedMatrix(nn.Module):
    """One matrix an expert, as MXFP4 in the kernels' order."""

    def __init__(self, experts: int, outputs: int, inputs: int) -> None:
        super().__init__()
        empty = PackedMxfp4.empty(experts, outputs, inputs, torch.get_default_device())
        self.data, self.rescale, self.tops = (
            nn.Parameter(t, requires_grad=False) for t in (empty.data, empty.rescale, empty.tops)
        )

    @cached_property
    def packed(self) -> PackedMxfp4:
        return PackedMxfp4(self.data, self.rescale, self.tops)

    def store(self, expert: int) -> Callable[[Tensor], object]:
        raise ValueError(
            "the checkpoint's experts are bf16 and can't be held as MXFP4; choose --moe-weights bf16 or fp8"
        )

    def store_packed(self, expert: int) -> Callable[[Tensor, Tensor], object]:
        """Takes blocks and scales, which are put in order on the device."""
        device = self.data.device
        return lambda blocks, scales: self.packed.store(expert, blocks[0].to(device), scales[0].to(device))


class Fp8Matrix(nn.Module):
    """One matrix an expert, as e4m3 with a scale for 128 x 128 values."""

    def __init__(self, experts: int, outputs: int, inputs: int) -> None:
        super().__init__()
        empty = Fp8Weight.empty(experts, outputs, inputs, torch.get_default_device())
        # As bytes, which can be moved between ranks like any others.
        self.codes = nn.Parameter(empty.codes.view(torch.uint8), requires_grad=False)
        self.scales = nn.Parameter(empty.scales, requires_grad=False)

    @property
    def weight(self) -> Fp8Weight:
        return Fp8Weight(self.codes.view(torch.float8_e4m3fn), self.scales)

    def store(self, expert: int) -> Callable[[Tensor], object]:
        """Takes the matrix as Hugging Face stores it, [1, inputs, outputs], and quantises it on the device."""
        return lambda matrix: self.weight.store(expert, matrix[0].to(self.codes.device).T)

    def store_packed(self, expert: int) -> Callable[[Tensor, Tensor], object]:
        """Takes MXFP4 blocks and scales, which are decoded and quantised on the device, one expert at a time."""
        device = self.codes.device

        def store(blocks: Tensor, scales: Tensor) -> None:
            decoded = dequantize_mxfp4(blocks[0].to(device), scales[0].to(device), torch.float32)
            self.weight.store(expert, decoded)

        return store


ExpertMatrix = DenseMatrix | PackedMatrix | Fp8Matrix


def expert_matrix(kept: MoeWeights, experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> ExpertMatrix:
    """Unwritten; `dtype` is that of the activations."""
    if kept == "mxfp4":
        return PackedMatrix(experts, outputs, inputs)
    if kept == "fp8":
        return Fp8Matrix(experts, outputs, inputs)
    return DenseMatrix(experts, outputs, inputs, dtype)
