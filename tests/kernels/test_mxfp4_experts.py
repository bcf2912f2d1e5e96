"""MXFP4 experts against float64 on the dequantised weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_dist.kernels import mxfp4_experts
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.mxfp4 import dequantize_mxfp4
from rose_dist.kernels.mxfp4_experts import (
    ExpertLayer,
    ExpertRows,
    expert_linear,
    expert_mlp,
    expert_swiglu,
    launch_warpgroup_gemm,
)
from rose_dist.kernels.mxfp4_layout import PackedMxfp4, pack_mxfp4
from rose_dist.kernels.stream_tiling import EXPERT_SHAPES, StreamShape
from rose_dist.kernels.variants import EXPERT_GEMM_ROWS, Ranges
from rose_dist.kernels.warpgroup_tiling import WARPGROUP_SHAPES
from tests.kernels.expert_layer import LIMIT, POISON, Layer, assert_close


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("counts", "most"),
    [([1, 0, 0, 1], 1), ([0, 3, 4], 4), ([7, 8, 0, 1], 8), ([9, 17, 0, 2], 17)],
    ids=str,
)
def test_matches_float64(gpu: Any, gated: bool, counts: list[int], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a ring of two stages, so that both are used again."""
    small = tuple(replace(shape, in_flight=1) for shape in EXPERT_SHAPES.variants)
    monkeypatch.setattr(mxfp4_experts, "EXPERT_SHAPES", Ranges(EXPERT_SHAPES.starts, small))
    layer = Layer(counts, 128, 96)
    assert_close(layer.run(gpu, gated=gated, most=most)[layer.live], layer.exact(gated=gated)[layer.live])


def test_rows_between_experts_are_not_written(gpu: Any) -> None:
    layer = Layer([2, 0, 3], 96, 32, padding=2, bias=False)
    got = layer.run(gpu, gated=False)
    assert_close(got[layer.live], layer.exact(gated=False)[layer.live])
    dead = [row for row in range(got.shape[0]) if row not in layer.live]
    assert (got[dead].view(torch.int16) == POISON).all()


def test_no_rows_at_all(gpu: Any) -> None:
    layer = Layer([0, 0], 64, 32)
    assert (layer.run(gpu, gated=True, most=1).view(torch.int16) == POISON).all()
    layer.x = layer.x[:0]
    assert layer.run(gpu, gated=True, most=1).shape == (0, 16)


def test_many_experts_of_few_columns(gpu: Any) -> None:
    """More experts than a block has threads; more parts of a result than warps."""
    layer = Layer([0] * 50 + [2] + [0] * 90 + [9, 0, 1], 32, 32)
    assert_close(layer.run(gpu, gated=True, most=9)[layer.live], layer.exact(gated=True)[layer.live])


@pytest.mark.parametrize(("low", "high"), [(20, 128), (140, 254)], ids=str)
def test_every_code_and_scale_is_exact(gpu: Any, low: int, high: int) -> None:
    """Rows of one 1 pick out columns of the weights; a block with the NaN scale makes its whole output NaN."""
    layer = Layer([8], 64, 64, bias=False)
    layer.blocks[0] = torch.arange(256, dtype=torch.uint8).repeat(8).view(64, 2, 16)
    layer.scales[0] = (low + torch.arange(128) % (high - low + 1)).view(64, 2).to(torch.uint8)
    layer.scales[0, 5, 1] = 255
    layer.x = torch.eye(64)[[0, 1, 6, 7, 31, 32, 40, 63]].bfloat16()
    weights = dequantize_mxfp4(layer.blocks, layer.scales, torch.bfloat16)[0]
    wanted = weights[:, [0, 1, 6, 7, 31, 32, 40, 63]].T.clone()
    wanted[:, 5] = torch.nan
    got = layer.run(gpu, gated=False)
    assert (got[:, 5].isnan()).all()
    assert torch.equal(got[:, [i for i in range(64) if i != 5]], wanted[:, [i for i in range(64) if i != 5]])


