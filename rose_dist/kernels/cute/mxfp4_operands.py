"""What the MXFP4 expert kernels share: words in shared memory, mbarriers, and weights as tensor core operands."""

from __future__ import annotations

from typing import Any

from rose_dist.kernels.dsl import Float32, Int32, Int64, Uint32, cute, cutlass
from rose_dist.kernels.warp_matrix import multiply_bf16x2, rotate_left, spread_half

_CODE_MASK = 0x81C081C0


def decode(word: Any, scales: Any, which: int) -> Any:
    """A word's eight codes as four pairs of bfloat16, times the scale in byte `which` of `scales`."""
    word, scales = Uint32(word), Uint32(scales)
    mask = Uint32(_CODE_MASK)
    pairs = (
        (word << Uint32(6)) & mask,
        (word << Uint32(2)) & mask,
        rotate_left(word, 28) & mask,
        (word & Uint32(0x81808180)) | ((word >> Uint32(8)) & Uint32(0x00400040)),
    )
    # Of bytes 0 and 2, or 1 and 3, two bfloat16; the multiplication takes either for both of its own.
    two = (scales >> Uint32(1) if which % 2 else scales << Uint32(7)) & Uint32(0x7F807F80)
    scale = spread_half(two, which // 2)
    return [multiply_bf16x2(pair, scale) for pair in pairs]


def barrier(shared: Any, index: Any) -> Any:
    """The mbarrier number `index` at the start of the block's shared memory."""
    return cute.make_ptr(Int64, shared + index * 8, cute.AddressSpace.smem, assumed_align=8)


def wait(barrier: Any, phase: Any) -> None:
    """By whole warps, which tensor cores need together again afterwards."""
    cute.arch.mbarrier_wait(barrier, phase)
    cute.arch.sync_warp()


@cute.jit
def next_stage(stage: Int32, parity: Int32, stages: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """A ring's next stage, and the parity of its barriers' phase."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        parity ^= 1
    return stage, parity


def _shared(address: Any, dtype: Any, count: int) -> Any:
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))


def load_shared(address: Any, words: int) -> Any:
    """1, 2 or 4 u32 at a shared address, in one access."""
    values = _shared(address, Uint32, words).load()
    return [values[i] for i in range(words)]


def load_shared_floats(address: Any) -> Any:
    """4 fp32 at a shared address, in one access."""
    values = _shared(address, Float32, 4).load()
    return [values[i] for i in range(4)]


def store_shared_words(address: Any, words: Any) -> None:
    """Store 1, 2 or 4 u32 at a shared address, in one access."""
    _store(address, Uint32, words)


def store_shared(address: Any, values: Any) -> None:
    """Store 4 fp32 at a shared address, in one access."""
    _store(address, Float32, values)


def _store(address: Any, dtype: Any, values: Any) -> None:
    registers = cute.make_rmem_tensor(len(values), dtype)
    for i, value in enumerate(values):
        registers[i] = value
    _shared(address, dtype, len(values)).store(registers.load())
