"""PTX instructions that kernels use by name: payload in memory, copies, multicast, and what `ptx_flags`, `ptx_numbers`
and `ptx_shared` have.

Addresses are `Int64` in the global state space unless the name says otherwise.
"""

from __future__ import annotations

from typing import Any

from rose_dist.kernels.dsl import Boolean, Int32, Int64, T, Uint16, Uint32, Uint64, dsl_user_op, ir, llvm
from rose_dist.kernels.inline_asm import asm as _asm
from rose_dist.kernels.ptx_flags import (
    add_relaxed,
    add_relaxed_u64,
    add_release,
    compare_and_swap,
    fence,
    fetch_add,
    load_acquire,
    load_acquire_u64,
    load_relaxed,
    load_relaxed_u64,
    store_relaxed,
    store_release,
    store_release_u64,
)
from rose_dist.kernels.ptx_numbers import (
    absolute,
    bits,
    from_bits,
    from_e2m1x2,
    from_e4m3x2,
    multiply_add,
    product,
    reciprocal,
    round_u32,
    to_bf16x2,
    to_e2m1x2,
    to_e4m3x2,
)
from rose_dist.kernels.ptx_shared import (
    add_shared,
    add_shared_where,
    cluster_add_shared,
    cluster_load_shared,
    cluster_store_shared,
    fetch_add_shared,
)

__all__ = [
    "absolute", "add_relaxed", "add_relaxed_u64", "add_release", "add_shared", "add_shared_where", "bits",
    "cluster_add_shared", "cluster_load_shared", "cluster_store_shared", "compare_and_swap", "fence", "fetch_add",
    "fetch_add_shared", "from_bits", "from_e2m1x2", "from_e4m3x2", "load_acquire", "load_acquire_u64", "load_relaxed",
    "load_relaxed_u64", "multiply_add", "product", "reciprocal", "round_u32", "store_relaxed", "store_release",
    "store_release_u64", "to_bf16x2", "to_e2m1x2", "to_e4m3x2",
]  # fmt: skip

LEAVES_FIRST = 0x12F0000000000000
"""The cache policy that `createpolicy.fractional.L2::evict_first.b64` makes for all of the bytes."""


@dsl_user_op
def exit_if(condition: Any, *, loc: Any = None, ip: Any = None) -> None:
    """End this thread. Later shuffles and block barriers are then among the threads that remain (PTX ISA, shfl.sync
    and barrier: all non-exited threads)."""
    text = "{ .reg .pred dead; setp.ne.u32 dead, $0, 0; @dead exit; }"
    _asm(text, "r", None, Uint32(condition), loc=loc, ip=ip)


@dsl_user_op
def clock_ns(*, loc: Any = None, ip: Any = None) -> Any:
    """The device's nanosecond clock (u64); ticks coarsely, up to 1 us apart."""
    return Uint64(_asm("mov.u64 $0, %globaltimer;", "=l", T.i64(), loc=loc, ip=ip))


@dsl_user_op
def thread_index(*, loc: Any = None, ip: Any = None) -> Any:
    """`threadIdx.x`, read here and again by every further call: what follows from it is not kept in registers through a
    loop that does not need it.
    """
    return Int32(_asm("mov.u32 $0, %tid.x;", "=r", T.i32(), loc=loc, ip=ip))


@dsl_user_op
def load_once_16b(address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any, Any, Any]:
    """16 bytes that no one writes during the kernel and this kernel reads once: past L1, 256 bytes ahead into L2."""
    kind = ir.Type.parse("!llvm.struct<(i32,i32,i32,i32)>")
    text = "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];"
    words = _asm(text, "=r,=r,=r,=r,l", kind, Int64(address), volatile=False, loc=loc, ip=ip)
    return _words(words, loc, ip)


@dsl_user_op
def load_early_16b(address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any, Any, Any]:
    """16 bytes of weights, past L1, 256 bytes ahead into L2 and first to leave it; stays before `griddepcontrol.wait`.

    The assembler moves `load_once_16b` behind that wait.
    """
    kind = ir.Type.parse("!llvm.struct<(i32,i32,i32,i32)>")
    text = "ld.global.L1::no_allocate.L2::cache_hint.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4], $5;"
    words = _asm(text, "=r,=r,=r,=r,l,l", kind, Int64(address), Int64(LEAVES_FIRST), loc=loc, ip=ip)
    return _words(words, loc, ip)


@dsl_user_op
def load_16b(address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any, Any, Any]:
    """16 bytes, past L1: for data that another block or GPU wrote before a flag that this thread has acquired."""
    kind = ir.Type.parse("!llvm.struct<(i32,i32,i32,i32)>")
    text = "ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];"
    words = _asm(text, "=r,=r,=r,=r,l", kind, Int64(address), loc=loc, ip=ip)
    return _words(words, loc, ip)


