"""From the experts that a router chose to the slots that hold them, counting on the way."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rose_dist.kernels import checks, launch
from rose_dist.kernels.routing import add_load


def map_experts(
    ids: Tensor, load: Tensor, table: Tensor | None = None, *, turn: int = 0, live_rows: Tensor | None = None
) -> Tensor:
    """Count how often each expert was chosen, and choose the slot that serves each pair of token and place.

    Of an expert with n slots, token t takes number (turn + t) % n, so that a batch spreads evenly over them and the
    choice depends on nothing else.

    Args:
        ids: int32 [tokens, top_k], dense; −1 is skipped, and counted nowhere.
        load: int64 [experts], added to.
        table: int32 [experts, 1 + most slots]: the number of an expert's slots, then the slots. None: slot e holds
            expert e alone, and `ids` itself is returned.
        turn: where this rank's tokens begin to go round; 0 to 2^30.
        live_rows: int32 [1]; tokens from there on are neither counted nor mapped, their slots are −1.

    Returns:
        int32 [tokens, top_k], slots.
    """
    _check(ids, load, table, live_rows)
    mapped = _launch if ids.is_cuda else reference
    return mapped(ids, load, table, turn, live_rows)


@checks.once
def _check(ids: Tensor, load: Tensor, table: Tensor | None, live_rows: Tensor | None) -> None:
    checks.shape("ids", ids, None, None)
    checks.dtype("ids", ids, torch.int32)
    checks.dense("ids", ids, 4)
    checks.shape("load", load, None)
    checks.dtype("load", load, torch.int64)
    checks.dense("load", load, 8)
    checks.same_device("load", load, ids.device)
    if table is not None:
        checks.shape("table", table, load.shape[0], None)
        checks.dtype("table", table, torch.int32)
        checks.dense("table", table, 4)
        checks.same_device("table", table, ids.device)
    checks.live_rows(live_rows, ids.device)


def reference(ids: Tensor, load: Tensor, table: Tensor | None, turn: int, live_rows: Tensor | None) -> Tensor:
    """`map_experts` on the CPU; in numpy, where a small array's operation costs a third of torch's."""
    chosen = ids.numpy()
    live = len(chosen) if live_rows is None else min(int(live_rows), len(chosen))
    add_load(load, ids[:live])
    if table is None and live == len(chosen):
        return ids
    slots = np.full_like(chosen, -1)
    if table is None:
        slots[:live] = chosen[:live]
    else:
        rows = table.numpy()[chosen[:live]]  # of expert −1 the last one's, which is not used
        place = 1 + (turn + np.arange(live, dtype=np.int64))[:, None] % rows[:, :, 0]
        found = np.take_along_axis(rows, place[:, :, None], 2)[:, :, 0]
        slots[:live] = np.where(chosen[:live] < 0, -1, found)
    return torch.from_numpy(slots)


def _launch(ids: Tensor, load: Tensor, table: Tensor | None, turn: int, live_rows: Tensor | None) -> Tensor:
    tokens, top_k = ids.shape
    slots = (
        ids if table is None and live_rows is None else torch.empty(tokens, top_k, dtype=ids.dtype, device=ids.device)
    )
    if tokens:
        from rose_dist.kernels.cute import expert_map as cute  # noqa: PLC0415 - it loads the compiler

        launcher = cute.launcher(launch.device(ids).arch, load.shape[0], top_k, 0 if table is None else table.shape[1])
        launch.run(launcher, ids, ids, table, slots, load, live_rows, turn, tokens)
    return slots
