"""A decode step of two tensor-parallel ranks on emulated GPUs, layers and all, against one rank on the CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")

from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.tensor_parallel import TensorParallel
from rose_dist.comm.expert_placement import Placement
from rose_dist.comm.gpu_group import GpuGroup, as_bf16, from_bf16
from rose_dist.comm.group import Group
from rose_dist.comm.layout import Layout, even_split
from rose_dist.comm.topology import Topology
from rose_dist.comm.world import Groups, World
from rose_dist.engine import decode_batch
from rose_dist.engine.decode_batch import DecodeBatch, TableShape
from rose_dist.engine.runner import ModelRunner
from rose_dist.engine.step import SequenceStep, Step
from rose_dist.kernels import launch, layer_meeting
from rose_dist.kernels.all_reduce import AllReduce, Sizes
from rose_dist.kernels.paged_attention import DecodeWorkspace
from rose_dist.layers.forward_batch import KVStorage
from rose_dist.models.build_options import BuildOptions
from rose_dist.models.convert.random_weights import write_random_checkpoint
from rose_dist.models.gpt_oss import GptOssForCausalLM
from rose_dist.models.loader import load_model
from tests.comm.emulated import SMS, Cluster
from tests.engine.test_emulated_gpu import CONFIG, SIZES, assert_alike, resident
from tests.kernels import emulation
from tests.kernels.conftest import emulated

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16
DECODE = Step(
    [
        SequenceStep([7], 0, [(0, [1]), (0, [1])], True),
        SequenceStep([9], 20, [(0, [3, 5]), (0, [2, 4])], True),
    ]
)


class OneOf(Group):
    """A rank whose peers say what it says."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None)
        self.rank, self.size = rank, size

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size


@dataclass
class Resident:
    """What `resident` needs of a GPU."""

    cluster: Cluster

    @property
    def machine(self) -> Any:
        return self.cluster.peers.machine

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return self.cluster.tensor(values) if values.numel() else values.as_subclass(emulation.EmulatedTensor)


def options_of(layout: Layout, rank: int) -> BuildOptions:
    tp, alone = OneOf(rank, layout.tp), Group(None)
    groups = Groups(
        layout, layout.at(rank), tp, tp if layout.ep > 1 else alone, tp, Topology((0,) * layout.ep, rank % layout.ep)
    )
    return BuildOptions(groups, 32, BF16, moe_weights="mxfp4")


def on_gpu(model: GptOssForCausalLM, options: BuildOptions, reduce: AllReduce, place: Any) -> None:
    """Put the weights into emulated memory, and give the model the collectives of a GPU."""
    for module in model.modules():
        module.__dict__.pop("packed", None)
        for name, parameter in list(module._parameters.items()):
            del module._parameters[name]
            module.__dict__[name] = None if parameter is None else place(parameter.data)
    inner, layout = model.model, options.groups.layout
    inner.cos, inner.sin = place(inner.cos), place(inner.sin)
    group = GpuGroup(options.groups.tp, reduce)
    inner.embed_tokens.tp = group
    held = layout.at(group.rank).expert_range(inner.exchange.config.num_experts)
    exchange = TensorParallel(inner.exchange.config, options.groups.tp, held, GpuOptions(device=DEVICE), reduce)
    for layer, expert_map in zip(inner.decoder_layers, inner.expert_maps, strict=True):
        layer.self_attn.tp, layer.mlp.exchange = group, exchange
        expert_map.load, expert_map._table = place(expert_map.load), place(expert_map._table)


