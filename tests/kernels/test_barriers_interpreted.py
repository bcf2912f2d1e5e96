"""No barrier inside the kernels is missing or idle: without any one of them, some schedule goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import jit, launch
from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.rms_norm import rms_norm
from rose_dist.kernels.routing import Router, route
from tests.kernels import emulation
from tests.ptx.errors import PtxError
from tests.ptx.launch import Launch
from tests.ptx.machine import Machine
from tests.ptx.weaken import Weakening, weakenings

SEEDS = 20


def normed(gpu: Any) -> None:
    rms_norm(gpu.tensor(torch.randn(2, 2880).bfloat16()), gpu.tensor(torch.rand(2880).bfloat16()), 1e-5)


def routed(tokens: int) -> Callable[[Any], None]:
    """5 tokens: one block; 40: a cluster that counts together; 300: blocks that add to global counts."""
    return lambda gpu: route(gpu.tensor(torch.randn(tokens, 128)), Router(4), counts=True) and None


CASES: dict[str, Callable[[Any], None]] = {
    "rms_norm 2880": normed,
    **{f"route {tokens} tokens": routed(tokens) for tokens in (5, 40, 300)},
}


def launched(monkeypatch: pytest.MonkeyPatch, arch: str, call: Callable[[Any], None]) -> tuple[Machine, list[Launch]]:
    """The launches that `call` makes, each run once."""
    gpu = emulation.install(monkeypatch, ARCHS[arch])
    gpu.machine = Machine(check_shared=True)
    launches: list[Launch] = []

    def collect(kernel: jit.Kernel, on: torch.Tensor, *arguments: object) -> None:
        numbers = [launch.address(a) if isinstance(a, torch.Tensor) or a is None else a for a in arguments]
        mine = emulation.compiled(kernel)(*numbers, emulation.stream())
        gpu.machine.run(mine)
        launches.extend(mine)

    monkeypatch.setattr(launch, "run", collect)
    torch.manual_seed(0)
    call(gpu)
    return gpu.machine, launches


def is_caught(machine: Machine, one: Launch, weakening: Weakening) -> bool:
    try:
        for seed in range(SEEDS):
            machine.run([weakening.apply(one)], seed=seed)
    except PtxError:
        return True
    return False


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", CASES)
def test_every_barrier_is_needed(monkeypatch: pytest.MonkeyPatch, arch: str, case: str) -> None:
    machine, launches = launched(monkeypatch, arch, CASES[case])
    weakened = [(one, w) for one in launches for w in weakenings(one.program) if "griddepcontrol" not in w.text]
    assert weakened
    idle = [str(w) for one, w in weakened if not is_caught(machine, one, w)]
    assert not idle
