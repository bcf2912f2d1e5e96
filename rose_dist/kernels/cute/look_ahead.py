"""Weights of a later launch are brought into L2 while memory would rest."""

from __future__ import annotations

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.dsl import Int32, Int64, cute
from rose_dist.kernels.variants import WARP

PIECE = 128
"""What each lane asks for is a multiple of this many bytes: a cache line."""


@cute.jit
def look_ahead(address: Int64, size: Int64) -> None:
    """One warp of every block asks for the block's share of `size` bytes, a multiple of 16."""
    block, blocks = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    lanes = Int64(blocks * WARP * PIECE)
    piece = (size + (lanes - 1)) // lanes * PIECE
    begin = Int64(block * WARP + cute.arch.thread_idx()[0] % WARP) * piece
    left = size - begin
    if left > 0:
        ptx.prefetch_to_l2(address + begin, Int32(vector.min_of(left, piece)))
