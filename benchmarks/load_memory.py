"""Peak memory of each rank while it loads its part of a checkpoint.

    python -m benchmarks.load_memory [--gigabytes 2] [--ranks 2] [--moe-weights fp8]
    python -m benchmarks.load_memory --device cuda --checkpoint FOLDER [--ranks 1] [--moe-weights mxfp4]

Makes a random bf16 GPT-OSS checkpoint of about that size, or takes the one given, loads it in bf16 (or its experts as
FP8, or in MXFP4) with the experts split over the ranks, and prints each rank's share of the weights, its peak resident
memory (VmHWM, mapped file pages included), the time and the bound: 1.3 × the share + 1 GB, or 8 GB where the weights
are on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import markdown, write
from rose_dist.cli.launch import Launch
from rose_dist.models.convert.random_weights import PRESETS, write_random_checkpoint

if TYPE_CHECKING:
    from rose_dist.layers.expert_matrices import MoeWeights


def load(folder: Path, kind: MoeWeights, device: str) -> None:
    """On a rank: load, and print what it took as a line of JSON."""
    import torch  # noqa: PLC0415

    from rose_dist.cli.engine_start import choose_device  # noqa: PLC0415
    from rose_dist.comm.layout import Layout  # noqa: PLC0415
    from rose_dist.comm.world import World  # noqa: PLC0415
    from rose_dist.models.build_options import BuildOptions  # noqa: PLC0415
    from rose_dist.models.loader import load_model  # noqa: PLC0415

    with World.join() as world:
        groups = world.groups(Layout.of(world.size))
        chosen = choose_device(device, world.local_rank)
        torch.zeros(1, device=chosen)  # the CUDA context is not the loader's
        before, started = peak(), time.perf_counter()
        model = load_model(folder, BuildOptions(groups, 512, torch.bfloat16, chosen, moe_weights=kind))
        if chosen.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        share = sum(parameter.nbytes for parameter in model.parameters())
        taken = torch.cuda.max_memory_allocated(chosen) if chosen.type == "cuda" else 0
        for figures in world.group.all_gather_objects({
            "rank": world.rank, "share": share, "before": before, "peak": peak(), "seconds": seconds, "gpu_peak": taken
        }):  # fmt: skip
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
    parser.add_argument(
        "--moe-weights", choices=["bf16", "fp8", "mxfp4"], default="bf16", help="as the experts are kept"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--checkpoint", type=Path, help="instead of a random one of --gigabytes")
    parser.add_argument("--machine", default=f"cpu-{os.cpu_count()}core", help="folder of the results")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load, arguments.moe_weights, arguments.device)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.checkpoint or Path(scratch, "model")
        if arguments.checkpoint is None:
            write_random_checkpoint(config_of_size(arguments.gigabytes), folder, layout="hf", weights="bf16")
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        launch = Launch(arguments.ranks, (), ())
        environment = launch.environment(os.environ)
        mpirun = launch.mpirun(environment)
        command = [*mpirun[: mpirun.index(sys.executable)], sys.executable, "-m", "benchmarks.load_memory"]
        command += ["--load", str(folder), "--moe-weights", arguments.moe_weights]
        command += ["--device", arguments.device]
        printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    on_gpu = arguments.device == "cuda"
    names = ("share", "before", "peak", *(["gpu_peak"] if on_gpu else []))
    rows: list[list[object]] = [
        [f["rank"], *(f"{f[name] / 1e9:.2f}" for name in names), f"{bound(f['share'], on_gpu) / 1e9:.2f}",
         f"{f['seconds']:.1f}"]
        for f in figures
    ]  # fmt: skip
    header = ["rank", "its weights, GB", "peak before loading, GB", "peak, GB", "bound, GB", "seconds"]
    if on_gpu:
        header.insert(4, "peak of the GPU, GB")
    kept = arguments.moe_weights
    text = f"A checkpoint of {size / 1e9:.2f} GB over {arguments.ranks} ranks, experts kept in {kept}.\n\n"
    text += markdown(header, rows)
    print(text)
    name = "load_memory" + ("" if kept == "bf16" else f"_{kept}") + ("_gpu" if on_gpu else "")
    write(arguments.machine, name, "Memory while loading", "python -m benchmarks.load_memory", text, figures)


def bound(share: int, on_gpu: bool) -> float:
    """Of the host's memory, in bytes."""
    return 8e9 if on_gpu else 1.3 * share + 1e9


if __name__ == "__main__":
    main()
