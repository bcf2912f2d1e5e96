"""PTX instructions on words in shared memory, of this block and of the others of its cluster, for `ptx`."""

from __future__ import annotations

from typing import Any

from rose_dist.kernels.dsl import Boolean, T, Uint32, dsl_user_op
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