@torch.inference_mode()
@pytest.mark.parametrize("ep", [1, 2])
def test_a_decode_step_of_two_ranks_is_that_of_one(ep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts sliced, and spread by a placement that is not the first one."""
    torch.manual_seed(1)  # with others a token may lie so near two experts that roundings decide
    # An expert, or half of one, has as many columns in one layer as in the other, so that both go in one launch.
    changed = {"num_experts": 32, "intermediate_size": 2 // ep * CONFIG["hidden_size"]}
    write_random_checkpoint(CONFIG | changed, tmp_path)
    whole = BuildOptions(World.join().groups(Layout.of(1)), 32, BF16, moe_weights="mxfp4")
    plain = ModelRunner(load_model(tmp_path, whole), SIZES)
    for storage in plain.storages:
        storage.keys.copy_(torch.randn(storage.keys.shape))
        storage.values.copy_(torch.randn(storage.values.shape))
    caches = [(storage.keys.clone(), storage.values.clone()) for storage in plain.storages]
    expected = plain.model.model(plain._batch(DECODE))

    layout = Layout.of(2, tp=2, ep=ep)
    parts = [options_of(layout, rank) for rank in range(2)]
    initial = Placement.initial
    order = (*range(3, 32), 0, 1, 2) if ep == 2 else tuple(range(32))
    monkeypatch.setattr(
        Placement, "initial", lambda *given: Placement(32, ep, order) if given[1] == ep else initial(*given)
    )
    models = [load_model(tmp_path, part) for part in parts]
    hidden = models[0].config.hidden_size
    sizes = Sizes(2, hidden, BF16, 32, SMS)
    emulated(monkeypatch, "sm_90a")
    cluster = Cluster(2, sizes.region_bytes, monkeypatch)
    place, ran = resident(Resident(cluster), monkeypatch), []
    # A graph begins when all before it has ended; here the model's launches would overlap with the copy.
    monkeypatch.setattr(decode_batch, "read_host", lambda source, target: target.copy_(source))
    run = launch.run
    monkeypatch.setattr(launch, "run", lambda kernel, *given: ran.append(type(kernel).__name__) or run(kernel, *given))
    found = []
    for rank, (model, options) in enumerate(zip(models, parts, strict=True)):
        ran.clear()
        monkeypatch.setattr(layer_meeting, "_meetings", {})  # a process's own
        with cluster.on(rank):
            reduce = AllReduce(sizes, DEVICE, rank, tuple(cluster.peers.addresses[:2]))
            on_gpu(model, options, reduce, place)
            storages = [KVStorage(*(place(t[:, :, rank : rank + 1].clone()) for t in cache)) for cache in caches]
            workspace = DecodeWorkspace.allocate(
                requests=4, query_heads=2, key_heads=1, head_dim=64, context=128, device=DEVICE
            )
            shapes = [TableShape.of(spec, 16, 128) for spec in plain.specs]
            batch = DecodeBatch(4, shapes, storages, place(torch.zeros(4, dtype=torch.int64)), workspace)
            for fixed in (batch._numbers, batch._changes):
                fixed.device = place(fixed.device)
            batch._tables = [place(table) for table in batch._tables]
            batch.fill(DECODE, 3)
            found.append(model.model(batch.forward_batch(3)))
    cluster.peers.run(gang_warps=1)  # a warp that polls must not slow down its neighbours, or waits expire
    layer = ["LinearRotary", "DecodeAttention", "LinearReduce", "RouteRows", "ExpertLinear", "CombineReduceNorm"]
    assert ran == ["Embed", "OneShot", "RMSNorm", *2 * layer], ran
    for one in found:
        assert_alike(one[:2], expected)
    assert torch.equal(found[0][:2].as_subclass(torch.Tensor), found[1][:2].as_subclass(torch.Tensor))
    loads = [[one.load.tolist() for one in model.model.expert_maps] for model in models]
    assert loads[0] == loads[1]
    assert all(sum(load) == 2 * CONFIG["experts_per_token"] for load in loads[0])


@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "dtype"),
    [(2, 1, 50, BF16), (2, 3, 101, BF16), (3, 5, 64, BF16), (3, 1, 7, BF16), (2, 2, 33, torch.float32)],
)
def test_columns_are_gathered_on_the_first_rank(
    ranks: int, rows: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several exchanges where inboxes are small, and twice."""
    sizes = Sizes(ranks, 8, dtype, 1, SMS)
    emulated(monkeypatch, "sm_90a")
    cluster = Cluster(ranks, sizes.region_bytes, monkeypatch)
    place, found = resident(Resident(cluster), monkeypatch), []
    widths = [len(even_split(columns, ranks, rank)) for rank in range(ranks)]
    wholes = torch.randn(2, rows, columns)
    for rank in range(ranks):
        with cluster.on(rank):
            group = GpuGroup(OneOf(rank, ranks), AllReduce(sizes, DEVICE, rank, tuple(cluster.peers.addresses[:ranks])))
            parts = [whole.split(widths, 1)[rank].contiguous() for whole in wholes]
            if dtype is torch.float32:  # what is done with the result is done before the launches run
                found.append([group.reduce.gather_columns(place(as_bf16(part)), columns) for part in parts])
            else:
                found.append([group.gather_columns(place(part), widths) for part in parts])
    cluster.peers.run(seed=columns, gang_warps=1)
    assert found[1:] == [[None, None]] * (ranks - 1)
    for got, whole in zip(found[0], wholes, strict=True):
        result = got.as_subclass(torch.Tensor)
        assert torch.equal(from_bf16(result) if dtype is torch.float32 else result, whole.to(dtype).float())


def test_fp32_travels_as_three_bf16() -> None:
    x = torch.randn(7, 50, dtype=torch.float64).mul(torch.logspace(-30, 30, 50, dtype=torch.float64)).float()
    parts = as_bf16(x)
    assert torch.equal(parts, parts.bfloat16().float())
    assert torch.equal(from_bf16(parts), x)


def test_infinite_fp32_travels_as_what_it_is() -> None:
    x = torch.tensor([[math.inf, -math.inf, 1.0]])
    assert torch.equal(from_bf16(as_bf16(x)), x)
