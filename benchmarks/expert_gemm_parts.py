"""What the time of the warpgroups' expert GEMM goes into: the kernel without one part or another: the first layer of
gpt-oss-120b.

    python -m benchmarks.expert_gemm_parts [--tokens 4096]

Results are wrong without a part; only times mean something. Parts that hide behind others cost nothing when left out.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.experts import LAYERS, LIMIT, MODELS, Layer, per_layer, routed, show
from benchmarks.graphs import table
from rose_dist.kernels import jit, launch
from rose_dist.kernels.cute import mxfp4_experts_warpgroup as module
from rose_dist.kernels.cute.mxfp4_experts_warpgroup import WarpgroupExpertGemm
from rose_dist.kernels.cute.mxfp4_feeder import Feeder
from rose_dist.kernels.cute.mxfp4_operands import barrier
from rose_dist.kernels.dsl import Float32, Int32, Int64, cute
from rose_dist.kernels.mxfp4 import BLOCK
from rose_dist.kernels.mxfp4_layout import TILE_BYTES
from rose_dist.kernels.swiglu import ALPHA
from rose_dist.kernels.variants import WARP
from rose_dist.kernels.warpgroup_tiling import WARPGROUP_SHAPES, WarpgroupTiling


@dataclass(frozen=True)
class WithoutRows(Feeder):
    @cute.jit
    def copy_rows(self, target: Int32, rows: Int64, feeder: Int32, count: Int32) -> None:
        pass


@dataclass(frozen=True)
class WithoutWeights(Feeder):
    @cute.jit
    def copy_weights(
        self, target: Int32, source: Int64, biases: Int64, step: Int32, left: Int32, full: cute.Pointer
    ) -> None:
        pass


@dataclass(frozen=True)
class WithoutCopies(WithoutRows, WithoutWeights):
    pass


@dataclass(frozen=True)
class WithoutFences(Feeder):
    @cute.jit
    def announce(self, shared: Int32, number: Int32) -> None:
        cute.arch.sync_warp()
        if cute.arch.thread_idx()[0] % WARP == 0:
            cute.arch.mbarrier_arrive(barrier(shared, number % self.tiling.stages))


class OddBanks(WarpgroupTiling):
    """The cells of a product one bank of 16 bytes apart."""

    @property
    def cell_stride(self) -> int:
        return self.rows + 1

    @property
    def pair_stride(self) -> int:
        return 2 * self.rows + 2


class SameBanks(WarpgroupTiling):
    """The cells of a product in the same banks."""

    @property
    def cell_stride(self) -> int:
        return self.rows

    @property
    def pair_stride(self) -> int:
        return 2 * self.rows + 1


class Raw:
    def decode_half(self, codes: Any, half: int, left: Any) -> None:
        for k in range(8):
            left[k] = codes[(half + k) % 5]


class Still:
    def multiply(self, right: Any, number: int, left: Any, sums: Any, width: int) -> None:
        word = left[0]
        for k in range(1, 8):
            word ^= left[k]
        sums[number % 4] = sums[number % 4] + Float32(word & 1)


@dataclass(frozen=True)
class Whole(WarpgroupExpertGemm):
    pass


@dataclass(frozen=True)
class NoFences(WarpgroupExpertGemm):
    pass


@dataclass(frozen=True)
class FencesOfReaders(WarpgroupExpertGemm):
    """Right too."""

    def await_stage(self, shared: Any, stage: Any, parity: Any) -> None:
        super().await_stage(shared, stage, parity)
        cute.arch.fence_proxy("async.shared", space="cta")


@dataclass(frozen=True)
class NoRows(WarpgroupExpertGemm):
    pass


@dataclass(frozen=True)
class NoCopies(WarpgroupExpertGemm):
    pass


@dataclass(frozen=True)
class NoDecoding(Raw, WarpgroupExpertGemm):
    pass


@dataclass(frozen=True)
class NoProducts(Still, WarpgroupExpertGemm):
    pass


@dataclass(frozen=True)
class OnlyProducts(Raw, WarpgroupExpertGemm):
    pass


PARTS: dict[type[WarpgroupExpertGemm], type[Feeder]] = {
    Whole: Feeder, NoFences: WithoutFences, FencesOfReaders: WithoutFences, NoRows: WithoutRows,
    NoCopies: WithoutCopies, NoDecoding: Feeder,
    NoProducts: Feeder, OnlyProducts: WithoutCopies,
}  # fmt: skip


def figures(
    layers: list[Layer], tokens: int, part: type[WarpgroupExpertGemm], kind: type[WarpgroupTiling]
) -> dict[str, Any]:
    torch.manual_seed(tokens)
    x, rows, _ = routed(tokens, layers[0].gate_up.experts)
    h, device = torch.empty_like(x), launch.device(x)
    module.Feeder = PARTS[part]  # type: ignore[misc]

    def call(layer: Layer) -> None:
        weight = layer.gate_up
        tiling = WARPGROUP_SHAPES.select(rows.most).tiling(weight.columns // BLOCK, TILE_BYTES)
        tiling = kind(**vars(tiling))
        launcher = jit.load(part(device.arch, weight.experts, weight.data.shape[1], tiling, True))
        launch.run(
            launcher, x, weight.data, weight.rescale, layer.gate_up_bias, x, rows.counts, rows.offsets, h, ALPHA, LIMIT,
            device.sms,
        )  # fmt: skip

    call(layers[0])
    return {
        "tokens": tokens,
        "part": part.__name__,
        "cells": kind.__name__,
        "first us": per_layer(layers, call, replays=5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=(4096,))
    arguments = parser.parse_args()
    begin = time.perf_counter()
    layers = [Layer.random(MODELS["gpt-oss-120b"]) for _ in range(LAYERS)]
    rows: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        arms = [(Whole, SameBanks), (Whole, OddBanks), *((part, WarpgroupTiling) for part in PARTS)]
        for part, kind in arms:
            rows.append(figures(layers, tokens, part, kind))
            show(begin, rows[-1])
    print(table(rows))


if __name__ == "__main__":
    main()
