"""Norm, router, choice and packed rows in one launch, against the launches that it replaces, in torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from rose_dist.kernels import expert_slots, routing
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.expert_map import map_experts
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.moe_dispatch import PackedRows
from rose_dist.kernels.route_rows import route_rows, takes
from rose_dist.kernels.routing import Router, Score

EPS = 1e-5


def inputs(rows: int, hidden: int, experts: int) -> dict[str, torch.Tensor]:
    return {
        "x": (torch.randn(rows, hidden) * 5).bfloat16(), "norm_weight": (torch.rand(hidden) + 0.5).bfloat16(),
        "weight": (torch.randn(experts, hidden) / hidden**0.5).bfloat16(), "bias": torch.randn(experts).bfloat16(),
        "load": torch.arange(experts),
    }  # fmt: skip


def buffers(place: Any, rows: int, hidden: int, experts: int, k: int) -> PackedRows:
    return PackedRows(
        place(torch.full((rows * k, hidden), 9.0).bfloat16()), None, place(torch.full((rows, k), 77).int()),
        place(torch.full((experts,), 77).int()), place(torch.full((experts + 1,), 77)),
    )  # fmt: skip


def run(
    place: Any, given: dict[str, torch.Tensor], router: Router, live: int | None, **options: Any
) -> tuple[Any, ...]:
    """ids, weights, the packed rows and the load."""
    here = options.pop("here", len(given["load"]))
    held = {name: place(tensor) for name, tensor in given.items()}
    rows, hidden = given["x"].shape
    packed = buffers(place, rows, hidden, here, router.k)
    live_rows = None if live is None else place(torch.tensor([live], dtype=torch.int32))
    routed = route_rows(
        held["x"], held["norm_weight"], EPS, held["weight"], held["bias"], router, held["load"], packed,
        live_rows=live_rows, **options,
    )  # fmt: skip
    return routed.ids, routed.weights, packed, held["load"]


GPT_OSS, SOFTMAX = Router(4), Router(2, Score.SOFTMAX, scale=2.5)


@pytest.mark.parametrize(
    ("rows", "hidden", "experts", "live", "router"),
    [
        (1, 2880, 32, None, GPT_OSS),
        (8, 192, 32, 8, GPT_OSS),
        (3, 64, 128, 2, SOFTMAX),
        (5, 96, 64, None, SOFTMAX),
        (2, 32, 32, 0, GPT_OSS),
    ],
)
def test_does_what_the_five_launches_do(
    gpu: Any, rows: int, hidden: int, experts: int, live: int | None, router: Router
) -> None:
    given = inputs(rows, hidden, experts)
    ids, weights, packed, load = run(gpu.tensor, given, router, live)
    ids, weights, load = gpu.plain(ids), gpu.plain(weights), gpu.plain(load)
    wide = given["x"].double()
    normed = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * given["norm_weight"].double()
    logits = normed.bfloat16().double() @ given["weight"].double().T + given["bias"].double()
    wanted = routing.reference(logits.bfloat16(), router)
    alive = rows if live is None else live
    chosen = logits.gather(1, ids.long().clamp(min=0))[:alive]
    best = logits.gather(1, wanted.ids.long())[:alive]
    assert torch.allclose(chosen, best, atol=2**-7)  # ties of rounded logits may fall either way
    assert (ids[alive:] == -1).all()
    assert (weights[alive:] == 0).all()
    assert torch.allclose(weights[:alive], wanted.weights[:alive], rtol=2e-2)
    slots, counts, starts = expert_slots.reference(ids, alive, 0, experts, PackedLayout())
    assert torch.equal(gpu.plain(packed.slots), slots)
    assert torch.equal(gpu.plain(packed.counts), counts)
    assert torch.equal(gpu.plain(packed.offsets), starts)
    assert torch.equal(load, torch.arange(experts) + counts)
    stored = gpu.plain(packed.x)
    for row in range(alive):
        for slot in slots[row].tolist():
            error = (stored[slot].double() - normed[row]).abs()
            assert (error <= normed[row].abs() * 1.01 * 2**-8 + 1e-6).all()
    assert (stored[int(counts.sum()) :] == 9).all()


@pytest.mark.parametrize(("first", "here"), [(0, 20), (20, 21), (7, 2)])
@pytest.mark.parametrize("mapped", [False, True])
def test_packs_for_the_experts_here(gpu: Any, first: int, here: int, mapped: bool) -> None:
    """Of all; with a table, of slots of which some experts have two."""
    given = inputs(5, 64, 32)
    whole = run(gpu.tensor, given, Router(4), 4)
    table = torch.stack([torch.ones(32), torch.randperm(32), torch.full((32,), -1)], 1).int()
    table[::3, 0], table[::3, 2] = 2, torch.arange(32, 43)
    part = run(
        gpu.tensor, given, Router(4), 4, first_expert=first, here=here, table=gpu.tensor(table) if mapped else None,
        turn=3,
    )  # fmt: skip
    ids, (weights, packed, load) = gpu.plain(whole[0]), part[1:]
    wanted = map_experts(ids, torch.zeros(32, dtype=torch.int64), table, turn=3) if mapped else ids
    assert torch.equal(gpu.plain(part[0]), wanted)
    assert torch.equal(gpu.plain(weights), gpu.plain(whole[1]))
    assert torch.equal(gpu.plain(load), gpu.plain(whole[3]))
    slots, counts, starts = expert_slots.reference(wanted, 4, first, here, PackedLayout())
    assert torch.equal(gpu.plain(packed.slots), slots)
    assert torch.equal(gpu.plain(packed.counts), counts)
    assert torch.equal(gpu.plain(packed.offsets), starts)
    rows, all_rows, all_slots = gpu.plain(packed.x), gpu.plain(whole[2].x), gpu.plain(whole[2].slots)
    for pair, slot in enumerate(slots.flatten().tolist()):
        assert slot < 0 or torch.equal(rows[slot], all_rows[all_slots.flatten()[pair]])
    assert (rows[int(counts.sum()) :] == 9).all()


def test_a_row_has_the_same_bits_in_any_batch(gpu: Any) -> None:
    given = inputs(4, 320, 32)
    _, weights, packed, _ = run(gpu.tensor, given, Router(4), None)
    whole, stored, slots = gpu.plain(weights), gpu.plain(packed.x), gpu.plain(packed.slots)
    alone = run(gpu.tensor, {**given, "x": given["x"][2:3].clone()}, Router(4), None)
    assert torch.equal(gpu.plain(alone[1])[0], whole[2])
    assert torch.equal(gpu.plain(alone[2].x)[0], stored[int(slots[2, 0])])


def test_the_cpu_gives_the_same() -> None:
    given = inputs(3, 64, 32)
    ids, weights, packed, load = run(torch.clone, given, Router(4), 2)
    slots, counts, _ = expert_slots.reference(ids, 2, 0, 32, PackedLayout())
    assert torch.equal(packed.slots, slots)
    assert torch.equal(load, torch.arange(32) + counts)
    assert torch.allclose(weights[:2].sum(1), torch.ones(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(9, 64).bfloat16()}, "x: has 9 rows"),
        ({"norm_weight": torch.zeros(64)}, "norm_weight: dtype"),
        ({"weight": torch.zeros(48, 64).bfloat16(), "bias": torch.zeros(48).bfloat16()}, "has 48 experts"),
        ({"load": torch.zeros(32).int()}, "load: dtype"),
    ],
)
def test_bad_arguments(gpu: Any, change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        run(gpu.tensor, {**inputs(2, 64, 32), **change}, Router(4), None)


def test_takes() -> None:
    assert takes(torch.zeros(128, 2880).bfloat16(), Router(4))
    assert not takes(torch.zeros(256, 2880).bfloat16(), Router(4))
    assert not takes(torch.zeros(128, 2880), Router(4))
    assert not takes(torch.zeros(128, 2880).bfloat16(), Router(4, Score.SIGMOID))
    assert {field.name for field in fields(PackedRows)} == {"x", "scales", "slots", "counts", "offsets", "groups"}
