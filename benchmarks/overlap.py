"""Cycles of a Hopper SM for instructions of the expert GEMMs' and attention's loops, alone and beside products.

    python -m benchmarks.overlap

A turn is 48 instructions of each warp that works, and two products of 64 x `width` x 32 in e4m3 of each warpgroup that
multiplies. Of three warpgroups `multiplying` multiply; the others work, or "both" do both. Columns are cycles a turn.
"""

from __future__ import annotations

import torch

from rose_dist.kernels import jit, launch
from rose_dist.kernels.overlap_probe import WARPGROUPS, WORKS, Overlap

TURNS = 2000
BESIDE = ("lop3", "prmt", "mad", "fma", "ex2", "lds64")
"""What is also done beside products."""
WIDTHS = (16, 40, 64, 96)


def cases() -> list[tuple[str, int, int, bool]]:
    """Fields of `Overlap`."""
    alone = [(work, 8, 0, False) for work in WORKS]
    products = [("", width, count, True) for width in WIDTHS for count in (1, 2, 3)]
    beside = [(work, width, *how) for work in BESIDE for width in (40, 96) for how in ((1, False), (3, True))]
    return [*alone, *products, *beside]


def main() -> None:
    device = torch.device("cuda", 0)
    ticks = torch.zeros(torch.cuda.get_device_properties(0).multi_processor_count, WARPGROUPS, dtype=torch.int64).to(
        device
    )
    arch = launch.device(ticks).arch
    for work, width, multiplying, both in cases():
        kernel = jit.load(Overlap(arch, work, width, multiplying, both))
        for _ in range(2):
            launch.run(kernel, ticks, ticks, TURNS, len(ticks))
        first, *_, last = (ticks.double().median(0).values / TURNS).tolist()
        print(f"{work or '-':6} width {width:3} multiplying {multiplying} {'both' if both else 'apart':5} "
              f"first warpgroup {first:7.1f} last {last:7.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
