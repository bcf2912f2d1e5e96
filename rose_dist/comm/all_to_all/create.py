"""The choice of the all-to-all, made once from the layout. Models see the protocol only."""

from __future__ import annotations

import logging

from rose_dist.comm.all_to_all.local import Local
from rose_dist.comm.all_to_all.local_gpu import GpuOptions
from rose_dist.comm.all_to_all.mpi import Mpi
from rose_dist.comm.all_to_all.protocol import AllToAll, AllToAllConfig
from rose_dist.comm.all_to_all.split_tokens import SplitTokens
from rose_dist.comm.all_to_all.tensor_parallel import TensorParallel
from rose_dist.comm.world import Groups
from rose_dist.kernels.all_reduce import AllReduce

logger = logging.getLogger(__name__)


def create(
    config: AllToAllConfig, groups: Groups, gpu: GpuOptions | None = None, all_reduce: AllReduce | None = None
) -> AllToAll:
    """The all-to-all for this rank. Collective over the rank's lockstep group. With `gpu` it takes tensors of that GPU;
    experts spread over tensor-parallel ranks then need their group's `all_reduce`.

    Raises `ValueError` on every rank if they give different sizes.
    """
    chosen = _choose(config, groups, gpu, all_reduce)
    experts = chosen.local_experts
    held = f"experts {experts.start} to {experts.stop - 1}" if experts else "no experts"
    logger.info("all-to-all: %s over %s, this rank holds %s", type(chosen).__name__, groups.layout, held)
    return chosen


def _choose(config: AllToAllConfig, groups: Groups, gpu: GpuOptions | None, all_reduce: AllReduce | None) -> AllToAll:
    layout, place = groups.layout, groups.place
    local_experts = place.expert_range(config.num_experts)
    if layout.moe_mode == "data_parallel":
        if gpu is not None:
            raise ValueError(f"GPUs with layout {layout}: experts over data-parallel ranks have no GPU exchange yet")
        if layout.tp > 1:
            return SplitTokens(config, groups.tp, lambda part: Mpi(part, groups.ep))
        return Mpi(config, groups.ep)
    if layout.tp == 1:
        return Local(config, gpu=gpu)
    return TensorParallel(config, groups.tp, local_experts, gpu, all_reduce)
