"""A decoder layer of few rows as one stream of launches that start as early as they may, but for its experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, jit, launch, registry
from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.combine_norm import combine_norm
from rose_dist.kernels.cute.all_reduce_norm import CombineReduceNorm
from rose_dist.kernels.cute.combine_norm import CombineNorm
from rose_dist.kernels.cute.linear_add import LinearAdd
from rose_dist.kernels.cute.linear_rotary import LinearRotary
from rose_dist.kernels.cute.mxfp4_experts import ExpertLinear
from rose_dist.kernels.cute.route_rows import RouteRows
from rose_dist.kernels.linear_add import linear_add
from rose_dist.kernels.linear_rotary import linear_rotary
from rose_dist.kernels.moe_dispatch import PackedRows
from rose_dist.kernels.qk_norm import PagedCache
from rose_dist.kernels.rms_norm import rms_norm
from rose_dist.kernels.route_rows import route_rows
from rose_dist.kernels.routing import Router
from tests.kernels import emulation
from tests.ptx.errors import PtxError
from tests.ptx.launch import Launch
from tests.ptx.weaken import weakenings

REGISTERS, SHARED = 65536, 228 * 1024
"""Of an SM; of the latter each block takes 1 KB more than it asks for."""
EPS, HIDDEN, HEAD_DIM, EXPERTS, ROWS = 1e-5, 64, 32, 32, 2


class Layer:
    """Two query heads and a key head. Queries stand for what attention makes of them, and a norm for the experts, as it
    waits before it lets others begin.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
        self.gpu = emulation.install(monkeypatch, ARCHS[arch])
        self.launches: list[Launch] = []
        monkeypatch.setattr(launch, "run", self._collect)
        torch.manual_seed(0)
        place = self.gpu.tensor
        self.qkv, self.o, self.router = (
            place((torch.randn(shape) / 8).bfloat16()) for shape in ((128, HIDDEN), (HIDDEN, 64), (EXPERTS, HIDDEN))
        )
        self.bias, self.norm = place(torch.randn(128).bfloat16()), place((torch.rand(HIDDEN) + 0.5).bfloat16())
        self.turns = [place(torch.rand(ROWS, HEAD_DIM // 2)) for _ in range(2)]
        self.load = place(torch.zeros(EXPERTS, dtype=torch.int64))

    def _collect(self, kernel: jit.Kernel, on: torch.Tensor, *arguments: object) -> None:
        numbers = [launch.address(a) if isinstance(a, torch.Tensor) or a is None else a for a in arguments]
        self.launches += emulation.compiled(kernel)(*numbers, emulation.stream())

    def __call__(self, normed: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        make = torch.empty
        device = normed.device
        cache = PagedCache(
            *(make(4, 1, HEAD_DIM, dtype=torch.bfloat16, device=device) for _ in range(2)),
            self.gpu.tensor(torch.tensor([1, 3])),
        )
        q = linear_rotary(normed, self.qkv, self.bias, 1, *self.turns, cache)
        total = linear_add(q.flatten(1), self.o, None, x)
        packed = PackedRows(
            make(ROWS * 4, HIDDEN, dtype=torch.bfloat16, device=device), None,
            make(ROWS, 4, dtype=torch.int32, device=device), make(EXPERTS, dtype=torch.int32, device=device),
            make(EXPERTS + 1, dtype=torch.int64, device=device),
        )  # fmt: skip
        routed = route_rows(total, self.norm, EPS, self.router, None, Router(4), self.load, packed)
        results = rms_norm(packed.x, self.norm, EPS, ends_chain=True)
        return combine_norm(results, packed.slots, routed.weights, total, self.norm, EPS), total


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Layer:
    return Layer(monkeypatch, "sm_90a")


def two_layers(layer: Layer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The results of two layers on end, whose launches wait in `layer.launches`; and what they are."""
    place = layer.gpu.tensor
    normed, x = (place(torch.randn(ROWS, HIDDEN).bfloat16()) for _ in range(2))
    first = layer(normed, x)
    results = [*first, *layer(*first)]
    for one in layer.launches:
        layer.gpu.machine.run([one], seed=0)
    wanted = [layer.gpu.plain(result).clone() for result in results]
    for result in results:
        layer.gpu.plain_storage(result).zero_()
    return results, wanted


def test_early_starts_change_nothing(layer: Layer) -> None:
    results, wanted = two_layers(layer)
    assert len(layer.launches) == 10
    assert all(one.overlaps for one in layer.launches)
    for seed in range(3):
        layer.gpu.machine.run(layer.launches, seed=seed)
        for result, one in zip(results, wanted, strict=True):
            assert torch.equal(layer.gpu.plain(result), one)


@pytest.mark.parametrize("which", [1, 2, 4], ids=["linear_add", "route_rows", "combine_norm"])
def test_a_launch_without_its_wait_is_caught(layer: Layer, which: int) -> None:
    two_layers(layer)
    launches = layer.launches[:5]
    hasty = next(w for w in weakenings(launches[which].program) if "griddepcontrol.wait" in w.text)
    launches[which] = hasty.apply(launches[which])

    def run() -> None:
        for seed in range(20):
            layer.gpu.machine.run(launches, seed=seed)

    with pytest.raises(PtxError):
        run()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_all_weights_are_under_way_before_the_wait(arch: str) -> None:
    kernels: list[Any] = [k for k in registry._few_rows(ARCHS[arch]) if isinstance(k, LinearAdd | LinearRotary)]
    assert len(kernels) == 3
    for kernel in kernels:
        compiled, weights = jit.compile_binary(kernel), kernel.weights
        before, after = compiled.ptx.split("griddepcontrol.wait;")
        assert before.count("ld.global.L1::no_allocate.L2::cache_hint.L2::256B.v4.b32") == 2 * weights.held
        assert before.count("cp.async.cg.shared.global.L2::cache_hint.L2::256B") == 2 * (weights.runs - weights.held)
        assert "L2::256B" not in after
        assert after.count("mma.sync.aligned.m16n8k16") == 2 * weights.runs
        assert "griddepcontrol.launch_dependents" in before
        assert "st.global" not in before
        facts, per_sm = binary.facts(compiled), weights.shape.per_sm
        assert per_sm * weights.threads * facts.registers <= REGISTERS
        assert per_sm * (kernel.shared_bytes + 1024) <= SHARED


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_router_starts_beside_the_output_projection(arch: str) -> None:
    kernels = registry._few_rows(ARCHS[arch])
    router = next(k for k in kernels if isinstance(k, RouteRows))
    output = next(k for k in registry._few_rows(ARCHS[arch]) if isinstance(k, LinearAdd))
    registers = [k.weights.threads * binary.facts(jit.compile_binary(k)).registers for k in (router, output)]
    assert sum(registers) <= REGISTERS
    assert router.places["size"] + output.shared_bytes + 2 * 1024 <= SHARED
    before, after = jit.compile_binary(router).ptx.split("griddepcontrol.wait;")
    weights = router.weights
    assert before.count("ld.global.L1::no_allocate.L2::cache_hint.L2::256B.v4.b32") == 2 * weights.held
    assert (
        before.count("cp.async.cg.shared.global.L2::cache_hint.L2::256B")
        == 2 * (weights.runs - weights.held) + router.shared_rows.steps
    )
    assert "L2::256B" not in after
    assert "st.global" not in before


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_norm_has_registers_beside_the_experts(arch: str) -> None:
    """The SM's registers are given to a warp by the 256. Experts of four rows a segment need a few more."""
    norm = next(k for k in registry._few_rows(ARCHS[arch]) if isinstance(k, CombineNorm))
    reduced = next(k for k in registry._all_reduces(ARCHS[arch]) if isinstance(k, CombineReduceNorm))
    experts = [k for k in registry._mxfp4_experts(ARCHS[arch]) if isinstance(k, ExpertLinear) and len(k.tiles) == 2]
    assert {k.tiling.rows for k in experts} == {1, 4, 8}
    taken = max(registers(k, k.tiling.threads) for k in experts if k.tiling.rows != 4)
    assert registers(norm, norm.threads) + taken <= REGISTERS
    assert registers(reduced, reduced.shot.threads) + taken <= REGISTERS


def registers(kernel: jit.Kernel, threads: int) -> int:
    """Of a block."""
    return -(-binary.facts(jit.compile_binary(kernel)).registers // 8) * 8 * threads
