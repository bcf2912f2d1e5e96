"""What serve, generate, chat and bench have in common: their options, and the way to an engine on every rank."""

from __future__ import annotations

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

if TYPE_CHECKING:
    from rose_dist.comm.world import Groups, World
    from rose_dist.engine.config import DType, EngineConfig
    from rose_dist.engine.engine import Engine

Command = TypeVar("Command", bound=Callable[..., Any])
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineOptions:
    """The options as given; None leaves a size to its default."""

    model: Path
    tp: int | None
    dp: int | None
    ep: int | None
    dtype: str
    block_size: int
    kv_tokens: int
    max_step_tokens: int
    max_running: int
    max_waiting: int
    max_context: int | None
    prefix_cache: bool
    redundant_experts: int
    force_remote: int | None
    join_timeout: float
    log_dir: Path | None

    def config(self) -> EngineConfig:
        """Raises `EngineConfigError` for a setting out of range."""
        from rose_dist.engine.config import EngineConfig  # noqa: PLC0415  imports torch

        return EngineConfig(
            model=self.model,
            dtype=cast("DType", self.dtype),
            block_size=self.block_size,
            kv_tokens=self.kv_tokens,
            max_step_tokens=self.max_step_tokens,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_context=self.max_context,
            prefix_cache=self.prefix_cache,
            redundant_experts=self.redundant_experts,
        )


_OPTIONS = (
    click.argument("model", type=click.Path(path_type=Path)),
    click.option("--tp", type=click.IntRange(min=1), help="Tensor-parallel ranks a replica; default 1."),
    click.option("--dp", type=click.IntRange(min=1), help="Replicas with requests of their own; default ranks / tp."),
    click.option("--ep", type=click.IntRange(min=1), help="Ranks that share one set of experts; default all."),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True),
    click.option("--block-size", default=16, show_default=True, help="Tokens a KV block."),
    click.option("--kv-tokens", default=32768, show_default=True, help="Tokens that a rank's KV cache holds."),
    click.option("--max-step-tokens", default=512, show_default=True, help="Token budget of one step on a rank."),
    click.option("--max-running", default=64, show_default=True, help="Requests that run at once on a replica."),
    click.option("--max-waiting", default=100, show_default=True, help="Requests that may queue on a replica."),
    click.option("--max-context", type=click.IntRange(min=2), help="Most tokens of prompt and output."),
    click.option("--prefix-cache/--no-prefix-cache", default=True, show_default=True),
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
    from rose_dist.comm.layout import Layout  # noqa: PLC0415  imports MPI
    from rose_dist.comm.world import World  # noqa: PLC0415
    from rose_dist.models.gpt_oss import check_layout  # noqa: PLC0415
    from rose_dist.models.loader import read_model_config  # noqa: PLC0415

    with World.join(options.join_timeout, options.log_dir, log_level) as world:
        config = options.config()
        world.require_agreement(shared_settings(options))
        layout = Layout.of(world.size, options.tp, options.dp, options.ep)
        check_layout(read_model_config(config.model), layout, options.redundant_experts)
        share_cores(world)
        yield world, world.groups(layout, options.force_remote), config


def shared_settings(options: EngineOptions) -> dict[str, str]:
    """What must be the same on every rank: the options, and the files of the model, which each host may have its own
    copy of.
    """
    settings = {name: str(value) for name, value in asdict(options).items() if name not in ("model", "log_dir")}
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
        "%.2f GB of weights on this rank, %s; KV cache for %d tokens, at most %.2f GB",
        weights / 1e9,
        groups.layout,
        engine.scheduler.kv.capacity,
        engine.runner.kv_bytes / 1e9,
    )
    return engine
