"""The way from the options to an engine on every rank."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from rose_dist.cli.engine_options import EngineOptions
from rose_dist.cli.progress import LoadProgress
from rose_dist.comm.layout import Layout

if TYPE_CHECKING:
    import torch

    from rose_dist.comm.world import Groups, World
    from rose_dist.engine.config import EngineConfig
    from rose_dist.engine.engine import Engine

logger = logging.getLogger(__name__)


@contextmanager
def joined(options: EngineOptions, log_level: int = logging.INFO) -> Iterator[tuple[World, Groups, EngineConfig]]:
    """This rank's place in the job; everything that can be checked before weights are read is."""
    from rose_dist.comm.world import World  # noqa: PLC0415  imports torch
    from rose_dist.models.gpt_oss import check_layout  # noqa: PLC0415
    from rose_dist.models.loader import read_model_config  # noqa: PLC0415

    with World.join(options.join_timeout, options.log_dir, log_level) as world:
        config = options.config(choose_device(options.device, world.local_rank))
        world.require_agreement(shared_settings(options) | {"device": config.device.type})
        layout = Layout.of(world.size, options.tp, options.dp, expert_ranks(options, config, world.size))
        check_layout(read_model_config(config.model), layout, options.redundant_experts)
        share_cores(world)
        groups = world.groups(layout, options.force_remote)
        if options.rail_forwarding:
            groups.topology.require_rails()
        yield world, groups, config


def expert_ranks(options: EngineOptions, config: EngineConfig, ranks: int) -> int | None:
    """`--ep`; None: `Layout.of`'s default.

    Two tensor-parallel GPUs hold half of every MXFP4 expert rather than half of the experts: of a few tokens' experts
    one of them may have all, but of halves both have as many. Nothing says that yet for prompts in FP8, nor for FP8
    experts, and copies of experts are for ranks that hold whole ones.
    """
    halves = config.moe_weights == "mxfp4" and config.moe_activations == "bf16" and not config.redundant_experts
    tp = Layout.of(ranks, options.tp, options.dp).tp
    if options.ep is None and tp == ranks == 2 and config.device.type == "cuda" and halves:
        return 1
    return options.ep


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """The device of a host's rank. Where a launcher lets each rank see one GPU, it is that one."""
    import torch  # noqa: PLC0415

    from rose_dist.engine.config import EngineConfigError  # noqa: PLC0415

    seen = 0 if wanted == "cpu" else torch.cuda.device_count()
    if seen == 0 or (wanted == "auto" and 1 < seen <= local_rank):
        if wanted == "cuda":
            raise EngineConfigError("--device cuda, but this process sees no GPU; see `rose doctor`")
        return torch.device("cpu")
    if 1 < seen <= local_rank:
        raise EngineConfigError(f"rank {local_rank} of this host has no GPU of its own, there are {seen}")
    device = torch.device("cuda", local_rank % seen)
    torch.cuda.set_device(device)
    return device


def shared_settings(options: EngineOptions) -> dict[str, str]:
    """What must be the same on every rank: the options, and the files of the model, which each host may have its own
    copy of.
    """
    settings = {
        name: "unset" if value is None else str(value)
        for name, value in asdict(options).items()
        if name not in ("model", "log_dir")
    }
    index = hashlib.sha256()
    for path in sorted([*options.model.glob("*.json"), *options.model.glob("*.safetensors")]):
        content = path.read_bytes() if path.suffix == ".json" else b""
        index.update(f"{path.name} {path.stat().st_size} ".encode() + content)
    return settings | {"model files": index.hexdigest()[:12]}


def share_cores(world: World) -> None:
    """Unless the launcher has said otherwise, ranks of one host share its cores evenly."""
    import torch  # noqa: PLC0415

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.local_size))


def load_engine(world: World, groups: Groups, config: EngineConfig) -> Engine:
    """Read this rank's part of the checkpoint, with a progress bar on rank 0."""
    from rose_dist.engine.engine import Engine  # noqa: PLC0415

    with world.stage("load the model"), LoadProgress(shown=world.rank == 0) as progress:
        engine = Engine.load(config, groups, progress)
    weights = sum(parameter.nbytes for parameter in engine.runner.model.parameters())
    logger.info(
        "%.2f GB of weights on this rank's %s, %s; KV cache for %d tokens, at most %.2f GB",
        weights / 1e9,
        config.device,
        groups.layout,
        engine.scheduler.kv.capacity,
        engine.runner.kv_bytes / 1e9,
    )
    gc.collect()
    gc.freeze()  # a collection of all generations in the middle of a step would go over every library's objects
    return engine
