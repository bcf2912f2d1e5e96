"""CuTeDSL kernels through their compiled host code: launch parameters are caught, the PTX runs, values are compared bit for bit."""

import cuda.bindings.driver as cuda
import cutlass
import pytest
import torch
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream

from tests.ptx.cutedsl import Compiled, compile_kernel
from tests.ptx.machine import Machine

STREAM = cuda.CUstream(0)
EPS = 1e-6


class RowNorm:
    """RMS norm of bf16 rows, `hidden // vector` lanes a row, in the order in which the reference below adds."""

    def __init__(self, hidden: int, vector: int) -> None:
        self.vector = vector
        self.lanes = hidden // vector
        self.hidden = hidden
        self.threads = 128
        self.rows = self.threads // self.lanes

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, eps: Float32, stream: cuda.CUstream):
        grid = (x.shape[0] + self.rows - 1) // self.rows
        self.kernel(x, w, y, eps).launch(grid=[grid, 1, 1], block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, eps: Float32):
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        row, lane = bid * self.rows + tid // self.lanes, tid % self.lanes
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), BFloat16, num_bits_per_copy=16 * self.vector)
        if row < x.shape[0]:
            source, target = (cute.local_tile(t[row, None], (self.vector,), (lane,)) for t in (x, y))
            weight = cute.local_tile(w, (self.vector,), (lane,))
            values, weights, result = (cute.make_rmem_tensor(source.shape, BFloat16) for _ in range(3))
            cute.copy(atom, source, values)
            cute.copy(atom, weight, weights)
            wide = values.load().to(Float32)
            total = (wide * wide).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            for i in cutlass.range_constexpr(self.lanes.bit_length() - 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=self.lanes >> (i + 1))
            scale = cute.math.rsqrt(total / Float32(self.hidden) + eps)
            result.store(((wide * scale).to(BFloat16).to(Float32) * weights.load().to(Float32)).to(BFloat16))
            cute.copy(atom, result, target)


def reference(x: torch.Tensor, w: torch.Tensor, vector: int) -> torch.Tensor:
    """The same sums in the same order: fused in f64 within a lane, then a butterfly over lanes."""
    wide = x.float().reshape(len(x), -1, vector)
    total = torch.zeros(wide.shape[:2])
    for i in range(vector):
        total = (wide[..., i].double() ** 2 + total.double()).float()
    step = total.shape[1] // 2
    while step:
        total = total + total[:, torch.arange(total.shape[1]) ^ step]
        step //= 2
    mean = (total[:, :1].double() * (1 / x.shape[1]) + torch.tensor(EPS).double()).float()
    scale = (1 / mean.double().sqrt()).float()
    return ((x.float() * scale).bfloat16().float() * w.float()).bfloat16()


@pytest.fixture(scope="module", params=[("sm_90a", 128, 8), ("sm_100a", 256, 16)], ids=["sm_90a", "sm_100a"])
def row_norm(request: pytest.FixtureRequest) -> tuple[Compiled, int, int]:
    arch, hidden, vector = request.param
    rows, align = cute.sym_int32(), 2 * vector
    matrix = make_fake_compact_tensor(BFloat16, (rows, hidden), stride_order=(1, 0), assumed_align=align)
    weight = make_fake_compact_tensor(BFloat16, (hidden,), assumed_align=align)
    function = RowNorm(hidden, vector)
    return compile_kernel(function, matrix, weight, matrix, Float32(EPS), make_fake_stream(), arch=arch), hidden, vector


@pytest.mark.parametrize("rows", [1, 3, 8, 127])
def test_row_norm_is_bit_exact(row_norm: tuple[Compiled, int, int], rows: int) -> None:
    compiled, hidden, vector = row_norm
    machine = Machine()
    generator = torch.Generator().manual_seed(rows)
    x = machine.tensor(torch.randn(rows, hidden, generator=generator).bfloat16(), name="x")
    w = machine.tensor(torch.rand(hidden, generator=generator).bfloat16(), name="w")
    y = machine.empty((rows, hidden), torch.bfloat16, name="y", check_unwritten=True)

    def matrix(t: torch.Tensor) -> object:
        return from_dlpack(t, assumed_align=2 * vector).mark_compact_shape_dynamic(mode=0, stride_order=(0, 1))

    weight = from_dlpack(w, assumed_align=2 * vector)
    launches = compiled(matrix(x), weight, matrix(y), EPS, STREAM)
    assert launches[0].grid == (-(-rows // (128 * vector // hidden)), 1, 1)
    machine.run(launches, seed=rows)
    assert torch.equal(y.view(torch.int16), reference(x, w, vector).view(torch.int16))


def test_widest_vectors_of_each_arch(row_norm: tuple[Compiled, int, int]) -> None:
    compiled, _, vector = row_norm
    assert f"ld.global.v{vector // 2}.b32" in compiled.ptx


class Empty:
    """Host code that launches twice, with a grid it computes and a parameter of each size."""

    @cute.jit
    def __call__(self, out: cute.Tensor, count: Int32, stream: cuda.CUstream):
        self.kernel(out, count).launch(grid=[count * 2, 1, 1], block=[32, 1, 1], stream=stream)
        self.kernel(out, count + 1).launch(
            grid=[1, count, 1], block=[64, 1, 1], stream=stream, smem=1024, cooperative=True
        )

    @cute.kernel
    def kernel(self, out: cute.Tensor, count: Int32):
        if cute.arch.thread_idx()[0] == 0:
            out[0] = count


def test_all_launches_of_the_host_function_are_caught() -> None:
    compiled = compile_kernel(
        Empty(), make_fake_compact_tensor(Int32, (1,), assumed_align=4), Int32(0), make_fake_stream()
    )
    machine = Machine()
    out = machine.zeros(1, torch.int32)
    first, second = compiled(from_dlpack(out, assumed_align=4), 3, STREAM)
    assert (first.grid, first.block, first.cooperative) == ((6, 1, 1), (32, 1, 1), False)
    assert (second.grid, second.block, second.cooperative, second.dynamic_shared) == ((1, 3, 1), (64, 1, 1), True, 1024)
    machine.run([first, second])
    assert out.item() == 4
