"""A token's row and experts from the router's launch to the experts', against the way by packed rows and counts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.kernels import binary, jit, launch, layer_meeting, mxfp4_experts, registry
from rose_dist.kernels.arch import ARCHS
from rose_dist.kernels.combine_norm import combine_norm
from rose_dist.kernels.cute.handed_experts import HandedExperts
from rose_dist.kernels.cute.route_rows import RouteRows
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.handover import CHOICE_AT, EPOCH_AT, Handover
from rose_dist.kernels.moe_dispatch import PackedRows
from rose_dist.kernels.mxfp4_experts import ExpertLayer, ExpertRows, expert_mlp
from rose_dist.kernels.mxfp4_layout import PackedMxfp4, pack_mxfp4
from rose_dist.kernels.rms_norm import rms_norm
from rose_dist.kernels.route_rows import route_rows
from rose_dist.kernels.routing import Router
from rose_dist.kernels.sync import REPORT_WORDS, WaitExpiredError
from rose_dist.kernels.variants import WARP
from tests.kernels import emulation
from tests.kernels.binaries import Binaries
from tests.kernels.test_few_rows_interpreted import REGISTERS, SHARED
from tests.kernels.test_mxfp4_layout import random_mxfp4
from tests.ptx.errors import PtxError
from tests.ptx.launch import Launch
from tests.ptx.weaken import Weakening, weakenings

EPS, HIDDEN, EXPERTS, K, LIMIT = 1e-5, 64, 32, 4, 7.0
LONG = 1 << 40
"""Nanoseconds: the interpreter's clock runs ahead while many only poll."""


class Block:
    """A norm that waits before it lets others begin, as attention does; router; experts."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, arch: str, *, hidden: int = HIDDEN, experts: int = EXPERTS, k: int = K
    ) -> None:
        self.gpu, self.hidden, self.k = emulation.install(monkeypatch, ARCHS[arch], sms=2), hidden, k
        self.launches: list[Launch] = []
        monkeypatch.setattr(launch, "run", self._collect)
        monkeypatch.setattr(mxfp4_experts, "LIMIT_NS", LONG)
        torch.manual_seed(0)
        place = self.gpu.tensor
        self.layers = []
        for outputs in (2 * hidden, hidden):
            packed = pack_mxfp4(*random_mxfp4(experts, outputs, hidden // 32, low=118, high=124))
            weight = PackedMxfp4(*(place(t) for t in (packed.data, packed.rescale, packed.tops)))
            self.layers.append(ExpertLayer(weight, place(torch.randn(experts, outputs).bfloat16())))
        self.router = place((torch.randn(experts, hidden) / 8).bfloat16())
        self.norm = place((torch.rand(hidden) + 0.5).bfloat16())
        self.load = place(torch.zeros(experts, dtype=torch.int64))

    def _collect(self, kernel: jit.Kernel, on: torch.Tensor, *arguments: object) -> None:
        numbers = [launch.address(a) if isinstance(a, torch.Tensor) or a is None else a for a in arguments]
        self.launches += emulation.compiled(kernel)(*numbers, emulation.stream())

    def handover(self, x: torch.Tensor) -> Handover:
        return layer_meeting.meeting(x.device).handover(self.hidden)

    def __call__(
        self, x: torch.Tensor, handover: Handover | None, *, first: int = 0, held: int | None = None, live: int = 1,
        norm: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Results of the token's experts, and their rows."""
        held = len(self.router) if held is None else held
        make, device, k = torch.empty, x.device, self.k
        packed = PackedRows(
            make(k, self.hidden, dtype=torch.bfloat16, device=device), None,
            make(1, k, dtype=torch.int32, device=device), make(held, dtype=torch.int32, device=device),
            make(held + 1, dtype=torch.int64, device=device),
        )  # fmt: skip
        if norm:
            x = rms_norm(x, self.norm, EPS, ends_chain=True)
        alive = self.gpu.tensor(torch.tensor([live], dtype=torch.int32))
        route_rows(
            x, self.norm, EPS, self.router, None, Router(k), self.load, packed, first_expert=first,
            live_rows=alive, handover=handover,
        )  # fmt: skip
        rows = ExpertRows(packed.counts, packed.offsets, 1, handover=handover)
        here = [
            ExpertLayer(
                PackedMxfp4(*(t[first : first + held] for t in (weight.data, weight.rescale, weight.tops))),
                bias[first : first + held],
            )
            for weight, bias in self.layers
        ]
        return expert_mlp(packed.x, *here, rows, limit=LIMIT), packed.slots

    def run(self, launches: list[Launch], seed: int) -> None:
        self.gpu.machine.run(launches, seed=seed)

    def finish(self) -> None:
        """Run what has been launched, one after the other."""
        launches, self.launches = self.launches, []
        for one in launches:
            self.run([one], 0)


