"""The cost of a decode step's MoE exchanges between CPU ranks: microseconds a dispatch + combine pair.

    mpirun -n 2 --oversubscribe python benchmarks/all_to_all_cpu.py [--tp 2]

A step of 30 layers is measured as a whole, with the experts' work left out, from a common start; the figures are the
slowest rank's.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from rose_dist.comm.all_to_all.create import create
from rose_dist.comm.all_to_all.protocol import AllToAllConfig, Routing
from rose_dist.comm.layout import Layout
from rose_dist.comm.world import Groups, World

LAYERS = 30
STEPS = 40
EXPERTS, TOP_K = 32, 4


def measure(groups: Groups, tokens: int, hidden: int, dtype: torch.dtype) -> tuple[float, float]:
    """Microseconds a pair: the median of the steps, and the least."""
    moe = create(
        AllToAllConfig(num_experts=EXPERTS, top_k=TOP_K, hidden=hidden, max_tokens=tokens, dtype=dtype), groups
    )
    generator = torch.Generator().manual_seed(groups.place.dp_rank)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(LAYERS, tokens, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K].int()
    weights = torch.rand(tokens, TOP_K, generator=generator)
    out = torch.empty_like(x)
    times = []
    for _ in range(STEPS):
        groups.lockstep.barrier()
        start = time.perf_counter()
        for layer in range(LAYERS):
            dispatched = moe.dispatch(x, Routing(ids[layer], weights))
            moe.combine(dispatched.x, dispatched, out=out)
        times.append((time.perf_counter() - start) / LAYERS * 1e6)
    return statistics.median(times), min(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with World.join() as world, torch.inference_mode():
        layout = Layout.of(world.size, tp=options.tp, ep=options.ep)
        groups = world.groups(layout)
        for hidden in (576, 2880):
            for tokens in (1, 8, 64):
                for dtype in (torch.float32, torch.bfloat16):
                    mine = measure(groups, tokens, hidden, dtype)
                    median, least = world.group.all_reduce_max([round(figure) for figure in mine])
                    if world.rank == 0:
                        name = str(dtype).removeprefix("torch.")
                        print(
                            f"{layout}: hidden {hidden}, {tokens:2} tokens a rank, {name:8}: "
                            f"{median:5} us a pair, least {least}"
                        )


if __name__ == "__main__":
    main()
