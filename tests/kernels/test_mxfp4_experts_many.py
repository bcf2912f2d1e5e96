"""MXFP4 experts with many rows against float64 on the dequantised weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rose_dist.kernels import mxfp4_experts
from rose_dist.kernels.variants import EXPERT_GEMM_ROWS, Ranges
from rose_dist.kernels.warpgroup_tiling import WARPGROUP_SHAPES
from tests.kernels.expert_layer import Layer, assert_close


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("counts", "columns", "rows"),
    [
        ([70, 2], 64, 96),
        ([33, 0, 64], 160, 288),
        ([9, 0, 20, 57, 1, 33, 64, 17, 48, 3, 40, 5, 26], 224, 32),
        ([130, 112, 1, 90, 20], 160, 32),
        ([56, 3, 33], 768, 32),
    ],
    ids=str,
)
def test_many_rows_match_float64(gpu: Any, gated: bool, counts: list[int], columns: int, rows: int) -> None:
    """The prefill kernels: all of their widths, warps and a warpgroup without a tile row, blocks with several items of
    different widths and more pieces than their rings have stages.
    """
    layer = Layer(counts, columns, rows)
    assert max(counts) >= EXPERT_GEMM_ROWS
    assert_close(layer.run(gpu, gated=gated)[layer.live], layer.exact(gated=gated)[layer.live])


@pytest.mark.parametrize(
    ("counts", "columns", "stages"),
    [([1] * 4, 6, 5), ([1, 70, 2, 40, 1], 6, 4), ([3, 1, 33, 2, 1, 100, 5], 1, 4), ([1] * 4, 3, 5)],
    ids=str,
)
def test_many_rows_in_rings_that_items_do_not_divide(
    gpu: Any, counts: list[int], columns: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block with several items, some shorter than the ring."""
    if gpu.real or not gpu.info.arch.hopper:
        pytest.skip("of the kernel of warpgroups, in schedules of the interpreter")
    gpu.info = replace(gpu.info, sms=1)
    shape = replace(WARPGROUP_SHAPES.variants[-1], widths=(8, 40, 104), step_columns=1, stages=stages)
    monkeypatch.setattr(mxfp4_experts, "WARPGROUP_SHAPES", Ranges((0,), (shape,)))
    layer = Layer(counts, columns * 32, 32)
    for gpu.seed in range(2):
        got = layer.run(gpu, gated=False, most=EXPERT_GEMM_ROWS)
        assert_close(got[layer.live], layer.exact(gated=False)[layer.live])
