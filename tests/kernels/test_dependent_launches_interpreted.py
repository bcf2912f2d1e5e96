"""Chains of programmatic dependent launches: the next kernel starts early, and reads only what is complete."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import jit, launch, mxfp4_e4m3
from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.e4m3_tiling import E4M3_SHAPES
from rose_dist.kernels.mxfp4_e4m3 import expert_mlp_e4m3
from rose_dist.kernels.mxfp4_experts import ExpertLayer
from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm
from rose_dist.kernels.variants import Ranges
from tests.kernels import emulation
from tests.kernels.expert_layer import LIMIT, Layer
from tests.ptx.errors import PtxError
from tests.ptx.launch import Launch
from tests.ptx.weaken import weakenings

EPS = 1e-5


class Chain:
    """Collects the launches of public functions and runs them together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
        self.gpu = emulation.install(monkeypatch, ARCHS[arch])
        self.launches: list[Launch] = []
        self.kernels: list[jit.Kernel] = []
        monkeypatch.setattr(launch, "run", self._collect)

    def _collect(self, kernel: jit.Kernel, on: torch.Tensor, *arguments: object) -> None:
        numbers = [launch.address(a) if isinstance(a, torch.Tensor) or a is None else a for a in arguments]
        self.kernels.append(kernel)
        self.launches += emulation.compiled(kernel)(*numbers, emulation.stream())

    def run(self, launches: list[Launch], seed: int) -> None:
        self.gpu.machine.run(launches, seed=seed)


@pytest.fixture(params=["sm_90a", "sm_100a"])
def chain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Chain:
    return Chain(monkeypatch, request.param)


def three_norms(chain: Chain) -> tuple[torch.Tensor, torch.Tensor]:
    """x -> norm -> residual norm -> norm, all launched; (the last result, what it has to be)."""
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 256).bfloat16(), torch.randn(5, 256).bfloat16(), torch.rand(256).bfloat16()
    held = [chain.gpu.tensor(t) for t in (x, residual, weight)]
    first = rms_norm(held[0], held[2], EPS)
    second, _ = add_rms_norm(first, held[1], held[2], EPS)
    third = rms_norm(second, held[2], EPS)
    launches, chain.launches = chain.launches, []
    for one in launches:
        chain.run([one], seed=0)
    expected = chain.gpu.plain(third)
    chain.launches = launches
    return third, expected


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_gives_what_one_launch_after_the_other_gives(chain: Chain, seed: int) -> None:
    last, expected = three_norms(chain)
    chain.gpu.plain_storage(last).zero_()
    assert all(one.overlaps for one in chain.launches)
    chain.run(chain.launches, seed)
    assert torch.equal(chain.gpu.plain(last), expected)


def test_a_chain_without_its_waits_is_caught(chain: Chain) -> None:
    three_norms(chain)
    first, second, third = chain.launches
    hasty = next(w for w in weakenings(second.program) if "griddepcontrol.wait" in w.text)

    def run() -> None:
        for seed in range(30):
            chain.run([first, hasty.apply(second), third], seed)

    with pytest.raises(PtxError, match=r"with nothing that orders them|written during this launch"):
        run()


@pytest.mark.parametrize(("hidden", "early"), [(4096, True), (7168, False)])
def test_norms_of_long_rows_hold_the_next_launch_back(chain: Chain, hidden: int, early: bool) -> None:
    rms_norm(chain.gpu.tensor(torch.ones(1, hidden).bfloat16()), chain.gpu.tensor(torch.ones(hidden).bfloat16()), EPS)
    (kernel,) = chain.kernels
    before, _ = emulation.compiled(kernel).ptx.split("griddepcontrol.wait;")
    assert ("griddepcontrol.launch_dependents;" in before) == early


def experts_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> tuple[Chain, torch.Tensor, torch.Tensor]:
    """Rows into groups -> an expert's first layer -> its second, all launched; (the results, what they have to be)."""
    chain = Chain(monkeypatch, "sm_90a")
    chain.gpu.info = replace(chain.gpu.info, sms=2)
    shape = replace(E4M3_SHAPES.variants[0], widths=(16,), stages=2)
    monkeypatch.setattr(mxfp4_e4m3, "E4M3_SHAPES", Ranges((0,), (shape,)))
    torch.manual_seed(0)
    first, second = Layer([3, 0, 9], 64, 64), Layer([3, 0, 9], 32, 32)
    layers = [ExpertLayer(layer.packed(chain.gpu), chain.gpu.tensor(layer.bias)) for layer in (first, second)]
    out = expert_mlp_e4m3(chain.gpu.tensor(first.x), *layers, first.expert_rows(chain.gpu), limit=LIMIT)
    for one in chain.launches:
        chain.run([one], seed=0)
    expected = chain.gpu.plain(out).clone()
    chain.gpu.plain_storage(out).zero_()
    return chain, out, expected


def test_expert_gemms_begin_before_their_rows_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, out, expected = experts_of_many_rows(monkeypatch)
    assert all(one.overlaps for one in chain.launches)
    for seed in range(4):
        chain.run(chain.launches, seed)
        assert torch.equal(chain.gpu.plain(out), expected)


@pytest.mark.parametrize("which", [1, 2])
def test_expert_gemms_that_do_not_wait_for_their_rows_are_caught(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, *_ = experts_of_many_rows(monkeypatch)
    waits = [w for w in weakenings(chain.launches[which].program) if "griddepcontrol.wait" in w.text]
    assert len(waits) == 2  # of what feeds and of what computes
    hasty = waits[0].apply(chain.launches[which])

    def run() -> None:
        for seed in range(20):
            chain.run([*chain.launches[:which], hasty, *chain.launches[which + 1 :]], seed)

    with pytest.raises(PtxError, match=r"with nothing that orders them|without a fence\.proxy\.async since"):
        run()
