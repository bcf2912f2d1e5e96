"""A row of logits in the shared memory of a cluster's blocks, and sums over all of it.

Sums are of integers, so that no order shows in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.mxfp4_operands import load_shared_floats, wait
from rose_dist.kernels.draw import WEIGHT_BITS, RowSplit
from rose_dist.kernels.dsl import Float32, Int32, Int64, Uint32, Uint64, cute, range_constexpr
from rose_dist.kernels.variants import WARP

FAR = 3e38
"""A difference of logits beyond which nothing has a weight."""
VECTOR = 4
"""Elements of 16 bytes."""


@dataclass(frozen=True)
class ClusterRow:
    """Part of a kernel, whose dynamic shared memory holds a block's elements. A warp has a stretch of the row; a lane
    takes every 32nd vector of it.
    """

    split: RowSplit

    def allocate(self) -> tuple[Any, ...]:
        """Shared addresses: the block's part of the row, a barrier a warp, a u64 a warp, and what the blocks tell each
        other in turn: 2 × [blocks] × u64.
        """
        split = self.split
        row = cute.arch.get_dyn_smem(Float32, alignment=128)
        barriers = cute.arch.alloc_smem(Int64, split.warps, alignment=8)
        partials = cute.arch.alloc_smem(Uint64, split.warps, alignment=16)
        shared = cute.arch.alloc_smem(Uint64, 2 * split.blocks, alignment=16)
        return tuple(Int32(place.toint()) for place in (row, barriers, partials, shared))

    def rank(self) -> Any:
        """This block's place in the cluster."""
        return cute.arch.block_idx()[0] % self.split.blocks

    def place(self, row: Any, step: Any) -> Any:
        """Shared address of a lane's vector."""
        thread = cute.arch.thread_idx()[0]
        return row + (thread // WARP * (self.split.steps * WARP) + step * WARP + thread % WARP) * (VECTOR * 4)

    def index(self, step: Any) -> Any:
        """Of a lane's vector's first element in the row."""
        thread = cute.arch.thread_idx()[0]
        inside = (thread // WARP * (self.split.steps * WARP) + step * WARP + thread % WARP) * VECTOR
        return self.rank() * self.split.elements + inside

    @cute.jit
    def fetch(self, row: Int32, barriers: Int32, source: Int64, columns: Int32) -> None:
        """Copy this block's part; a warp waits for its own stretch only. −inf where the row has ended."""
        warp, lane = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP), cute.arch.thread_idx()[0] % WARP
        stretch = self.split.steps * WARP * VECTOR
        begin = self.rank() * self.split.elements + warp * stretch
        count = vector.max_of(vector.min_of(columns - begin, Int32(stretch)), Int32(0))
        target = row + warp * (stretch * 4)
        barrier = cute.make_ptr(Int64, barriers + warp * 8, cute.AddressSpace.smem, assumed_align=8)
        if lane == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * 4)
            if count > 0:
                ptx.copy_to_shared(target, source + Int64(begin) * 4, count * 4, barrier.toint())
        for at in range(count + lane, stretch, WARP):
            write(target + at * 4, Float32(-float("inf")))
        cute.arch.sync_warp()
        wait(barrier, 0)

    @cute.jit
    def largest(self, row: Int32, partials: Int32, told: Int32, columns: Int32, where: Int32) -> tuple[Float32, Int32]:
        """The row's largest element and, if `where` is not 0, the place of the first of its kind. Turn 0."""
        thread, split = cute.arch.thread_idx()[0], self.split
        own = Float32(-float("inf"))
        for step in range(split.steps):
            values = load_shared_floats(self.place(row, step))
            for i in range_constexpr(VECTOR):
                own = cute.arch.fmax(own, values[i])
        key = ordered(own)
        best = Uint32(cute.arch.warp_redux_sync(key, "umax"))
        if thread % WARP == 0:
            write(partials + thread // WARP * 8, Uint32(best))
        cute.arch.sync_threads()
        for warp in range_constexpr(split.warps):
            best = Uint32(vector.max_u32(best, read(partials + warp * 8, Uint32)))
        first = Uint32(columns - 1)
        if (where != 0) & (key == best):
            first = self.first_of(row, own)
        first = Uint32(cute.arch.warp_redux_sync(first, "umin"))
        if thread % WARP == 0:
            write(partials + thread // WARP * 8 + 4, Uint32(first))
        cute.arch.sync_threads()
        for warp in range_constexpr(split.warps):
            first = min_u32(first, read(partials + warp * 8 + 4, Uint32))
        self.tell(told, Int32(0), best, first)
        for block in range_constexpr(split.blocks):
            place = told + block * 8
            other = read(place + 4, Uint32)
            if other > best:
                best, first = other, read(place, Uint32)
            elif other == best:
                first = min_u32(first, read(place, Uint32))
        return unordered(best), Int32(min_u32(first, Uint32(columns - 1)))

    @cute.jit
    def first_of(self, row: Int32, value: Float32) -> Uint32:
        """The place of the first of this thread's elements that equals `value`, which is one of them."""
        first = Uint32(0)
        for back in range(self.split.steps):
            step = self.split.steps - 1 - back
            values = load_shared_floats(self.place(row, step))
            for i in range_constexpr(VECTOR - 1, -1, -1):
                if values[i] == value:
                    first = Uint32(self.index(step) + i)
        return first

    @cute.jit
    def tell(self, told: Int32, turn: Int32, high: Uint32, low: Uint32) -> None:
        """Give this block's u64 to all blocks, and wait for theirs: at `told` + 8 · (blocks · turn + block). Two turns
        take turns, so that none is overwritten before all have read it.
        """
        thread = cute.arch.thread_idx()[0]
        if thread < self.split.blocks:
            place = Uint32(told + (turn * self.split.blocks + self.rank()) * 8)
            ptx.cluster_store_shared(place, Uint32(thread), low)
            ptx.cluster_store_shared(place + Uint32(4), Uint32(thread), high)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def block_sum(self, partials: Int32, value: Uint64) -> Uint64:
        """Over all threads of the block; the warps' sums are left in `partials`."""
        thread = cute.arch.thread_idx()[0]
        cute.arch.sync_threads()  # whoever still reads the last ones
        value = warp_sum(value)
        if thread % WARP == 0:
            write(partials + thread // WARP * 8, Uint64(value))
        cute.arch.sync_threads()
        total = Uint64(0)
        for warp in range_constexpr(self.split.warps):
            total += read(partials + warp * 8, Uint64)
        return total

    @cute.jit
    def row_sum(self, partials: Int32, told: Int32, turn: Int32, value: Uint64) -> tuple[Uint64, Uint64, Uint64]:
        """Over all threads of the cluster; over those of the blocks before this one; over this block's."""
        own = self.block_sum(partials, value)
        self.tell(told, turn, Uint32(own >> Uint64(32)), Uint32(own & Uint64(0xFFFFFFFF)))
        total, before = Uint64(0), Uint64(0)
        for block in range_constexpr(self.split.blocks):
            part = read(told + (turn * self.split.blocks + block) * 8, Uint64)
            total += part
            before += pick(Int32(block) < self.rank(), part, Uint64(0))
        return total, before, own

    @cute.jit
    def before_warp(self, partials: Int32) -> Uint64:
        """Of the warps' sums in `partials`, those of the warps before this one."""
        before, own = Uint64(0), cute.arch.thread_idx()[0] // WARP
        for warp in range_constexpr(self.split.warps):
            before += pick(Int32(warp) < own, read(partials + warp * 8, Uint64), Uint64(0))
        return before

    @cute.jit
    def block_scan(self, partials: Int32, value: Uint64) -> tuple[Uint64, Uint64]:
        """The sum of the threads up to this one, and of all of the block."""
        total = self.block_sum(partials, value)
        return self.before_warp(partials) + warp_scan(value), total


def octaves(value: Any, most: Any, scale: Any, rest: Any) -> Any:
    """By how many halvings an element weighs less than the largest: (most − value) · (scale + rest), where scale + rest
    is log2 e / temperature. 0 for the largest, huge for −inf and NaN.
    """
    distance = cute.arch.fmin(most - value, Float32(FAR))
    return ptx.multiply_add(distance, rest, ptx.product(distance, scale))


def weight(halvings: Any) -> Any:
    """2^−halvings in units of 2^−`WEIGHT_BITS`, as a u32; nearest."""
    power = cute.math.exp2(Float32(0.0) - halvings, fastmath=True)
    return ptx.round_u32(ptx.product(power, Float32(float(1 << WEIGHT_BITS))))


def warp_sum(value: Any) -> Any:
    """Of a u64 below 2^51 a lane."""
    low = cute.arch.warp_redux_sync(Uint32(value & Uint64(0xFFFFFF)), "add")
    high = cute.arch.warp_redux_sync(Uint32(value >> Uint64(24)), "add")
    return Uint64(low) + (Uint64(high) << Uint64(24))


@cute.jit
def warp_scan(value: Uint64) -> Uint64:
    """Sum of the lanes up to this one."""
    lane = cute.arch.thread_idx()[0] % WARP
    for step in range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, offset=1 << step, mask_and_clamp=0)
        value += pick(lane >= 1 << step, below, Uint64(0))
    return value


def ordered(value: Any) -> Any:
    """A u32 that orders as fp32 numbers do; −0 is 0."""
    bits = ptx.bits(value)
    key = pick(Int32(bits) < 0, ~bits, bits | Uint32(0x80000000))
    return pick(key == Uint32(0x7FFFFFFF), Uint32(0x80000000), key)


def unordered(key: Any) -> Any:
    """The fp32 of an `ordered` key."""
    return ptx.from_bits(pick(Int32(key) < 0, key & Uint32(0x7FFFFFFF), ~key))


def min_u32(a: Any, b: Any) -> Any:
    """The smaller of two u32."""
    return Uint32(vector.min_of(a, b))


def pick(condition: Any, a: Any, b: Any) -> Any:
    """`a` where the condition holds, else `b`, of a's type: an unsigned one's comparisons stay so."""
    return type(a)(vector.select(condition, a, b))


def read(address: Any, dtype: Any) -> Any:
    """What is at a shared address. Loaded integers have no sign of their own: `dtype` gives it back."""
    return dtype(_at(address, dtype)[0])


def write(address: Any, value: Any) -> None:
    """Store a number at a shared address."""
    _at(address, type(value))[0] = value


def _at(address: Any, dtype: Any) -> Any:
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(1))


@cute.jit
def share(part: Uint64, total: Uint64) -> Uint64:
    """part / 2^64 of `total`, rounded up; all of it for 0."""
    found = total
    if part != Uint64(0):
        found = cute.arch.mul_hi(part, total)
        if part * total != Uint64(0):
            found += Uint64(1)
    return found
