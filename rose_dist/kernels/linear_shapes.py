"""How the linear layers of few rows in a decode step are spread over blocks: pure data and arithmetic.

A grid's blocks are all on the GPU at once, and each has all its weights on the way before it waits for the launch
before. What bounds a shape is therefore room: registers and shared memory of the blocks that share an SM.
"""

from __future__ import annotations

from dataclasses import dataclass

LINEAR_OUTPUTS = 16
"""A block's outputs."""
REDUCED_PER_SM = 2
"""Blocks of a layer with an all-reduce that at least fit on an SM: all are there at once, and wait for other GPUs'."""
LINEAR_COLUMNS = 32
"""Inputs that a warp multiplies at a time; 16 bytes a lane of each of its two weight rows."""


@dataclass(frozen=True)
class ResidentShape:
    """How a linear layer whose blocks are all on the GPU at once spreads 16 outputs over a block."""

    warps: int
    """They share the inputs; a divisor of the runs of 32."""
    held: int
    """Runs of 32 inputs whose weights a warp has on their way to registers; those of the others go to shared memory."""
    per_sm: int
    """Blocks that fit on an SM."""


RESIDENT_LINEARS = {
    # A warp's 10 runs: 2 take 16 registers, x of all of them 40, of the 75 that 3 blocks of 288 threads leave.
    2880: ResidentShape(warps=9, held=2, per_sm=3),
    # 8 runs: 1 takes 8 registers, x of all of them 32, of 64; the other 7 take 112 KB of shared memory a block.
    4096: ResidentShape(warps=16, held=1, per_sm=2),
}
"""By inputs: GPT-OSS's hidden size (5,120 outputs are 320 blocks), and the width of its attention (2,880 are 180)."""
COMBINING_HELD = 3
"""Runs in registers at least, of a layer whose one row is in shared memory: 3 blocks of 72 KB fit with 2,880 inputs."""
RESIDENT_WARPS, RESIDENT_RUNS = 9, 8
"""Of other sizes, at most: warps, and runs in shared memory (74 KB a block, so that 3 fit)."""


RESIDENT_MOST_RUNS = 16
"""Of a warp: it has x of all of them in registers."""


def fits_resident(inputs: int) -> bool:
    """Whether there is a shape for so many inputs, a multiple of 32."""
    return inputs // LINEAR_COLUMNS // resident(inputs).warps <= RESIDENT_MOST_RUNS


def resident(inputs: int) -> ResidentShape:
    """The shape for a layer of so many inputs, always the same, so that a row gets the same bits in any batch."""
    runs = inputs // LINEAR_COLUMNS
    warps = _warps(runs)
    small = ResidentShape(warps, held=max(runs // warps - RESIDENT_RUNS, 0), per_sm=1)
    return RESIDENT_LINEARS.get(inputs, small)


def resident_beside(inputs: int) -> ResidentShape:
    """The shape of a layer of few blocks that start while another's are on the SM.

    Each has half of its registers, and so more than half the weights go to shared memory.
    """
    runs = inputs // LINEAR_COLUMNS
    warps = _warps(runs)
    return ResidentShape(warps, held=runs // warps * 2 // 5, per_sm=2)


def resident_combining(inputs: int) -> ResidentShape:
    """The same sums for a layer that has its one row in shared memory: registers take more of the weights instead."""
    shape = resident(inputs)
    held = min(COMBINING_HELD, inputs // LINEAR_COLUMNS // shape.warps)
    return ResidentShape(shape.warps, max(shape.held, held), shape.per_sm)


def resident_handing(inputs: int) -> ResidentShape:
    """The same sums for a layer whose blocks must leave an SM's registers to one of the experts': all weights go to
    shared memory, where one row leaves room for them.
    """
    return ResidentShape(_warps(inputs // LINEAR_COLUMNS), held=0, per_sm=4)


def _warps(runs: int) -> int:
    """The largest divisor."""
    return next(n for n in range(min(runs, RESIDENT_WARPS), 0, -1) if runs % n == 0)
