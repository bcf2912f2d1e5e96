"""The choice of the all-to-all, made once from the layout. Models see the protocol only."""

from __future__ import annotations

import logging

from rose_dist.comm.all_to_all.local import Local
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.mpi import Mpi
from rose_dist.comm.all_to_all.nvlink import NvLink, exchange_layout
from rose_dist.comm.all_to_all.peer_to_peer import PeerToPeer, network_layout
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig
from rose_dist.comm.all_to_all.split_tokens import SplitTokens, part_of
from rose_dist.comm.all_to_all.tensor_parallel import TensorParallel
from rose_dist.comm.symmetric_memory import SymmetricMemory
from rose_dist.comm.topology import Topology
from rose_dist.comm.world import Groups
from rose_dist.kernels.all_reduce import AllReduce
from rose_dist.kernels.arch import device_info

logger = logging.getLogger(__name__)


def create(
    config: AllToAllConfig, groups: Groups, gpu: GpuOptions | None = None, all_reduce: AllReduce | None = None,
    memory: SymmetricMemory | None = None,
) -> AllToAll:  # fmt: skip
    """The all-to-all for this rank. Collective over the rank's lockstep group. With `gpu` it takes tensors of that GPU;
    tensor-parallel ranks then need their group's `all_reduce`, experts spread over data-parallel
    ranks the symmetric `memory` of their expert-parallel group, made with `groups.topology.far` and with `region_bytes`
    left in it.

    Raises `ValueError` on every rank if they give different sizes, or nodes' sums are asked for that can't be had.
    """
    chosen = _choose(config, groups, gpu, all_reduce, memory)
    experts = chosen.local_experts
    held = f"experts {experts.start} to {experts.stop - 1}" if experts else "no experts"
    logger.info(
        "all-to-all: %s over %s, %s%s, this rank holds %s",
        type(chosen).__name__, groups.layout, groups.topology, _between_nodes(config, groups, gpu), held,
    )  # fmt: skip
    return chosen


def sums_pay(config: AllToAllConfig, groups: Groups) -> bool:
    """Whether `config.partial_sums` should be set: where rows travel over NVLink alone, and a rank gets one row of a
    token or more on average; with rail forwarding, where a node of several ranks does. A quarter of the bytes of
    combine or more are then saved.
    """
    if groups.layout.moe_mode != "data_parallel":
        return False
    if groups.topology.one_domain:
        return config.top_k >= groups.ep.size
    nodes = groups.topology.node_count
    return config.rail_forwarding and nodes < groups.ep.size and config.top_k >= nodes


def _between_nodes(config: AllToAllConfig, groups: Groups, gpu: GpuOptions | None) -> str:
    """How rows cross the network, for the log."""
    across = gpu is not None and groups.layout.moe_mode == "data_parallel" and not groups.topology.one_domain
    if not across or not config.rail_forwarding:
        return ""
    return ", rail forwarding" + (" and sums by node" if config.partial_sums else "")


def _choose(
    config: AllToAllConfig, groups: Groups, gpu: GpuOptions | None, all_reduce: AllReduce | None,
    memory: SymmetricMemory | None,
) -> AllToAll:  # fmt: skip
    layout, place = groups.layout, groups.place
    if layout.moe_mode == "data_parallel":
        if gpu is not None:
            return _between_gpus(config, groups, gpu, all_reduce, memory)
        if config.partial_sums and config.rail_forwarding and not groups.topology.one_domain:
            raise ValueError("CPU ranks add up results by rank, not by node: leave out partial_sums or rail_forwarding")
        if layout.tp > 1:
            return SplitTokens(config, groups.tp, lambda part: Mpi(part, groups.ep))
        return Mpi(config, groups.ep)
    if layout.tp == 1:
        return Local(config, gpu=gpu)
    return TensorParallel(config, groups.tp, place.expert_range(config.num_experts), gpu, all_reduce)


def _between_gpus(
    config: AllToAllConfig, groups: Groups, gpu: GpuOptions, all_reduce: AllReduce | None,
    memory: SymmetricMemory | None,
) -> AllToAll:  # fmt: skip
    if memory is None:
        raise ValueError("experts spread over data-parallel GPUs need the symmetric memory of their group")
    take, sms = memory.take, min(groups.ep.all_gather_objects(device_info(gpu.device.index).sms))

    def between(part: AllToAllConfig) -> AllToAll:
        if groups.topology.one_domain:
            return NvLink(part, groups.ep, gpu, take, sms)
        return PeerToPeer(part, groups.ep, groups.topology, gpu, take, sms)

    if groups.layout.tp == 1:
        return between(config)
    if all_reduce is None:
        raise ValueError("tensor-parallel GPUs need their group's all-reduce to gather their tokens' sums")
    return SplitTokens(config, groups.tp, between, all_reduce)


def region_bytes(config: AllToAllConfig, topology: Topology, in_flight: int = 1, *, tp: int = 1) -> int:
    """What `create` takes of the symmetric memory for experts spread over the GPUs of `topology`, each `tp` of which
    have the same tokens.
    """
    part = part_of(config, tp)
    if topology.one_domain:
        return exchange_layout(part, len(topology.nodes), in_flight).region_bytes
    layout = network_layout(part, topology, in_flight)
    return layout.exchange.region_bytes + layout.region_bytes
