"""What `test_two_gpus` runs on every rank of a layout, in fresh processes: NVSHMEM starts once in each.

    mpirun -n 2 python -m tests.engine.two_gpus CHECKPOINT FOLDER [--tp 2] [--dp 2] [--ep 2] [--device cpu]

Each replica's first rank leaves `FOLDER/rank.pt`: logits of its prompt, in chunks of many and of few tokens, and what
it generates greedily, with graphs and overlap and without.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from rose_dist.comm.layout import Layout
from rose_dist.comm.world import Groups, World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.engine import Engine, Outcome
from rose_dist.layers.expert_matrices import MoeWeights
from tests.checkpoints import random_prompt
from tests.engine.test_engine import greedy
from tests.engine.test_gpu import chunk_logits

CHUNKS = (64, 8)
LENGTH = 160
GENERATED = 24
LADDER = (1, 4)


def prompt_of(replica: int, vocabulary: int = 512) -> list[int]:
    return random_prompt(LENGTH, 10 + replica, vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    for size in ("tp", "dp", "ep"):
        parser.add_argument(f"--{size}", type=int)
    parser.add_argument("--kind", default="mxfp4")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    with World.join() as world:
        groups = world.groups(Layout.of(world.size, arguments.tp, arguments.dp, arguments.ep))
        found = found_by(groups, world.local_rank, arguments.checkpoint, arguments.device, arguments.kind)
        if groups.tp.rank == 0:
            torch.save(found, arguments.folder / f"{groups.place.dp_rank}.pt")


def found_by(groups: Groups, local_rank: int, checkpoint: Path, device: str, kind: MoeWeights) -> dict[str, object]:
    gpu = device == "cuda"
    config = EngineConfig(
        checkpoint, device=torch.device("cuda", local_rank) if gpu else torch.device("cpu"),
        dtype="bfloat16" if gpu else "float32", moe_weights=kind if gpu else "bf16", kv_tokens=8192,
        max_step_tokens=max(CHUNKS), max_running=max(CHUNKS), max_context=2048, overlap=True,
        ladder=LADDER if gpu else (),
    )  # fmt: skip
    if gpu:
        torch.cuda.set_device(config.device)
    start = time.perf_counter()

    def show(done: str) -> None:
        print(f"rank {groups.place.rank}, {time.perf_counter() - start:.0f} s: {done}", flush=True)

    engine = Engine.load(config, groups)
    show("model loaded, graphs captured")
    prompt = prompt_of(groups.place.dp_rank)
    found: dict[str, object] = {}
    for chunk in CHUNKS:
        found[f"logits {chunk}"] = chunk_logits(engine.runner, prompt, chunk)
        show(f"logits in chunks of {chunk}")
    graphs, engine.runner._graphs = engine.runner._graphs, None
    found["plain"] = generated(engine, prompt)
    show("generated without graphs")
    engine.runner._graphs = graphs
    found["graphs"] = generated(engine, prompt)
    show("generated with graphs")
    return found


def generated(engine: Engine, prompt: list[int]) -> list[list[int]]:
    """By request, the ids of three requests at once; steps are collective."""
    if engine.leader:
        for number, length in enumerate((LENGTH, 3, 70)):
            assert not engine.submit(b"", greedy(f"{number}", prompt[:length], GENERATED))
    tokens: list[list[int]] = [[], [], []]
    while True:
        outcome, deliveries = engine.step()
        for _, output in deliveries:
            tokens[int(output.request_id)] += output.token_ids
        if outcome is not Outcome.WORKED:
            return tokens


if __name__ == "__main__":
    main()
