"""What bounds the expert GEMMs of warpgroups: gpt-oss-120b's first layer without one of its parts (wrong results).

python -m benchmarks.expert_gemm_parts [--tokens 1024 4096]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.experts import LAYERS, LIMIT, MODELS, Layer, per_layer, routed
from benchmarks.graphs import table
from benchmarks.kernel_builds import build
from rose_dist.kernels import jit, launch, ptx
from rose_dist.kernels.cute.e4m3_operands import magnitudes
from rose_dist.kernels.cute.mxfp4_experts_e4m3 import E4m3ExpertGemm
from rose_dist.kernels.cute.mxfp4_experts_warpgroup import WarpgroupExpertGemm
from rose_dist.kernels.dsl import T, Uint32, dsl_user_op
from rose_dist.kernels.e4m3_tiling import E4M3_SHAPES
from rose_dist.kernels.inline_asm import asm
from rose_dist.kernels.mxfp4 import BLOCK
from rose_dist.kernels.mxfp4_experts import ExpertRows, launch_grouped
from rose_dist.kernels.mxfp4_layout import TILE_BYTES
from rose_dist.kernels.row_groups import GroupedRows, group_rows
from rose_dist.kernels.swiglu import ALPHA
from rose_dist.kernels.warp_matrix import merge, permute, permute_by, upper_half
from rose_dist.kernels.warpgroup_tiling import WARPGROUP_SHAPES, WarpgroupTiling


class Undecoded:
    """Left operands are bits of the codes as they are."""

    def decode(self, codes: Any, part: int, firsts: list[Any], left: Any) -> None:
        own: Any = self
        each = own.words // 4
        for half, at in own.halves(part):
            for i in range(2):
                for k in range(each):
                    left[2 * each * at + 2 * k + i] = codes[2 * half + i] & Uint32(0x33333333 >> k)


class Unmultiplied:
    """Left operands are only added up."""

    def multiply(self, right: Any, number: int, left: Any, sums: Any, width: int) -> None:
        own: Any = self
        for i in range(own.words // own.tiling.parts):
            sums[i] = sums[i] + ptx.from_bits(Uint32(left[i]) & Uint32(0x3FFFFFFF))


@dataclass(frozen=True)
class Fp8Undecoded(Undecoded, E4m3ExpertGemm):
    pass


@dataclass(frozen=True)
class Fp8Unmultiplied(Unmultiplied, E4m3ExpertGemm):
    pass


@dataclass(frozen=True)
class Bf16Undecoded(Undecoded, WarpgroupExpertGemm):
    pass


@dataclass(frozen=True)
class Bf16Unmultiplied(Unmultiplied, WarpgroupExpertGemm):
    pass


@dsl_user_op
def shift_right(word: Any, by: int, *, loc: Any = None, ip: Any = None) -> Any:
    """By a multiplication, whose upper half it is."""
    text = f"mul.hi.u32 $0, $1, {1 << (32 - by):#x};"
    return Uint32(asm(text, "=r,r", T.i32(), Uint32(word), volatile=False, loc=loc, ip=ip))


@dataclass(frozen=True)
class Fp8ShiftedByProducts(E4m3ExpertGemm):
    """Right results: shifts to the right are multiplications."""

    both = False

    def decode(self, codes: Any, part: int, firsts: list[Any], left: Any) -> None:
        for half, at in self.halves(part):
            for i in range(2):
                row = 2 * half + i
                low, high = magnitudes(codes[4], row, firsts[row])
                word = Uint32(codes[row])
                by_two = shift_right(word, 2) if self.both else word >> Uint32(2)
                others = merge(by_two, shift_right(word, 10), 0x00600060)
                places = permute(word, others, 0x6420) & Uint32(0x77777777)
                first, second = permute_by(low, high, places), permute_by(low, high, upper_half(places))
                first |= merge(by_two, word << Uint32(2), 0x00FF00FF) & Uint32(0x80808080)
                second |= permute(word << Uint32(4), word, 0x7052) & Uint32(0x80808080)
                left[4 * at + i], left[4 * at + 2 + i] = first, second


@dataclass(frozen=True)
class Fp8AllShiftedByProducts(Fp8ShiftedByProducts):
    both = True


FP8 = (E4m3ExpertGemm, Fp8Undecoded, Fp8Unmultiplied, Fp8ShiftedByProducts, Fp8AllShiftedByProducts)
KERNELS: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("bf16 56", WARPGROUP_SHAPES.variants[1], (WarpgroupExpertGemm, Bf16Undecoded, Bf16Unmultiplied)),
    ("bf16 160", WARPGROUP_SHAPES.variants[3], (WarpgroupExpertGemm, Bf16Undecoded, Bf16Unmultiplied)),
    (
        "fp8 64",
        E4M3_SHAPES.variants[0],
        FP8,
    ),
    (
        "fp8 160",
        E4M3_SHAPES.variants[1],
        FP8,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=(1024, 4096))
    tokens = parser.parse_args().tokens
    layers = [Layer.random(MODELS["gpt-oss-120b"]) for _ in range(LAYERS)]
    weight = layers[0].gate_up
    sizes = (launch.device(weight.data).arch, weight.experts, weight.data.shape[1])
    tilings = {name: shape.tiling(weight.columns // BLOCK, TILE_BYTES) for name, shape, _ in KERNELS}
    build([kind(*sizes, tilings[name], True) for name, _, kinds in KERNELS for kind in kinds])
    rows_of: list[dict[str, Any]] = []
    for count in tokens:
        torch.manual_seed(count)
        x, rows, _ = routed(count, weight.experts)
        for name, _, kinds in KERNELS:
            grouped = group_rows(x, rows.counts, rows.offsets, torch.uint8 if "fp8" in name else torch.bfloat16)
            for kind in kinds:
                call = one_layer(kind, grouped, rows, tilings[name])
                call(layers[0])
                us = per_layer(layers, call, replays=5)
                rows_of.append({"tokens": count, "kernel": name, "part": kind.__name__, "first us": us})
                print(rows_of[-1], flush=True)
    print(table(rows_of))


def one_layer(kind: Any, grouped: GroupedRows, rows: ExpertRows, tiling: WarpgroupTiling) -> Callable[[Layer], None]:
    out = torch.empty_like(grouped.cells)

    def get(*constants: Any) -> jit.Launcher:
        return load(kind(*constants))

    def call(layer: Layer) -> None:
        first = layer.pair[0]
        launch_grouped(get, grouped.cells, grouped.scales, first, rows, out, tiling, True, ALPHA, LIMIT)

    return call


@cache
def load(kernel: jit.Kernel) -> jit.Launcher:
    return jit.load(kernel)


if __name__ == "__main__":
    main()