@pytest.fixture(params=["sm_90a", "sm_100a"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Block:
    return Block(monkeypatch, request.param)


def token(block: Block) -> torch.Tensor:
    return block.gpu.tensor(torch.randn(1, block.hidden).bfloat16())


@pytest.mark.parametrize(
    ("first", "held", "live"), [(0, EXPERTS, 1), (0, EXPERTS, 0), (16, 16, 1), (31, 1, 1)], ids=str
)
def test_gives_the_bits_of_packed_rows(block: Block, first: int, held: int, live: int) -> None:
    for _ in range(2):
        x = token(block)
        wanted, slots = block(x, None, first=first, held=held, live=live)
        got, other = block(x, block.handover(x), first=first, held=held, live=live)
        block.finish()
        assert torch.equal(block.gpu.plain(slots), block.gpu.plain(other))
        rows = int(block.gpu.plain(slots).max()) + 1
        assert rows <= min(K, held) * live
        assert torch.equal(block.gpu.plain(got)[:rows], block.gpu.plain(wanted)[:rows])


@pytest.mark.parametrize(("hidden", "experts", "k"), [(HIDDEN, 128, K), (800, 32, 1)])
def test_other_shapes(hidden: int, experts: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A router of eight blocks; and results of which a thread takes two packets."""
    block = Block(monkeypatch, "sm_90a", hidden=hidden, experts=experts, k=k)
    x = token(block)
    wanted, _ = block(x, None)
    got, _ = block(x, block.handover(x))
    block.finish()
    assert torch.equal(block.gpu.plain(got), block.gpu.plain(wanted))


def chain(block: Block) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Three layers on end, without the attention between them that waits: a norm, then router, experts, and what adds
    them up and reads early what the router wrote. Their launches wait in `block.launches`. Returns their results, and
    what these are without a handover when all has run twice.
    """
    values = torch.randn(1, HIDDEN).bfloat16()
    x, shares = block.gpu.tensor(values), block.gpu.tensor(torch.rand(1, K))

    def layers(handed: bool) -> list[torch.Tensor]:
        normed, results = x, []
        for i in range(3):
            experts, slots = block(normed, block.handover(x) if handed else None, norm=i == 0)
            normed = combine_norm(experts, slots, shares, block.gpu.tensor(values), block.norm, EPS)
            results += [experts, normed]
        return results

    wanted = layers(handed=False)
    block.launches *= 2
    block.finish()
    return layers(handed=True), [block.gpu.plain(one).clone() for one in wanted]


@pytest.mark.parametrize("resident", [None, 2])
def test_launches_that_overlap_change_nothing(block: Block, resident: int | None) -> None:
    """As a graph of an odd number of layers that is replayed: the epochs go on. Blocks that wait keep none from
    running, though there is room only for the experts' two.
    """
    results, wanted = chain(block)
    for result in results:
        block.gpu.plain_storage(result).zero_()
    block.gpu.machine.run(block.launches * 2, seed=resident or 0, resident=resident)
    for result, one in zip(results, wanted, strict=True):
        assert torch.equal(block.gpu.plain(result), one)


@pytest.mark.parametrize("block", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("kernel", ["RouteRows", "HandedExperts"])
def test_every_order_is_needed(block: Block, kernel: str) -> None:
    chain(block)
    at = next(i for i, one in enumerate(block.launches) if kernel in one.program.kernel.short_name())
    weakened = [
        w for w in weakenings(block.launches[at].program) if w.text.startswith(("bar.sync", "griddep", "fence"))
    ]
    assert len(weakened) >= 6

    def is_caught(weakening: Weakening) -> bool:
        launches = [*block.launches[:at], weakening.apply(block.launches[at]), *block.launches[at + 1 :]]
        try:
            for seed in range(4):
                block.run(launches, seed)
        except PtxError:
            return True
        return False

    assert not [str(w) for w in weakened if not is_caught(w)]


@pytest.mark.parametrize("block", ["sm_90a"], indirect=True)
@pytest.mark.parametrize("chosen", [False, True])
def test_experts_that_wait_in_vain_end_and_say_so(block: Block, chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4_experts, "LIMIT_NS", 1000)
    x = token(block)
    place, handover = layer_meeting.meeting(x.device), block.handover(x)
    monkeypatch.setattr(place.report, "_words", block.gpu.machine.zeros(REPORT_WORDS, torch.int32))
    block(x, handover, norm=False)
    router, experts = block.launches
    memory = block.gpu.plain_storage(handover.memory).view(torch.int32)
    if chosen:  # the choice of experts 0 to 3 comes, the row never
        memory[CHOICE_AT // 4 : CHOICE_AT // 4 + 4] = torch.tensor([0x03020100, -1, -1, 1])
    block.run([experts], seed=1)  # one that gives all waits turns enough to look at the clock
    with pytest.raises(WaitExpiredError, match="in the router beyond the limit"):
        layer_meeting.check()
    assert memory[EPOCH_AT // 4 : EPOCH_AT // 4 + 2].tolist() == [0, 1]  # the next handover is another
    block.run([router], 0)
    assert memory[CHOICE_AT // 4 + 3] == 2


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_next_launch_begins_behind_the_wait(arch: str, compiled_once: Binaries) -> None:
    """What it reads early was written by the router's launch, which may run while the experts already do."""
    kernels = [k for k in registry._mxfp4_experts(ARCHS[arch]) if isinstance(k, HandedExperts)]
    assert len(kernels) == 1
    before, after = compiled_once.of(kernels[0]).ptx.split("griddepcontrol.wait;")
    assert "griddepcontrol.launch_dependents" in after
    assert "griddepcontrol.launch_dependents" not in before
    assert "ld.relaxed.sys.global.v4.b32" in before


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_router_that_hands_over_starts_beside_the_experts(arch: str, compiled_once: Binaries) -> None:
    """Or the experts' blocks of its SMs would begin when it has ended."""
    routers = [k for k in registry._few_rows(ARCHS[arch]) if isinstance(k, RouteRows) and k.hands_over]
    experts = next(k for k in registry._mxfp4_experts(ARCHS[arch]) if isinstance(k, HandedExperts))

    def registers(kernel: jit.Kernel, threads: int) -> int:
        # Warps are spread evenly over the SM's four quarters, each with its own registers.
        return -(-binary.facts(compiled_once.of(kernel)).registers // 8) * 8 * -(-threads // WARP // 4) * 4 * WARP

    for router in routers:
        assert router.weights.threads == 288
        assert registers(router, 288) + registers(experts, experts.tiling.threads) <= REGISTERS
        assert router.places["size"] + experts.tiling.shared_bytes + 4096 + 2 * 1024 <= SHARED


def test_bad_arguments(block: Block) -> None:
    x = block.gpu.tensor(torch.randn(2, HIDDEN).bfloat16())
    packed = PackedRows(
        block.gpu.tensor(torch.zeros(8, HIDDEN).bfloat16()), None, block.gpu.tensor(torch.zeros(2, 4).int()),
        block.gpu.tensor(torch.zeros(EXPERTS).int()), block.gpu.tensor(torch.zeros(EXPERTS + 1).long()),
    )  # fmt: skip
    with pytest.raises(KernelArgumentError, match="handover: is for 1 row"):
        route_rows(x, block.norm, EPS, block.router, None, Router(K), block.load, packed, handover=block.handover(x))
    rows = ExpertRows(packed.counts, packed.offsets, 2, handover=block.handover(x))
    with pytest.raises(KernelArgumentError, match="handover: is for few rows, one an expert"):
        expert_mlp(packed.x, *block.layers, rows, limit=LIMIT)
