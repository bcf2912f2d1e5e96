"""PTX instructions on words in shared memory, of this block and of the others of its cluster, for `ptx`."""

from __future__ import annotations

from typing import Any

from rose_dist.kernels.dsl import Boolean, Int64, T, Uint32, dsl_user_op
from rose_dist.kernels.inline_asm import asm as _asm


@dsl_user_op
def cluster_add_shared(address: Any, block: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """u32 add at the place in cluster block `block` that has shared address `address` (u32) in this one."""
    text = (
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1; "
        "red.relaxed.cluster.shared::cluster.add.u32 [remote], $2; }"
    )
    _asm(text, "r,r,r", None, Uint32(address), Uint32(block), Uint32(value), loc=loc, ip=ip)


@dsl_user_op
def cluster_store_shared(address: Any, block: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """u32 store to the place in cluster block `block` that has shared address `address` (u32) in this one."""
    text = "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $0, $1; st.shared::cluster.u32 [remote], $2; }"
    _asm(text, "r,r,r", None, Uint32(address), Uint32(block), Uint32(value), loc=loc, ip=ip)


@dsl_user_op
def cluster_load_shared(address: Any, block: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """u32 at the place in cluster block `block` that has shared address `address` (u32) in this one."""
    text = "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, $1, $2; ld.shared::cluster.u32 $0, [remote]; }"
    return Uint32(_asm(text, "=r,r,r", T.i32(), Uint32(address), Uint32(block), loc=loc, ip=ip))


@dsl_user_op
def fetch_add_shared(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """u32 add at a shared address (u32) of this block; returns the value before."""
    text = "atom.relaxed.cta.shared::cta.add.u32 $0, [$1], $2;"
    return Uint32(_asm(text, "=r,r,r", T.i32(), Uint32(address), Uint32(value), loc=loc, ip=ip))


@dsl_user_op
def add_shared_where(wanted: Any, address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """u32 add at a shared address (u32) of this block where `wanted`; no branch."""
    text = "{ .reg .pred wanted; setp.ne.u32 wanted, $0, 0; @wanted red.relaxed.cta.shared::cta.add.u32 [$1], $2; }"
    _asm(text, "r,r,r", None, Uint32(Boolean(wanted)), Uint32(address), Uint32(value), loc=loc, ip=ip)


@dsl_user_op
def add_shared(address: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """u32 add at a shared address (u32) of this block."""
    text = "red.relaxed.cta.shared::cta.add.u32 [$0], $1;"
    _asm(text, "r,r", None, Uint32(address), Uint32(value), loc=loc, ip=ip)


@dsl_user_op
def copy_from_shared(target: Any, source: Any, size: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Start copying `size` bytes at shared address `source` (u32) to global memory of any GPU; part of this thread's
    group that `commit_bulk_copies` ends. All three are multiples of 16.
    """
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    _asm(text, "l,r,r", None, Int64(target), Uint32(source), Uint32(size), loc=loc, ip=ip)


@dsl_user_op
def commit_bulk_copies(*, loc: Any = None, ip: Any = None) -> None:
    """What this thread has started to copy since it last did so is a group, possibly an empty one."""
    _asm("cp.async.bulk.commit_group;", "", None, loc=loc, ip=ip)


@dsl_user_op
def await_bulk_copies(left: int, *, loc: Any = None, ip: Any = None) -> None:
    """Until all but this thread's `left` latest groups are written, which it may then release to others."""
    _asm(f"cp.async.bulk.wait_group {left};", "", None, loc=loc, ip=ip)
