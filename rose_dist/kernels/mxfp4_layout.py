"""MXFP4 weights in the order in which the kernels read them: a thread's 16 bytes are its part of a tensor core operand.

A matrix [rows, columns] is cut into tiles of 32 rows by 32 columns, a scale block each, and a tile takes `TILE_BYTES`:

- 512 bytes of codes, 16 for each lane of a warp. Lane 4g + q holds of rows 2g, 2g + 1, 2g + 16 and 2g + 17 of the tile
  a word each: columns 2q and 2q + 1 of every 8, as tensor cores want them. As the left operand of `mma.m16n8k16`, the
  first two rows are its rows g and g + 8, so both meet in one thread's results: a gate and its linear part, or two
  neighbouring outputs.
- 32 bytes of scales, a word for each g, a byte for each of these four rows.

In a word the four pairs of codes have their bits where a shift or two bring both into the sign, the two
lowest exponent bits and the highest mantissa bit of two bfloat16: the codes' values times 2^−126, exactly. `_FIELDS`
says which bits. A scale byte is the exponent field of the bfloat16 2^(s − 1) by which these are multiplied.

Tiles are ordered by rows, then columns, so that a tile row, all columns of 32 rows, is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rose_dist.kernels import checks
from rose_dist.kernels.mxfp4 import BLOCK, SCALE_NAN

TILE_ROWS = 32
CODE_BYTES = TILE_ROWS * BLOCK // 2
TILE_BYTES = CODE_BYTES + TILE_ROWS
EXPONENT_BIAS = 126
"""A stored scale byte is s + 126: 2^(s − 127) · 2^126 as the exponent field of a bfloat16."""
MAX_SCALE = 128
"""Largest scale byte whose product with 2^126 is a finite bfloat16."""

_FIELDS = ((0, 1, 2, 9), (4, 5, 6, 13), (10, 11, 12, 19), (14, 7, 8, 15))
"""Where the even code of each pair has its mantissa bit, exponent bits (low, high) and sign in the word. The odd
code's are 16 further, modulo 32."""


