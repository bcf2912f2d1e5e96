"""Weights of a later launch are brought into L2 while memory would rest."""

from __future__ import annotations

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.dsl import Int32, Int64, cute, cutlass
from rose_dist.kernels.variants import WARP

PIECE = 128
"""What each lane asks for is a multiple of this many bytes: a cache line."""
TURN = 16 << 10
"""Bytes that a block asks for in a turn of `look_ahead_slowly`: half of what would keep the memory busy (H200), so that
other blocks' single loads come at once.
"""
TURNS = 5
"""Which take less time than a router's launch."""


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


@cute.jit
def look_ahead_slowly(address: Int64, size: Int64) -> Int64:
    """One warp of every block asks for a part of `size` bytes, from the first on, while others wait for single loads:
    for more only when what it has asked for is there. Returns how many bytes all blocks ask for.
    """
    turn = cute.arch.grid_dim()[0] * TURN
    turns = vector.min_of(Int32(size // Int64(turn)), Int32(TURNS))
    if cute.arch.thread_idx()[0] % WARP == 0:
        at = address + Int64(cute.arch.block_idx()[0] * TURN)
        for number in cutlass.range(turns, unroll=1):
            if number > 0:
                at += Int64(turn) + Int64(ptx.zero_once_loaded(at + (TURN - 4)))
            ptx.prefetch_to_l2(at, Int32(TURN))
    return Int64(turns) * Int64(turn)