def test_a_row_has_the_same_bits_in_any_batch(gpu: Any) -> None:
    layer = Layer([17, 3], 192, 64)
    whole = layer.run(gpu, gated=True)
    for shape_start in EXPERT_SHAPES.starts[1:]:
        few = shape_start
        part = Layer([few, 0], 192, 64)
        part.blocks, part.scales, part.bias, part.x = layer.blocks, layer.scales, layer.bias, layer.x[:few]
        assert torch.equal(part.run(gpu, gated=True), whole[:few])


def test_a_row_has_the_same_bits_in_copies_of_any_size(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, results = Layer([2, 0, 3], 192, 64), []
    for steps in (1, 3):
        shape = StreamShape(warps=2, steps=steps, in_flight=6600, rows=4, buffers=1)
        monkeypatch.setattr(mxfp4_experts, "EXPERT_SHAPES", Ranges((0,), (shape,)))
        results.append(layer.run(gpu, gated=True))
    assert torch.equal(results[0][layer.live], results[1][layer.live])


@pytest.mark.parametrize(
    ("counts", "columns", "between", "outputs", "most"),
    [
        ([1, 0, 3], 64, 64, 64, 3),
        ([1, 0, 0, 1], 64, 64, 32, 1),
        ([0, 1], 32, 32, 192, 1),
        ([0, 1], 32, 32, 32, 1),
        ([7, 8, 0, 1], 64, 64, 96, 8),
        ([9, 17, 0, 2], 64, 64, 64, 17),
        ([0, 0], 64, 64, 64, 1),
        ([2] * 9 + [0, 1], 32, 32, 64, 2),
        ([1, 0, 3], 192, 96, 64, 3),
        ([1, 0, 0, 1], 192, 96, 32, 1),
        ([7, 8, 0, 1], 96, 192, 96, 8),
        ([0, 0, 1], 288, 96, 64, 1),
    ],
    ids=str,
)
def test_both_layers_in_one_launch(
    gpu: Any, counts: list[int], columns: int, between: int, outputs: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as one after the other; twice, since the meeting leaves its counter as it found it. With few tiles
    some blocks have items of one layer only, or none. Slices of experts have other columns in each layer.
    """
    small = tuple(replace(shape, in_flight=1, warps=3) for shape in EXPERT_SHAPES.variants)
    if columns == between:
        small = tuple(replace(shape, in_flight=1) for shape in EXPERT_SHAPES.variants)
    monkeypatch.setattr(mxfp4_experts, "EXPERT_SHAPES", Ranges(EXPERT_SHAPES.starts, small))
    first, second = Layer(counts, columns, 2 * between), Layer(counts, between, outputs)
    gate_up, down = (ExpertLayer(layer.packed(gpu), gpu.tensor(layer.bias)) for layer in (first, second))
    x, rows = gpu.tensor(first.x), first.expert_rows(gpu, most)
    wanted = gpu.plain(expert_linear(expert_swiglu(x, *gate_up, rows, limit=LIMIT), *down, rows))
    together, ran = mxfp4_experts.launch_both, []
    monkeypatch.setattr(mxfp4_experts, "launch_both", lambda *given, **named: ran.append(together(*given, **named)))
    for _ in range(2):
        got = gpu.plain(expert_mlp(x, gate_up, down, rows, limit=LIMIT))
        assert torch.equal(got[first.live], wanted[first.live])
    assert most >= EXPERT_GEMM_ROWS or len(ran) == 2
    dead = [row for row in range(got.shape[0]) if row not in first.live]
    assert (got[dead].view(torch.int16) == POISON).all()


@pytest.mark.parametrize("counts", [[1, 0, 3], [0, 1]], ids=str)
def test_what_comes_next_is_brought_into_l2(gpu: Any, counts: list[int]) -> None:
    """Every byte once, by blocks that have items."""
    if gpu.real:
        pytest.skip("a cache's content does not show there")
    first, second = Layer(counts, 64, 128), Layer(counts, 64, 64)
    gate_up, down = (ExpertLayer(layer.packed(gpu), gpu.tensor(layer.bias)) for layer in (first, second))
    ahead = gpu.tensor(torch.zeros(48, 200).bfloat16())
    expert_mlp(gpu.tensor(first.x), gate_up, down, first.expert_rows(gpu), limit=LIMIT, ahead=ahead)
    base, end = ahead.data_ptr(), 0
    spans = sorted((memory.base + offset - base, size) for memory, offset, size in gpu.machine.prefetched)
    for begin, size in spans:
        assert begin == end
        end += size
    assert end == ahead.nbytes


@pytest.mark.gpu(1)
@pytest.mark.parametrize("most", [1, 4, 8, 16, 40, 150])
def test_true_shapes(most: int) -> None:
    """GPT-OSS's layers on a GPU, apart and in one launch, against fp32 on the dequantised weights."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.manual_seed(most)
    device, hidden = torch.device("cuda", 0), 2880
    counts = torch.tensor([most, 0, max(1, most // 2), 1, 0, most], dtype=torch.int32)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.long().cumsum(0)])
    weights, dense, biases = [], [], []
    for outputs in (2 * hidden, hidden):
        blocks = torch.randint(0, 256, (6, outputs, hidden // 32, 16), dtype=torch.uint8, device=device)
        scales = torch.randint(112, 120, (6, outputs, hidden // 32), device=device).to(torch.uint8)
        weights.append(pack_mxfp4(blocks, scales))
        dense.append(dequantize_mxfp4(blocks, scales, torch.float32))
        biases.append(torch.randn(6, outputs, device=device).bfloat16())
    x = torch.randn(int(ends[-1]), hidden, device=device).bfloat16()
    rows = ExpertRows(counts.to(device), ends.to(device), most)
    for _ in range(3):
        h = expert_swiglu(x, weights[0], biases[0], rows, limit=LIMIT)
        y = expert_linear(h, weights[1], biases[1], rows)
        both = expert_mlp(x, ExpertLayer(weights[0], biases[0]), ExpertLayer(weights[1], biases[1]), rows, limit=LIMIT)
        assert most >= EXPERT_GEMM_ROWS or torch.equal(both, y)
        y = both
    for expert in range(6):
        part = slice(int(ends[expert]), int(ends[expert + 1]))
        gate_up = x[part].float() @ dense[0][expert].T + biases[0][expert].float()
        gate, linear = gate_up[:, 0::2].clamp(max=LIMIT), gate_up[:, 1::2].clamp(-LIMIT, LIMIT)
        wanted_h = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
        wanted_y = h[part].float() @ dense[1][expert].T + biases[1][expert].float()
        for got, wanted in ((h[part], wanted_h), (y[part], wanted_y)):
            if got.numel():
                assert (got.float() - wanted).norm() <= 2e-2 * wanted.norm()
                assert (got.float() - wanted).abs().max() <= 2e-2 * wanted.abs().max()


def test_cpu_reference_matches_float64() -> None:
    layer = Layer([3, 0, 5], 64, 96)
    rows = ExpertRows(layer.counts, layer.offsets, 5)
    packed = pack_mxfp4(layer.blocks, layer.scales)
    assert_close(expert_swiglu(layer.x, packed, layer.bias, rows, limit=LIMIT), layer.exact(gated=True))
    assert_close(expert_linear(layer.x, packed, layer.bias, rows), layer.exact(gated=False))
    none = ExpertRows(torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), 1)
    assert expert_swiglu(layer.x, packed, None, none, limit=LIMIT).shape == (8, 48)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 96).bfloat16()}, "x: shape"),
        ({"x": torch.zeros(4, 64).half()}, "x: dtype is torch.float16"),
        ({"counts": torch.zeros(3, dtype=torch.int32)}, "rows.counts: shape"),
        ({"counts": torch.zeros(2, dtype=torch.int64)}, "rows.counts: dtype"),
        ({"offsets": torch.zeros(2, dtype=torch.int32)}, "rows.offsets: dtype"),
        ({"offsets": torch.zeros(5, dtype=torch.int64)}, "rows.offsets: shape"),
        ({"bias": torch.zeros(2, 32).bfloat16()}, "bias: shape"),
        ({"bias": torch.zeros(2, 64)}, "bias: dtype"),
    ],
)
def test_bad_arguments(gpu: Any, change: dict[str, torch.Tensor], message: str) -> None:
    good = {
        "x": torch.zeros(4, 64).bfloat16(), "counts": torch.zeros(2, dtype=torch.int32),
        "offsets": torch.zeros(3, dtype=torch.int64), "bias": torch.zeros(2, 64).bfloat16(),
    }  # fmt: skip
    given = {name: gpu.tensor(t) for name, t in {**good, **change}.items()}
    packed = PackedMxfp4.empty(2, 64, 64)
    weight = PackedMxfp4(*(gpu.tensor(t) for t in (packed.data, packed.rescale, packed.tops)))
    with pytest.raises(KernelArgumentError, match=message):
        expert_linear(given["x"], weight, given["bias"], ExpertRows(given["counts"], given["offsets"], 1))


@pytest.mark.parametrize("room", [5000, 33000])
def test_room_for_many_more_rows_than_are_expected(gpu: Any, room: int) -> None:
    """As after an exchange whose peers may have sent a whole prompt's: segments of so few rows could not be listed."""
    up, down = Layer([2, 0, 1], 64, 64), Layer([2, 0, 1], 32, 64)
    x = torch.full((room, 64), float("nan")).bfloat16()
    x[: len(up.x)] = up.x
    layers = [ExpertLayer(layer.packed(gpu), gpu.tensor(layer.bias)) for layer in (up, down)]
    got = gpu.plain(expert_mlp(gpu.tensor(x), *layers, up.expert_rows(gpu, 1), limit=LIMIT))[up.live]
    wanted = down.exact(up.exact(gated=True).bfloat16(), gated=False)[up.live]
    assert (got.double() - wanted).abs().max() <= 2e-2 * wanted.abs().max()


def test_too_many_rows_or_columns(gpu: Any) -> None:
    def zeros(columns: int) -> PackedMxfp4:
        packed = PackedMxfp4.empty(1, 32, columns)
        return PackedMxfp4(*(gpu.tensor(torch.zeros_like(t)) for t in (packed.data, packed.rescale, packed.tops)))

    few, wide = zeros(32), zeros(720 * 32)
    counts, offsets = gpu.tensor(torch.zeros(1, dtype=torch.int32)), gpu.tensor(torch.zeros(2, dtype=torch.int64))
    x, layer = gpu.tensor(torch.zeros(196608, 32).bfloat16()), ExpertLayer(few, None)
    for most in (1, 100):
        with pytest.raises(KernelArgumentError, match=f"x: has 196608 rows; at most {1023 * 64}"):
            expert_linear(x, few, None, ExpertRows(counts, offsets, most))
    if gpu.info.arch.hopper:
        groups = x.view(-1, 4, 8, 8)
        with pytest.raises(KernelArgumentError, match=f"x: has 196608 rows; at most {1023 * 160}"):
            launch_warpgroup_gemm(
                groups, layer, ExpertRows(counts, offsets, 100), x, WARPGROUP_SHAPES.variants[-1], gated=False,
                alpha=0.0, limit=0.0,
            )  # fmt: skip
    with pytest.raises(KernelArgumentError, match="columns, which take"):
        expert_linear(gpu.tensor(torch.zeros(1, 720 * 32).bfloat16()), wide, None, ExpertRows(counts, offsets, 1))