@dataclass(frozen=True)
class PackedMxfp4:
    """MXFP4 matrices of experts in the kernels' order."""

    data: Tensor
    """uint8 [experts, rows / 32, columns / 32, 544]."""
    rescale: Tensor
    """fp32 [experts]: a power of two by which results are multiplied; 1 unless an expert has scales above 2."""
    tops: Tensor
    """uint8 [experts, rows / 32, 32]: the largest stored scale byte of each row, in the order of a tile's."""

    @classmethod
    def empty(cls, experts: int, rows: int, columns: int, device: torch.device | str = "cpu") -> PackedMxfp4:
        """Room for so many matrices, to be filled by `store`. Raises `KernelArgumentError`."""
        checks.multiple("rows", rows, TILE_ROWS, "a tile has 32 rows")
        checks.multiple("columns", columns, BLOCK, "a scale belongs to 32 columns")
        data = torch.empty(experts, rows // TILE_ROWS, columns // BLOCK, TILE_BYTES, dtype=torch.uint8, device=device)
        tops = torch.empty(experts, rows // TILE_ROWS, TILE_ROWS, dtype=torch.uint8, device=device)
        return cls(data, torch.ones(experts, dtype=torch.float32, device=device), tops)

    @property
    def experts(self) -> int:
        return self.data.shape[0]

    @property
    def rows(self) -> int:
        return self.data.shape[1] * TILE_ROWS

    @property
    def columns(self) -> int:
        return self.data.shape[2] * BLOCK

    def store(self, expert: int, blocks: Tensor, scales: Tensor) -> None:
        """Take one expert's matrix: blocks uint8 [rows, columns / 32, 16], scales uint8 [rows, columns / 32].

        Packed on the device that the arguments are on. Raises `KernelArgumentError` for other shapes, and where an
        expert's scales span more than 2^128.
        """
        checks.dtype("blocks", blocks, torch.uint8)
        checks.dtype("scales", scales, torch.uint8)
        checks.shape("scales", scales, self.rows, self.columns // BLOCK)
        checks.shape("blocks", blocks, self.rows, self.columns // BLOCK, BLOCK // 2)
        codes, exponents, shift = _fit_scales(blocks, scales)
        self.data[expert].copy_(_arrange(codes, exponents))
        self.rescale[expert] = 2.0**shift
        self.find_tops(expert)

    def find_tops(self, expert: int) -> None:
        """Make an expert's `tops` those of its `data`, which `store` does too."""
        self.tops[expert] = self.data[expert, :, :, CODE_BYTES:].amax(1)

    def load(self, expert: int) -> tuple[Tensor, Tensor]:
        """The blocks and scales that `store` was given, on this tensor's device.

        Blocks with the NaN scale have zero codes. Where `rescale` is not 1, blocks of zeros may have another scale.
        """
        tiles, blocks = self.data.shape[1:3]
        words = self.data[expert, :, :, :CODE_BYTES].contiguous().view(torch.int32)
        words = words.view(tiles, blocks, 8, 4, 2, 2).permute(0, 4, 2, 5, 1, 3)
        exponents = self.data[expert, :, :, CODE_BYTES:].reshape(tiles, blocks, 8, 2, 2).permute(0, 3, 2, 4, 1)
        exponents = exponents.reshape(self.rows, blocks).int()
        shift = int(self.rescale[expert].log2())
        scales = torch.where(exponents == SCALE_NAN, SCALE_NAN, exponents - EXPONENT_BIAS + shift)
        codes = _codes_of_words(words).transpose(-2, -1)
        return codes.reshape(self.rows, blocks, BLOCK // 2), scales.to(torch.uint8)


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> PackedMxfp4:
    """blocks uint8 [experts, rows, columns / 32, 16] and scales uint8 [experts, rows, columns / 32], as `store`."""
    checks.shape("blocks", blocks, None, None, None, BLOCK // 2)
    experts, rows, groups, _ = blocks.shape
    packed = PackedMxfp4.empty(experts, rows, groups * BLOCK, blocks.device)
    for expert in range(experts):
        packed.store(expert, blocks[expert], scales[expert])
    return packed


def _fit_scales(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, int]:
    """Codes, stored exponents uint8, and by how many powers of two the scales were lowered."""
    nan = scales == SCALE_NAN
    blocks = torch.where(nan[..., None], 0, blocks)  # the stored 255 is an infinity, and 0 · ∞ is the NaN wanted
    wide = scales.int()
    live = ((blocks & 0x77) != 0).any(-1) & ~nan
    shift = max(0, int(torch.where(live, wide, 0).max()) - MAX_SCALE)
    lowered = wide - shift
    if shift and bool((live & (lowered < 0)).any()):
        raise checks.fail(
            "scales", f"of one matrix span more than 2^{MAX_SCALE}; it can't be computed with in bfloat16"
        )
    exponents = lowered.clamp(0, MAX_SCALE) + EXPONENT_BIAS
    return blocks, torch.where(nan, SCALE_NAN, exponents).to(torch.uint8), shift


def _arrange(codes: Tensor, exponents: Tensor) -> Tensor:
    """uint8 [rows, groups, 16] and [rows, groups] to [rows / 32, groups, 544]."""
    rows, groups = exponents.shape
    tiles = rows // TILE_ROWS
    # Rows are [tile, half, g, one of two neighbours].
    words = _words_of_codes(codes).view(tiles, 2, 8, 2, groups, 4).permute(0, 4, 2, 5, 1, 3).contiguous()
    ordered = exponents.view(tiles, 2, 8, 2, groups).permute(0, 4, 2, 1, 3).reshape(tiles, groups, TILE_ROWS)
    return torch.cat([words.view(torch.uint8).view(tiles, groups, CODE_BYTES), ordered], -1)


def _words_of_codes(codes: Tensor) -> Tensor:
    """uint8 [..., 16] to int32 [..., 4], of which word q has byte q of every four."""
    tables = _byte_tables().to(codes.device)
    quads = codes.reshape(*codes.shape[:-1], 4, 4).int()
    words = tables[0][quads[..., 0, :]]
    for pair in range(1, 4):
        words |= tables[pair][quads[..., pair, :]]
    return words


def _codes_of_words(words: Tensor) -> Tensor:
    """int32 [...] to uint8 [..., 4]."""
    parts = []
    for even in _FIELDS:
        positions = [*even, *((at + 16) % 32 for at in even)]
        code = torch.zeros_like(words)
        for bit, at in enumerate(positions):
            code |= ((words >> at) & 1) << bit
        parts.append(code)
    return torch.stack(parts, -1).to(torch.uint8)


@cache
def _byte_tables() -> Tensor:
    """What a byte, two codes, adds to its word, for each of the word's four bytes: int32 [4, 256]."""
    byte = torch.arange(256)
    tables = torch.zeros(4, 256, dtype=torch.int64)
    for pair, even in enumerate(_FIELDS):
        for bit, at in enumerate([*even, *((at + 16) % 32 for at in even)]):
            tables[pair] |= ((byte >> bit) & 1) << at
    return torch.where(tables >= 1 << 31, tables - (1 << 32), tables).int()
