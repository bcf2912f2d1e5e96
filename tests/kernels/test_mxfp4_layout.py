"""The kernels' order of MXFP4 weights: nothing is lost, and each bit is where the kernels look for it."""

from __future__ import annotations

import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.mxfp4 import dequantize_mxfp4
from rose_dist.kernels.mxfp4_layout import CODE_BYTES, TILE_BYTES, PackedMxfp4, pack_mxfp4


def random_mxfp4(*shape: int, low: int = 100, high: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return blocks, torch.randint(low, high + 1, shape, dtype=torch.int32).to(torch.uint8)


def as_kernel(packed: PackedMxfp4, expert: int) -> torch.Tensor:
    """[rows, columns] float64, computed as the kernels do: shifts, masks, the scale's exponent, the rescaling."""
    tiles, groups = packed.data.shape[1:3]
    out = torch.zeros(packed.rows, packed.columns, dtype=torch.float64)
    for tile in range(tiles):
        for group in range(groups):
            raw = packed.data[expert, tile, group]
            words = raw[:CODE_BYTES].view(torch.int32).view(8, 4, 4).long() & 0xFFFFFFFF
            for g in range(8):
                for i in range(4):
                    row = 32 * tile + 16 * (i // 2) + 2 * g + i % 2
                    scale = (raw[CODE_BYTES + 4 * g + i].int() << 7).to(torch.int16).view(torch.bfloat16).double()
                    for q in range(4):
                        values = codes_to_bf16(int(words[g, q, i])).double() * scale
                        out[row, 32 * group : 32 * group + 32].view(4, 4, 2)[:, q] = values.view(4, 2)
    return out * packed.rescale[expert].double()


def codes_to_bf16(word: int) -> torch.Tensor:
    """The eight values of a word times 2^−126, as bfloat16."""
    rotated = (word >> 4 | word << 28) & 0xFFFFFFFF
    mask = 0x81C081C0
    pairs = [word << 6 & mask, word << 2 & mask, rotated & mask, word & 0x81808180 | word >> 8 & 0x00400040]
    halves = [half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)]
    return torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("shape", [(1, 32, 1), (3, 64, 2), (2, 96, 5)])
def test_round_trip_is_exact(shape: tuple[int, int, int]) -> None:
    blocks, scales = random_mxfp4(*shape, low=0)
    packed = pack_mxfp4(blocks, scales)
    assert packed.data.shape == (shape[0], shape[1] // 32, shape[2], TILE_BYTES)
    assert packed.data.numel() == blocks.numel() + scales.numel()
    assert (packed.rescale == 1).all()
    for expert in range(shape[0]):
        got_blocks, got_scales = packed.load(expert)
        assert (got_blocks == blocks[expert]).all()
        assert (got_scales == scales[expert]).all()


def test_kernel_arithmetic_gives_every_code_and_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).repeat(8).view(1, 64, 2, 16)
    scales = torch.arange(128, dtype=torch.uint8).view(1, 64, 2) + 1
    exact = dequantize_mxfp4(blocks, scales, torch.float32)[0].double()
    assert (as_kernel(pack_mxfp4(blocks, scales), 0) == exact).all()


@pytest.mark.parametrize("highest", [129, 200, 254])
def test_scales_beyond_bfloat16_are_lowered_and_results_raised(highest: int) -> None:
    blocks, scales = random_mxfp4(1, 32, 2, low=highest - 60, high=highest)
    scales[0, 0, 0] = highest
    blocks[0, 5, 1] = 0x80
    scales[0, 5, 1] = 0
    packed = pack_mxfp4(blocks, scales)
    assert packed.rescale[0] == 2.0 ** (highest - 128)
    exact = dequantize_mxfp4(blocks, scales.clamp(max=250), torch.float32)[0].double()
    if highest <= 250:
        assert (as_kernel(packed, 0) == exact).all()
    got_blocks, got_scales = packed.load(0)
    scales[0, 5, 1] = got_scales[5, 1]
    assert (got_blocks == blocks[0]).all()
    assert (got_scales == scales[0]).all()


def test_nan_blocks_stay_nan() -> None:
    blocks, scales = random_mxfp4(1, 32, 2)
    scales[0, 3, 1] = 255
    packed = pack_mxfp4(blocks, scales)
    got = as_kernel(packed, 0)
    assert got[3, 32:].isnan().all()
    assert got.isnan().sum() == 32
    got_blocks, got_scales = packed.load(0)
    assert got_scales[3, 1] == 255
    assert dequantize_mxfp4(got_blocks, got_scales)[3, 32:].isnan().all()


def test_too_wide_a_span_is_refused() -> None:
    blocks, scales = random_mxfp4(1, 32, 2, low=60, high=60)
    scales[0, 0, 0] = 254
    with pytest.raises(KernelArgumentError, match="span more"):
        pack_mxfp4(blocks, scales)


@pytest.mark.parametrize(
    ("rows", "columns", "message"), [(48, 32, "rows: is 48"), (32, 40, "columns: is 40"), (0, 32, "rows: is 0")]
)
def test_sizes_that_are_no_whole_tiles(rows: int, columns: int, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        PackedMxfp4.empty(1, rows, columns)


def test_other_shapes_are_refused() -> None:
    packed = PackedMxfp4.empty(2, 64, 64)
    blocks, scales = random_mxfp4(64, 2)
    with pytest.raises(KernelArgumentError, match="scales: shape"):
        packed.store(0, blocks, scales[:, :1])
    with pytest.raises(KernelArgumentError, match="blocks: dtype"):
        packed.store(0, blocks.int(), scales)
