"""What begins a mixture-of-experts block of few rows, in one launch: norm, router, choice, load and packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rose_dist.kernels import checks, expert_slots, launch
from rose_dist.kernels.expert_map import map_experts
from rose_dist.kernels.expert_slots import PackedLayout
from rose_dist.kernels.handover import MOST_CHOSEN, Handover
from rose_dist.kernels.handover import takes as takes_choice
from rose_dist.kernels.linear_add import check, fits
from rose_dist.kernels.linear_add import reference as linear
from rose_dist.kernels.linear_shapes import LINEAR_OUTPUTS
from rose_dist.kernels.moe_dispatch import PackedRows
from rose_dist.kernels.rms_norm import rms_norm
from rose_dist.kernels.routing import Router, Routing, Score, route
from rose_dist.kernels.variants import WARP

MAX_EXPERTS = 8 * LINEAR_OUTPUTS
"""16 a block of a cluster, which has at most 8 on every GPU."""


def takes(weight: Tensor, router: Router) -> bool:
    """Whether `route_rows` serves a router with such a weight [experts, hidden] on a GPU."""
    experts = weight.shape[0]
    known = fits(weight) and router.score is not Score.SIGMOID and router.groups == 1
    return known and experts in (32, 64, 128) and router.k <= WARP


def route_rows(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None, router: Router, load: Tensor,
    packed: PackedRows, *, first_expert: int = 0, table: Tensor | None = None, turn: int = 0,
    live_rows: Tensor | None = None, handover: Handover | None = None,
) -> Routing:  # fmt: skip
    """Normalise rows, choose their experts, and write a row for each into expert order.

    Args:
        x: bf16 [rows, hidden], up to 8 dense rows; hidden a multiple of 32.
        norm_weight: bf16 [hidden].
        weight, bias: of the router, bf16 [experts, hidden] with 32, 64 or 128 experts, and bf16 [experts] or None.
            None of the weights may be written by the launches just before: they are read while those still run.
        router: a rule without sigmoid and groups.
        load: int64 [experts], how often each was chosen; added to.
        packed: written to: the normalised rows for the experts here, without gaps between experts, their slots (−1 for
            other experts, and from `live_rows` on), counts and offsets. `packed.counts` says how many experts are here.
        first_expert: of those here, as mapped.
        table, turn: from experts to what serves them, as for `map_experts`; the table must not be written by the
            launches just before either.
        live_rows: int32 [1], not written by the launches just before; rows from there on have no expert.
        handover: where a single row and its experts are left, besides, for the experts' launch that comes next and must
            be given it. Unused on a CPU.

    Returns:
        The routing, without counts. All is as `rms_norm`, a linear layer, `route`, `map_experts` and a dispatch do it
        one after the other, with the same roundings.

    Raises:
        KernelArgumentError: for shapes, dtypes or devices that don't fit.
    """
    _check(x, norm_weight, weight, bias, router, load, packed, table, live_rows)
    rows, hidden = x.shape
    if handover is not None and (rows != 1 or not takes_choice(packed.counts.shape[0], router.k)):
        raise checks.fail("handover", f"is for 1 row and at most {MOST_CHOSEN} experts of it; there are {rows} rows")
    if not x.is_cuda:
        normed = rms_norm(x, norm_weight, eps)
        routing = route(linear(normed, weight, bias), router, live_rows=live_rows)
        ids = map_experts(routing.ids, load, table, turn=turn, live_rows=live_rows)
        _pack(normed, ids, first_expert, packed)
        return Routing(ids, routing.weights)
    from rose_dist.kernels.cute import route_rows as cute  # noqa: PLC0415 - it loads the compiler

    routing = Routing(
        torch.empty(rows, router.k, dtype=torch.int32, device=x.device),
        torch.empty(rows, router.k, dtype=torch.float32, device=x.device),
    )
    width, hands_over = 0 if table is None else table.shape[1], handover is not None
    launcher = cute.launcher(launch.device(x).arch, hidden, weight.shape[0], router.k, router.score, width, hands_over)
    launch.run(
        launcher, x, x, norm_weight, weight, bias, live_rows, load, table, turn, first_expert, packed.counts.shape[0],
        packed.x, routing.ids, routing.weights, packed.slots, packed.counts, packed.offsets,
        None if handover is None else handover.memory, rows, eps, router.scale,
    )  # fmt: skip
    return routing


def _pack(normed: Tensor, ids: Tensor, first_expert: int, packed: PackedRows) -> None:
    held = packed.counts.shape[0]
    slots, counts, starts = expert_slots.reference(ids, len(normed), first_expert, held, PackedLayout())
    pairs = (slots >= 0).nonzero()
    packed.x[slots[slots >= 0].long()] = normed[pairs[:, 0]]
    for target, source in ((packed.slots, slots), (packed.counts, counts), (packed.offsets, starts)):
        target.copy_(source)


def _check(
    x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None, router: Router, load: Tensor,
    packed: PackedRows, table: Tensor | None, live_rows: Tensor | None,
) -> None:  # fmt: skip
    check(x, weight, bias)
    (rows, hidden), experts = x.shape, weight.shape[0]
    checks.dense("x", x)
    if not takes(weight, router):
        raise checks.fail("weight", f"has {experts} experts for {router}; allowed: 32, 64, 128, no sigmoid or groups")
    checks.shape("norm_weight", norm_weight, hidden)
    checks.dtype("norm_weight", norm_weight, torch.bfloat16)
    checks.shape("packed.x", packed.x, None, hidden)
    checks.dtype("packed.x", packed.x, torch.bfloat16)
    if packed.scales is not None or packed.x.shape[0] < rows * router.k:
        raise checks.fail("packed", f"needs {rows * router.k} rows and no scales")
    held = packed.counts.shape[0]
    of_experts = (("load", load, torch.int64, experts), ("packed.counts", packed.counts, torch.int32, held))
    for name, tensor, dtype, length in (*of_experts, ("packed.offsets", packed.offsets, torch.int64, held + 1)):
        checks.shape(name, tensor, length)
        checks.dtype(name, tensor, dtype)
    if table is not None:
        checks.shape("table", table, experts, None)
        checks.dtype("table", table, torch.int32)
        checks.dense("table", table, 4)
        checks.same_device("table", table, x.device)
    checks.shape("packed.slots", packed.slots, rows, router.k)
    checks.dtype("packed.slots", packed.slots, torch.int32)
    written = {"load": load, "packed.x": packed.x, "packed.slots": packed.slots, "packed.counts": packed.counts}
    for name, tensor in {**written, "packed.offsets": packed.offsets, "norm_weight": norm_weight}.items():
        checks.same_device(name, tensor, x.device)
        checks.dense(name, tensor, 16 if tensor.dtype is torch.bfloat16 else tensor.element_size())
    checks.live_rows(live_rows, x.device)
