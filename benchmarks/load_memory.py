"""Peak memory of each rank while it loads its part of a checkpoint.

    python -m benchmarks.load_memory [--gigabytes 2] [--ranks 2] [--moe-weights fp8]

Makes a random bf16 GPT-OSS checkpoint of about that size, loads it in bf16 (or its experts as FP8) with the experts
split over the ranks, and prints each rank's share of the weights, its peak resident memory (VmHWM, mapped file pages
included) and the bound: 1.3 × the share + 1 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import markdown, write
from rose_dist.cli.launch import Launch
from rose_dist.models.convert.random_weights import PRESETS, write_random_checkpoint

if TYPE_CHECKING:
    from rose_dist.layers.expert_matrices import MoeWeights


def load(folder: Path, kind: MoeWeights) -> None:
    """On a rank: load, and print what it took as a line of JSON."""
    import torch  # noqa: PLC0415

    from rose_dist.comm.layout import Layout  # noqa: PLC0415
    from rose_dist.comm.world import World  # noqa: PLC0415
    from rose_dist.models.build_options import BuildOptions  # noqa: PLC0415
    from rose_dist.models.loader import load_model  # noqa: PLC0415

    with World.join() as world:
        groups = world.groups(Layout.of(world.size))
        before = peak()
        model = load_model(folder, BuildOptions(groups, 512, torch.bfloat16, moe_weights=kind))
        share = sum(parameter.nbytes for parameter in model.parameters())
        for figures in world.group.all_gather_objects(
            {"rank": world.rank, "share": share, "before": before, "peak": peak()}
        ):
            if world.rank == 0:
                print(json.dumps(figures), flush=True)


def peak() -> int:
    """Bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) << 10


def config_of_size(gigabytes: float) -> dict[str, Any]:
    """Layers of 8 experts of 1024 × 1024, as many as it takes."""
    shape = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16, "head_dim": 64}
    layer_bytes = 2 * (8 * 3 * 1024 * 1024 + 3 * 1024 * 1024)
    return dict(PRESETS["tiny"]) | shape | {"num_hidden_layers": round(gigabytes * 1e9 / layer_bytes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--moe-weights", choices=["bf16", "fp8"], default="bf16", help="as the experts are kept")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}core", help="folder of the results")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load, arguments.moe_weights)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        write_random_checkpoint(config_of_size(arguments.gigabytes), folder, layout="hf", weights="bf16")
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        launch = Launch(arguments.ranks, (), ())
        environment = launch.environment(os.environ)
        mpirun = launch.mpirun(environment)
        command = [*mpirun[: mpirun.index(sys.executable)], sys.executable, "-m", "benchmarks.load_memory"]
        command += ["--load", str(folder), "--moe-weights", arguments.moe_weights]
        printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    rows: list[list[object]] = [
        [f["rank"], *(f"{f[name] / 1e9:.2f}" for name in ("share", "before", "peak")), f"{bound(f['share']) / 1e9:.2f}"]
        for f in figures
    ]
    header = ["rank", "its weights, GB", "peak before loading, GB", "peak, GB", "bound, GB"]
    kept = arguments.moe_weights
    text = f"A checkpoint of {size / 1e9:.2f} GB over {arguments.ranks} ranks, experts kept in {kept}.\n\n"
    text += markdown(header, rows)
    print(text)
    name = "load_memory" if kept == "bf16" else f"load_memory_{kept}"
    write(arguments.machine, name, "Memory while loading", "python -m benchmarks.load_memory", text, figures)


def bound(share: int) -> float:
    return 1.3 * share + 1e9


if __name__ == "__main__":
    main()
