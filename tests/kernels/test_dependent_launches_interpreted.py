"""Chains of programmatic dependent launches: the next kernel starts early, and reads only what is complete."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import jit, launch
from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm
from tests.kernels import emulation
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
