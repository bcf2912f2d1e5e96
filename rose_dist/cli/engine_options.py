"""What serve, generate, chat and bench have in common: their options, and the way to an engine on every rank."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from rose_dist.cli.progress import LoadProgress
from rose_dist.comm.layout import Layout

if TYPE_CHECKING:
    import torch

    from rose_dist.comm.world import Groups, World
    from rose_dist.engine.config import DType, EngineConfig, LoadFormat
    from rose_dist.engine.engine import Engine
    from rose_dist.layers.expert_matrices import MoeActivations, MoeWeights

Command = TypeVar("Command", bound=Callable[..., Any])
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """The options as given; None leaves a size to its default."""

    model: Path
    tp: int | None
    dp: int | None
    ep: int | None
    device: str
    dtype: str | None
    load_format: str
    moe_weights: str
    moe_activations: str
    gpu_memory_utilization: float
    block_size: int
    kv_tokens: int | None
    max_step_tokens: int | None
    max_running: int | None
    max_waiting: int
    max_context: int | None
    prefix_cache: bool
    prefill_graphs: bool
    redundant_experts: int
    force_remote: int | None
    rail_forwarding: bool
    join_timeout: float
    log_dir: Path | None

    def config(self, local_rank: int) -> EngineConfig:
        """Raises `EngineConfigError` for a setting out of range."""
        from rose_dist.engine.config import EngineConfig, ladder_for, prefill_ladder_for  # noqa: PLC0415  imports torch
        from rose_dist.models.loader import read_model_config  # noqa: PLC0415

        device = choose_device(self.device, local_rank)
        gpu = device.type == "cuda"
        kept = self.moe_weights
        if kept == "auto":
            kept = "mxfp4" if gpu and read_model_config(self.model).mxfp4 else "bf16"
        max_step_tokens = self.max_step_tokens or (8192 if gpu else 512)
        max_running = self.max_running or min(128 if gpu else 64, max_step_tokens)
        return EngineConfig(
            model=self.model,
            device=device,
            dtype=cast("DType", self.dtype or ("bfloat16" if gpu else "float32")),
            load_format=cast("LoadFormat", self.load_format),
            moe_weights=cast("MoeWeights", kept),
            moe_activations=cast("MoeActivations", self.moe_activations),
            block_size=self.block_size,
            kv_tokens=self.kv_tokens or (None if gpu else 32768),
            memory_share=self.gpu_memory_utilization,
            max_step_tokens=max_step_tokens,
            max_running=max_running,
            max_waiting=self.max_waiting,
            max_context=self.max_context,
            prefix_cache=self.prefix_cache,
            redundant_experts=self.redundant_experts,
            rail_forwarding=self.rail_forwarding,
            ladder=ladder_for(max_running) if gpu else (),
            prefill_ladder=prefill_ladder_for(max_step_tokens) if gpu and self.prefill_graphs else (),
            overlap=gpu,
        )


_OPTIONS = (
    click.argument("model", type=click.Path(path_type=Path)),
    click.option("--tp", type=click.IntRange(min=1), help="Tensor-parallel ranks a replica; default 1."),
    click.option("--dp", type=click.IntRange(min=1), help="Replicas with requests of their own; default ranks / tp."),
    click.option(
        "--ep",
        type=click.IntRange(min=1),
        help="Ranks that share one set of experts; default all, or 1 for two GPUs with --tp 2.",
    ),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="auto: a GPU if there is one for this rank.",
    ),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Default bfloat16 on GPUs, else float32."),
    click.option(
        "--load-format",
        type=click.Choice(["checkpoint", "random"]),
        default="checkpoint",
        show_default=True,
        help="random: weights made up on the device from config.json alone; MODEL may be gpt-oss-20b or gpt-oss-120b.",
    ),
    click.option(
        "--moe-weights",
        type=click.Choice(["auto", "mxfp4", "fp8", "bf16"]),
        default="auto",
        show_default=True,
        help="Experts in memory: mxfp4 as stored, fp8 with a scale for 128 x 128 values, bf16 decoded to --dtype. "
        "auto: as stored on GPUs, decoded on CPUs.",
    ),
    click.option(
        "--moe-activations",
        type=click.Choice(["bf16", "fp8"]),
        default="bf16",
        show_default=True,
        help="What the experts multiply a prompt's rows as. bf16: --dtype, as the model's own code. fp8: e4m3, faster, "
        "less precise, on Hopper with --moe-weights mxfp4.",
    ),
    click.option(
        "--gpu-memory-utilization",
        type=click.FloatRange(0, 1, min_open=True),
        default=0.9,
        show_default=True,
        help="Share of a GPU's memory for weights, activations and, with what is left, the KV cache.",
    ),
    click.option("--block-size", default=16, show_default=True, help="Tokens a KV block."),
    click.option(
        "--kv-tokens",
        type=click.IntRange(min=1),
        help="Tokens that a rank's KV cache holds; default what fits into a GPU, 32768 on CPUs.",
    ),
    click.option(
        "--max-step-tokens",
        type=click.IntRange(min=1),
        help="Token budget of one step on a rank; default 8192 on GPUs, 512 on CPUs.",
    ),
    click.option(
        "--max-running",
        type=click.IntRange(min=1),
        help="Requests that run at once on a replica; default 128 on GPUs, 64 on CPUs.",
    ),
    click.option("--max-waiting", default=100, show_default=True, help="Requests that may queue on a replica."),
    click.option("--max-context", type=click.IntRange(min=2), help="Most tokens of prompt and output."),
    click.option("--prefix-cache/--no-prefix-cache", default=True, show_default=True),
    click.option(
        "--prefill-graphs/--no-prefill-graphs",
        default=True,
        show_default=True,
        help="With one GPU a replica, capture steps with up to 4,096 tokens of prompts too as CUDA graphs: all but "
        "attention, on Hopper that as well.",
    ),
    click.option(
        "--redundant-experts",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Places of each layer for second copies of popular experts.",
    ),
    click.option(
        "--force-remote",
        type=click.IntRange(min=1),
        metavar="RANKS",
        help="Take every so many ranks of a host for a node of their own: expert rows between these go by network.",
    ),
    click.option(
        "--rail-forwarding",
        is_flag=True,
        help="Between nodes, send a token's row once to each node, to the GPU with the sender's place there, which "
        "passes it on; results come back as one sum a node where that is less.",
    ),
    click.option("--join-timeout", default=60.0, show_default=True, help="Seconds that a stage of start-up may take."),
    click.option("--log-dir", type=click.Path(path_type=Path), help="Where ranks other than 0 write their logs."),
)


def engine_options(function: Command) -> Command:
    """Give a command the options of `EngineOptions`, as its first argument."""

    @wraps(function)
    def wrapped(**arguments: Any) -> Any:
        own = {name: arguments.pop(name) for name in EngineOptions.__dataclass_fields__}
        return function(EngineOptions(**own), **arguments)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


@contextmanager
def joined(options: EngineOptions, log_level: int = logging.INFO) -> Iterator[tuple[World, Groups, EngineConfig]]:
    """This rank's place in the job; everything that can be checked before weights are read is."""
    from rose_dist.comm.world import World  # noqa: PLC0415  imports torch
    from rose_dist.models.gpt_oss import check_layout  # noqa: PLC0415
    from rose_dist.models.loader import read_model_config  # noqa: PLC0415

    with World.join(options.join_timeout, options.log_dir, log_level) as world:
        config = options.config(world.local_rank)
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
