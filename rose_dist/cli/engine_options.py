"""The options that serve, generate, chat and bench have in common, and the engine's settings that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    import torch

    from rose_dist.engine.config import DType, EngineConfig, LoadFormat
    from rose_dist.layers.expert_matrices import MoeActivations, MoeWeights

Command = TypeVar("Command", bound=Callable[..., Any])


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

    def config(self, device: torch.device) -> EngineConfig:
        """Of a rank with this device. Raises `EngineConfigError` for a setting out of range."""
        from rose_dist.engine.config import EngineConfig, ladder_for, prefill_ladder_for  # noqa: PLC0415  imports torch
        from rose_dist.models.loader import read_model_config  # noqa: PLC0415

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
    click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens a KV block."),
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
    click.option(
        "--max-waiting",
        type=click.IntRange(min=0),
        default=100,
        show_default=True,
        help="Requests that may queue on a replica.",
    ),
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
    click.option(
        "--join-timeout",
        type=click.FloatRange(min=1),
        default=60.0,
        show_default=True,
        help="Seconds that a stage of start-up may take.",
    ),
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
