"""Steps launched before the tokens of the one before are read, over tensor-parallel ranks; and how a group of GPUs
broadcasts by a sum.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq

from rose_dist.comm.gpu_group import GpuGroup
from rose_dist.comm.group import Group
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.doorbell import Doorbell
from rose_dist.engine.engine import Engine
from rose_dist.engine.loop import serve
from rose_dist.engine.offline import OfflineSession
from tests.checkpoints import random_prompt, reference_greedy, write_tiny
from tests.engine.test_engine import greedy
from tests.ranks import run_ranks


def generate(world: World, folder: Path, sizes: dict[str, int], options: dict[str, object]) -> dict[str, list[int]]:
    """Tokens by request, on rank 0."""
    groups = world.groups(Layout.of(world.size, **sizes))
    config = EngineConfig(folder, kv_tokens=2048, max_context=256, prefill_ladder=(64,), **options)  # type: ignore[arg-type]
    engine = Engine.load(config, groups)
    assert engine.runner._prefill_graphs is None, "they hold no exchange between ranks"
    found: dict[str, list[int]] = {}
    with zmq.Context() as context:
        bell = Doorbell(context, "127.0.0.1", groups.lockstep)
        if world.rank:
            serve(engine, bell, None, lambda: None)
        else:
            with OfflineSession(engine, bell) as session:
                for output in session.run([greedy(f"r{i}", random_prompt(20 + 40 * i, i), 8 + i) for i in range(3)]):
                    found.setdefault(output.request_id, []).extend(output.token_ids)
        context.destroy(linger=0)
    groups.free()
    return found


@pytest.mark.mpi(2)
@pytest.mark.parametrize("sizes", [{"tp": 2, "ep": 2}, {"dp": 2, "ep": 2}], ids=str)
def test_peers_get_the_tokens_that_only_the_leaders_device_knows(tmp_path: Path, sizes: dict[str, int]) -> None:
    folder = write_tiny(tmp_path)
    options = {"overlap": True, "ladder": (1, 2, 4)} if "tp" in sizes else {"overlap": True}
    found, *_ = run_ranks(2, generate, folder, sizes, options, timeout=120)
    for i, tokens in enumerate(found.values()):
        assert tokens == reference_greedy(folder, random_prompt(20 + 40 * i, i), 8 + i)


class SumOnHost:
    """What `kernels.all_reduce.AllReduce` does, by MPI."""

    def __init__(self, group: Group) -> None:
        self.sizes = SimpleNamespace(hidden=24, dtype=torch.bfloat16)
        self._group = group

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        assert x.shape[1] == self.sizes.hidden
        assert x.dtype == self.sizes.dtype
        out.copy_(x)
        self._group.all_reduce(out)


NUMBERS = [0, 1, 255, 256, 201087, 2**24 + 1, 2**40 - 3, 2**63 - 1, -1]


def tell(world: World) -> list[int]:
    group = GpuGroup(world.group, SumOnHost(world.group))  # type: ignore[arg-type]
    numbers = torch.tensor(NUMBERS if world.rank == 0 else [77] * len(NUMBERS))
    group.broadcast(numbers)
    return numbers.tolist()


@pytest.mark.mpi(2)
def test_broadcasting_by_sums() -> None:
    assert run_ranks(2, tell) == [NUMBERS] * 2
