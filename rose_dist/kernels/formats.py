"""Block-scaled number formats and the orders in which GEMM libraries want their scales.

Sources: OCP Microscaling Formats (MX) Specification v1.0 (sections 5.1-5.4, 6.3) for MXFP8 and MXFP4; DeepSeek-V3
technical report, section 3.3.2, for FP8 tiles of 1×128; NVIDIA's NVFP4 (blocks of 16, e4m3 scales, one fp32 scale a
tensor) as its Transformer Engine and TensorRT document it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIN_AMAX = 1e-10
"""Least block maximum that an fp32 scale is computed from, so that 448 / maximum stays finite."""


class Element(enum.Enum):
    """What one value is stored as."""

    E4M3 = "e4m3"
    E2M1 = "e2m1"

    @property
    def bits(self) -> int:
        return 8 if self is Element.E4M3 else 4

    @property
    def max(self) -> float:
        """Largest finite magnitude."""
        return E4M3_MAX if self is Element.E4M3 else E2M1_MAX

    @property
    def max_mantissa(self) -> int:
        """The 23 mantissa bits of max as an fp32."""
        return 0x600000 if self is Element.E4M3 else 0x400000

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)), the specification's emax."""
        return 8 if self is Element.E4M3 else 2


class Scale(enum.Enum):
    """What a block's scale is stored as."""

    FP32 = torch.float32
    E8M0 = torch.uint8
    E4M3 = torch.float8_e4m3fn

    @property
    def bytes(self) -> int:
        return self.value.itemsize


@dataclass(frozen=True)
class BlockFormat:
    """`block` consecutive values of a row share one scale; a row may end inside a block."""

    name: str
    block: int
    element: Element
    scale: Scale
    saturates: bool = False
    """E8M0 only. True: the specification's rule, 2^(floor(log2(max|x|)) − emax); scaled values in (max, 2^(emax + 1))
    clip to max. False: the least power of two that clips none, 2^ceil(log2(max|x| / max))."""

    def codes_dtype(self) -> torch.dtype:
        """float8_e4m3fn, or uint8 with two e2m1 each, the earlier in the low nibble."""
        return torch.float8_e4m3fn if self.element is Element.E4M3 else torch.uint8

    def code_columns(self, columns: int) -> int:
        """Elements of a row of codes."""
        return columns * self.element.bits // 8

    def blocks(self, columns: int) -> int:
        """Scales a row."""
        return -(-columns // self.block)

    def __str__(self) -> str:
        return self.name


FP8 = BlockFormat("fp8", 128, Element.E4M3, Scale.FP32)
FP8_UE8M0 = BlockFormat("fp8_ue8m0", 128, Element.E4M3, Scale.E8M0)
MXFP8 = BlockFormat("mxfp8", 32, Element.E4M3, Scale.E8M0, saturates=True)
MXFP4 = BlockFormat("mxfp4", 32, Element.E2M1, Scale.E8M0, saturates=True)
NVFP4 = BlockFormat("nvfp4", 16, Element.E2M1, Scale.E4M3)
FORMATS = {f.name: f for f in (FP8, FP8_UE8M0, MXFP8, MXFP4, NVFP4)}


class ScaleLayout(enum.Enum):
    """Where the scale of (row, block) stands. All are padded so that no two places coincide."""

    ROWS = "rows"
    """[rows, blocks], dense. FlashInfer's and DeepGEMM's plain order."""
    COLUMNS = "columns"
    """Block after block, each with all rows, padded to a multiple of 4: the order that DeepGEMM's tensor copies want
    for fp32 scales on Hopper."""
    PACKED_COLUMNS = "packed_columns"
    """Four consecutive blocks' bytes in one int32, words ordered as in COLUMNS: DeepGEMM's UE8M0 order on Blackwell."""
    TILES = "tiles"
    """512-byte tiles of 128 rows by 4 blocks, row r at (r % 32) · 16 + (r // 32) · 4: the order that Blackwell's
    tensor cores read, also cuBLAS's, CUTLASS's and FlashInfer's "swizzled" one."""

    def padded_blocks(self, blocks: int) -> int:
        """Blocks a row including padding; the kernel zeroes the padding's scales."""
        return blocks if self in (ScaleLayout.ROWS, ScaleLayout.COLUMNS) else _up(blocks, 4)

    def padded_rows(self, rows: int) -> int:
        """Rows including padding; its scales are never written, the values they would scale do not exist."""
        multiple = {ScaleLayout.ROWS: 1, ScaleLayout.TILES: 128}.get(self, 4)
        return -(-rows // multiple) * multiple

    def offset(self, row: Any, block: Any, rows: Any, blocks: int) -> Any:
        """Index of the scale among all, padding counted. Plain arithmetic: ints, tensors and device values alike.

        Args:
            rows: `padded_rows` of the whole tensor.
            blocks: scales a row, without padding.
        """
        if self is ScaleLayout.ROWS:
            return row * blocks + block
        if self is ScaleLayout.COLUMNS:
            return block * rows + row
        if self is ScaleLayout.PACKED_COLUMNS:
            return ((block // 4) * rows + row) * 4 + block % 4
        tile = (row // 128) * (_up(blocks, 4) // 4) + block // 4
        return tile * 512 + (row % 32) * 16 + ((row // 32) % 4) * 4 + block % 4

    def empty(self, fmt: BlockFormat, rows: int, columns: int, device: torch.device) -> torch.Tensor:
        """Unwritten scales for [rows, columns] values, in the shape that the libraries expect.

        ROWS: [rows, blocks]. COLUMNS: [rows, blocks] with strides (1, padded rows). PACKED_COLUMNS: int32
        [rows, blocks / 4 rounded up] with strides (1, padded rows). TILES: [padded rows, padded blocks], to be read
        as bytes in tile order.
        """
        blocks = fmt.blocks(columns)
        height, width = self.padded_rows(rows), self.padded_blocks(blocks)
        if self is ScaleLayout.PACKED_COLUMNS:
            words = torch.empty(width // 4, height, dtype=torch.int32, device=device)
            return words.T[:rows]
        if self is ScaleLayout.COLUMNS:
            return torch.empty(width, height, dtype=fmt.scale.value, device=device).T[:rows]
        return torch.empty(height, width, dtype=fmt.scale.value, device=device)

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class BlockOutput:
    """How one kernel writes its quantised rows: a compile-time constant of the kernel."""

    fmt: BlockFormat
    layout: ScaleLayout
    columns: int
    """Values a row."""
    group_rows: int = 0
    """COLUMNS only: rows of a group that has its scales to itself, [groups, blocks, group_rows]; 0: one group."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of codes."""
        return self.columns * self.fmt.element.bits // 8

    @property
    def blocks(self) -> int:
        """Scales a row."""
        return self.fmt.blocks(self.columns)

    def place(self, row: Any, block: Any, padded_rows: Any) -> Any:
        """Index of a scale among all; `padded_rows` as `ScaleLayout.padded_rows` gives them, without groups."""
        if not self.group_rows:
            return self.layout.offset(row, block, padded_rows, self.blocks)
        inside = self.layout.offset(row % self.group_rows, block, self.group_rows, self.blocks)
        return row // self.group_rows * (self.group_rows * self.blocks) + inside

    def lanes(self, count: int) -> int:
        """Lanes that share a block when each holds `count` values."""
        return max(self.fmt.block // count, 1)

    def __str__(self) -> str:
        return f"{self.fmt}/{self.layout}" + (f"/{self.group_rows}" if self.group_rows else "")


def _up(n: Any, multiple: int) -> Any:
    return (n + multiple - 1) // multiple * multiple
