"""Dispatch into groups, bf16 bit by bit and e4m3 by the rule of `quantize`, with slots as those of other dispatches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rose_dist.kernels import expert_slots
from rose_dist.kernels.group_dispatch import GroupDispatcher
from rose_dist.kernels.moe_dispatch import PackedRows
from rose_dist.kernels.row_groups import GROUPS, GroupedRows, empty_groups
from tests.kernels.test_mxfp4_e4m3 import PLACES, hopper

__all__ = ["hopper"]
EXPERTS, HELD, FIRST = 6, 4, 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(("tokens", "live", "columns"), [(37, None, 32), (9, 6, 544), (5, 0, 32)], ids=str)
def test_rows_stand_in_their_experts_groups(
    hopper: Any, dtype: torch.dtype, tokens: int, live: int | None, columns: int
) -> None:
    """Some ids are skipped, some of other ranks; rows of no pair stay as the dispatch before has left them."""
    ids = torch.randint(-1, EXPERTS, (tokens, 3), dtype=torch.int32)
    x = (torch.randn(tokens, columns) * 3).bfloat16()
    x[0] = 0.0
    device = torch.device("cuda", 0)
    most = GROUPS.capacity(ids.numel(), HELD)
    scales = torch.empty(most, dtype=torch.float32, device=device) if dtype is torch.uint8 else None
    out = PackedRows(
        torch.empty(most, columns, dtype=torch.bfloat16, device=device), None,
        hopper.tensor(torch.zeros(tokens, 3, dtype=torch.int32)), torch.empty(HELD, dtype=torch.int32, device=device),
        torch.empty(HELD + 1, dtype=torch.int64, device=device),
        GroupedRows(empty_groups(most // 8, columns, dtype, device), scales),
    )  # fmt: skip
    assert out.groups is not None
    bound = None if live is None else hopper.tensor(torch.tensor([live], dtype=torch.int32))
    dispatcher = GroupDispatcher(
        device, experts=HELD, first_expert=FIRST, top_k=3, columns=columns, max_tokens=tokens,
        dtypes=[torch.bfloat16, torch.uint8],
    )  # fmt: skip
    dispatcher(hopper.tensor(x), hopper.tensor(ids.flip(0)), tokens, None, out)
    wanted = hopper.plain(out.groups.cells).clone()
    wanted_scales = None if scales is None else hopper.plain(scales).clone()
    given = hopper.tensor(x), hopper.tensor(ids)
    with nullcontext() if hopper.real else hopper.together(tokens):
        dispatcher(*given, tokens, bound, out)
    dispatcher.check()
    there = tokens if live is None else live
    slots, counts, starts = expert_slots.reference(ids, there, FIRST, HELD, GROUPS)
    assert torch.equal(hopper.plain(out.counts), counts)
    assert torch.equal(hopper.plain(out.offsets), starts)
    assert torch.equal(hopper.plain(out.slots)[:there], slots[:there])
    for token, place in (slots[:there] >= 0).nonzero().tolist():
        slot, row = int(slots[token, place]), x[token].float()
        if wanted_scales is None:
            wanted[slot // 8, :, slot % 8] = x[token].view(-1, 8)
            continue
        scale = row.abs().max().clamp(min=1e-10) * (1.0 / 448)
        codes = (row * (1.0 / scale)).to(torch.float8_e4m3fn).view(torch.uint8).view(-1, 16)
        wanted[slot // 8, :, slot % 8][:, PLACES] = codes
        wanted_scales[slot] = scale
    found = hopper.plain(out.groups.cells)
    assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
    if scales is not None and wanted_scales is not None:
        assert torch.equal(hopper.plain(scales).view(torch.int32), wanted_scales.view(torch.int32))
