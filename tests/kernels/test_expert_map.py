"""Loads are counted exactly, and every token finds a slot of its expert, each in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.comm.expert_placement import Placement
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.expert_map import map_experts
from rose_dist.kernels.routing import Router
from rose_dist.layers.expert_map import COUNTED_BY_ROUTER, ExpertMap

TABLE = torch.tensor([[1, 4, -1, -1], [3, 0, 2, 5], [2, 1, 3, -1], [1, 6, -1, -1]], dtype=torch.int32)
EXPERTS = len(TABLE)


def by_hand(ids: torch.Tensor, turn: int, live: int) -> tuple[torch.Tensor, list[int]]:
    slots, load = torch.full_like(ids, -1), [0] * EXPERTS
    for token in range(live):
        for place, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                load[expert] += 1
                count, *held = TABLE[expert].tolist()
                slots[token, place] = held[(turn + token) % count]
    return slots, load


@pytest.mark.parametrize("turn", [0, 1, 7])
@pytest.mark.parametrize("tokens", [0, 1, 3, 150])
@pytest.mark.parametrize("live", [None, 0, 2])
def test_slots_and_loads(gpu: Any, tokens: int, live: int | None, turn: int) -> None:
    ids = torch.randint(-1, EXPERTS, (tokens, 3), dtype=torch.int32)
    bound = None if live is None else torch.tensor([live], dtype=torch.int32)
    expected, counts = by_hand(ids, turn, tokens if live is None else min(live, tokens))
    load = torch.arange(EXPERTS)
    on_gpu = gpu.tensor(load)
    slots = map_experts(
        gpu.tensor(ids), on_gpu, gpu.tensor(TABLE), turn=turn, live_rows=None if bound is None else gpu.tensor(bound)
    )
    assert torch.equal(gpu.plain(slots), expected)
    assert torch.equal(gpu.plain(on_gpu), torch.arange(EXPERTS) + torch.tensor(counts))
    assert torch.equal(map_experts(ids, load, TABLE, turn=turn, live_rows=bound), expected)
    assert torch.equal(load, torch.arange(EXPERTS) + torch.tensor(counts))


@pytest.mark.parametrize("live", [None, 1])
def test_without_a_table_ids_are_slots(gpu: Any, live: int | None) -> None:
    ids = torch.tensor([[0, -1], [3, 3]], dtype=torch.int32)
    bound = None if live is None else torch.tensor([live], dtype=torch.int32)
    expected = ids.clone()
    if live is not None:
        expected[live:] = -1
    for tensor, plain in ((gpu.tensor, gpu.plain), (torch.clone, torch.clone)):
        load = tensor(torch.zeros(EXPERTS, dtype=torch.int64))
        slots = map_experts(tensor(ids), load, live_rows=None if bound is None else tensor(bound))
        assert torch.equal(plain(slots), expected)
        assert plain(load).tolist() == ([1, 0, 0, 2] if live is None else [1, 0, 0, 0])


@pytest.mark.parametrize("tokens", [5, COUNTED_BY_ROUTER + 44])
@pytest.mark.parametrize("live", [None, 3])
def test_a_layer_counts_whichever_launch_does(gpu: Any, tokens: int, live: int | None) -> None:
    logits = torch.randn(tokens, 32).bfloat16()
    bound = None if live is None else gpu.tensor(torch.tensor([live], dtype=torch.int32))
    load = gpu.tensor(torch.zeros(32, dtype=torch.int64))
    places = ExpertMap(Placement.initial(32, 1), 0, load)
    ids = gpu.plain(places.route(gpu.tensor(logits), Router(2), bound)[0])
    seen = tokens if live is None else live
    chosen = logits[:seen].float().topk(2).values
    assert torch.equal(logits[:seen].float().gather(1, ids[:seen].long()), chosen)
    assert (ids[seen:] == -1).all()
    assert torch.equal(gpu.plain(load), torch.bincount(ids[:seen].flatten().long(), minlength=32))


def test_bad_arguments() -> None:
    ids, load = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(KernelArgumentError, match="load: dtype"):
        map_experts(ids, load.int())
    with pytest.raises(KernelArgumentError, match=r"table: shape .* needs \(4, any\)"):
        map_experts(ids, load, TABLE[:3])