@dsl_user_op
def store_16b(address: Any, words: tuple[Any, Any, Any, Any], *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes, past L1: for a peer GPU's memory or data that this SM does not read again."""
    text = "st.global.L1::no_allocate.v4.b32 [$0], {$1, $2, $3, $4};"
    _asm(text, "l,r,r,r,r", None, Int64(address), *(Int32(word) for word in words), loc=loc, ip=ip)


@dsl_user_op
def load_16b_where(wanted: Any, address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any, Any, Any]:
    """`load_16b` where `wanted`, else zeros. No branch, so that several are in flight."""
    return _load_where("ld.global.L1::no_allocate", wanted, address, loc, ip)


@dsl_user_op
def load_packet_where(wanted: Any, address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any, Any, Any]:
    """`load_packet` where `wanted`, else zeros."""
    return _load_where("ld.relaxed.sys.global", wanted, address, loc, ip)


def _load_where(kind: str, wanted: Any, address: Any, loc: Any, ip: Any) -> tuple[Any, Any, Any, Any]:
    struct = ir.Type.parse("!llvm.struct<(i32,i32,i32,i32)>")
    text = (
        "{ .reg .pred wanted; setp.ne.u32 wanted, $5, 0; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        f"@wanted {kind}.v4.b32 {{$0, $1, $2, $3}}, [$4]; }}"
    )
    words = _asm(text, "=&r,=&r,=&r,=&r,l,r", struct, Int64(address), Uint32(Boolean(wanted)), loc=loc, ip=ip)
    return _words(words, loc, ip)


@dsl_user_op
def store_where(wanted: Any, address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """A u16 or u32 where `wanted`. No branch, so that neighbouring values are computed side by side."""
    value = value if isinstance(value, Uint16) else Uint32(value)
    kind = "h" if isinstance(value, Uint16) else "r"
    text = f"{{ .reg .pred wanted; setp.ne.u32 wanted, $0, 0; @wanted st.global.b{value.width} [$1], $2; }}"
    _asm(text, f"r,l,{kind}", None, Uint32(Boolean(wanted)), Int64(address), value, loc=loc, ip=ip)


@dsl_user_op
def load_packet(address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any, Any, Any]:
    """16 bytes that another GPU may be writing with `store_packet`: all of one packet, as hardware does it."""
    kind = ir.Type.parse("!llvm.struct<(i32,i32,i32,i32)>")
    text = "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$4];"
    words = _asm(text, "=r,=r,=r,=r,l", kind, Int64(address), loc=loc, ip=ip)
    return _words(words, loc, ip)


@dsl_user_op
def store_packet(address: Any, words: tuple[Any, Any, Any, Any], *, loc: Any = None, ip: Any = None) -> None:
    """16 bytes that arrive as one in any GPU's memory, so that one word of them can say that the others are there."""
    text = "st.relaxed.sys.global.v4.b32 [$0], {$1, $2, $3, $4};"
    _asm(text, "l,r,r,r,r", None, Int64(address), *(Uint32(word) for word in words), loc=loc, ip=ip)


def _words(struct: Any, loc: Any, ip: Any) -> tuple[Any, Any, Any, Any]:
    a, b, c, d = (Int32(llvm.extractvalue(T.i32(), struct, [i], loc=loc, ip=ip)) for i in range(4))
    return a, b, c, d


@dsl_user_op
def copy_to_shared(target: Any, source: Any, size: Any, barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Start copying `size` bytes of global memory to this block's shared memory; the mbarrier counts them as they come.

    All three are multiples of 16. `target` and `barrier` are shared addresses (u32).
    """
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _asm(text, "r,l,r,r", None, Uint32(target), Int64(source), Uint32(size), Uint32(barrier), loc=loc, ip=ip)


@dsl_user_op
def stream_to_shared(target: Any, source: Any, size: Any, barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """As `copy_to_shared`, of weights: what stays in L2 is what is read again, instructions among it."""
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], $4;"
    operands = (Uint32(target), Int64(source), Uint32(size), Uint32(barrier), Int64(LEAVES_FIRST))
    _asm(text, "r,l,r,r,l", None, *operands, loc=loc, ip=ip)


@dsl_user_op
def prefetch_to_l2(source: Any, size: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Start bringing `size` bytes of global memory into L2; both are multiples of 16."""
    _asm("cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", None, Int64(source), Uint32(size), loc=loc, ip=ip)


@dsl_user_op
def fence_async_copies(*, loc: Any = None, ip: Any = None) -> None:
    """What this thread knows to be written to global memory, its later asynchronous copies see too."""
    _asm("fence.proxy.async.global;", "", None, loc=loc, ip=ip)


# --- NVLink SHARP multicast: only on addresses of a multicast mapping -----------------------------------------------


@dsl_user_op
def multimem_load_add_bf16x8(address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, Any, Any, Any]:
    """Sum over all GPUs of 8 bf16, added in fp32 by the switch, rounded once; as 4 packed words."""
    kind = ir.Type.parse("!llvm.struct<(i32,i32,i32,i32)>")
    text = "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];"
    words = _asm(text, "=r,=r,=r,=r,l", kind, Int64(address), loc=loc, ip=ip)
    return _words(words, loc, ip)


@dsl_user_op
def multimem_store_16b(address: Any, words: tuple[Any, Any, Any, Any], *, loc: Any = None, ip: Any = None) -> None:
    """The same 16 bytes into every GPU's copy."""
    text = "multimem.st.relaxed.sys.global.v4.f32 [$0], {$1, $2, $3, $4};"
    _asm(text, "l,r,r,r,r", None, Int64(address), *(Int32(word) for word in words), loc=loc, ip=ip)


@dsl_user_op
def multimem_add_release(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """u32 add into every GPU's copy that publishes everything before it to all of them."""
    text = "multimem.red.release.sys.global.add.u32 [$0], $1;"
    _asm(text, "l,r", None, Int64(address), Uint32(value), loc=loc, ip=ip)
