"""Messages between GPUs: what the interpreter promises of them, and that the real library links."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import jit, nvshmem, ptx, vector
from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.dsl import Int32, Int64, Stream, Uint32, Uint64, const_expr, cute
from tests.kernels.emulation import stream
from tests.ptx.cutedsl import compile_kernel
from tests.ptx.errors import DataRace, PtxError
from tests.ptx.machine import Machine

WORDS = 300


@dataclass(frozen=True)
class Ring(nvshmem.NetworkKernel):
    """Every GPU sends `messages` rows to the next one and copies out what comes, in the order of the signals."""

    messages: int
    acquire: bool = True
    early: bool = False
    """Overwrite the source at once, which is wrong."""

    @cute.jit
    def __call__(
        self, outbox: Int64, inbox: Int64, signals: Int64, out: Int64, rank: Int32, ranks: Int32, stream: Stream
    ) -> None:
        self.kernel(outbox, inbox, signals, out, rank, ranks).launch(
            grid=[self.messages, 1, 1], block=[64, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, outbox: Int64, inbox: Int64, signals: Int64, out: Int64, rank: Int32, ranks: Int32) -> None:
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        row, signal = Int64(block) * (4 * WORDS), signals + Int64(block) * 8
        for at in range(thread, WORDS, 64):
            vector.scalar(outbox + row + Int64(at) * 4, Uint32)[0] = Uint32(rank * 100000 + block * 1000 + at)
        value = Uint64(7) << Uint64(32) | Uint64(block)
        nvshmem.put_signal_block(self.arch, inbox + row, outbox + row, 4 * WORDS, signal, value, (rank + 1) % ranks)
        if const_expr(self.early):
            for at in range(thread, WORDS, 64):
                vector.scalar(outbox + row + Int64(at) * 4, Uint32)[0] = Uint32(0)
        if thread == 0:
            seen = Uint64(0)
            while seen != value:
                if const_expr(self.acquire):
                    seen = ptx.load_acquire_u64(signal, "sys")
                else:
                    seen = ptx.load_relaxed_u64(signal, "gpu")
        cute.arch.sync_threads()
        for at in range(thread, WORDS, 64):
            word = vector.scalar(inbox + row + Int64(at) * 4, Uint32)[0]
            vector.scalar(out + row + Int64(at) * 4, Uint32)[0] = word


def run(kernel: Ring, ranks: int, seed: int, **options: Any) -> list[torch.Tensor]:
    machine = Machine()
    made: dict[str, list[torch.Tensor]] = {}
    for name in ("outbox", "inbox", "signals", "out"):
        shape = (kernel.messages, WORDS) if name != "signals" else kernel.messages
        dtype = torch.int64 if name == "signals" else torch.int32
        made[name] = [machine.zeros(shape, dtype, gpu=rank, name=f"{name} of {rank}") for rank in range(ranks)]
        if name != "out":
            machine.register_symmetric(made[name])
    compiled = compile_kernel(kernel, *kernel.arguments(), arch=str(kernel.arch), linked=False)
    launches = []
    for rank in range(ranks):
        addresses = [made[name][rank].data_ptr() for name in made]
        launches += compiled(*addresses, rank, ranks, stream(), gpu=rank)
    machine.run(launches, seed=seed, **options)
    return made["out"]


@pytest.fixture
def unlinked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "bitcode", lambda arch: None)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_arrive_whole(unlinked: None, arch: str, ranks: int) -> None:
    for seed in range(3):
        for rank, out in enumerate(run(Ring(ARCHS[arch], 3), ranks, seed)):
            sender = (rank - 1) % ranks
            expected = sender * 100000 + torch.arange(3)[:, None] * 1000 + torch.arange(WORDS)
            assert torch.equal(out, expected.int())


def test_a_relaxed_look_at_the_signal_is_caught(unlinked: None) -> None:
    with pytest.raises(DataRace):
        run(Ring(ARCHS["sm_90a"], 2, acquire=False), 2, 0)


def test_a_source_that_is_reused_too_early_is_caught(unlinked: None) -> None:
    wrong = [out for seed in range(5) for out in run(Ring(ARCHS["sm_90a"], 2, early=True), 2, seed)]
    assert any((out[:, 1:] == 0).any() for out in wrong)


def test_a_put_to_what_is_not_symmetric_is_an_error(unlinked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "register_symmetric", lambda self, tensors: None)
    with pytest.raises(PtxError, match="which is not symmetric"):
        run(Ring(ARCHS["sm_90a"], 1), 2, 0)


@pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.nvshmem") is None,
    reason="needs nvidia-nvshmem-cu13",
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_library_links(arch: str) -> None:
    """NVSHMEM's transports are in the PTX, and no open function."""
    kernel = Ring(ARCHS[arch], 1)
    code = jit.compile_binary(kernel).ptx
    assert "ibgda" in code
    assert "call.uni nvshmemx_" not in code
