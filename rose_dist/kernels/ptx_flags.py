"""PTX memory instructions with an order and a scope, for flags and counters; kernels take them from `ptx`.

Addresses are `Int64` in the global state space. `scope` is "gpu" or "sys". An acquire load that reads the value of a
release store sees everything the storing thread wrote or, through a block barrier, observed before (PTX ISA, memory
consistency model, causality order). A release already waits for earlier writes: a fence before it would only double the
cost.
"""

from __future__ import annotations

from typing import Any

from rose_dist.kernels.dsl import Int64, T, Uint32, Uint64, dsl_user_op
from rose_dist.kernels.inline_asm import asm as _asm

_SCOPES = ("gpu", "sys")


def _check(scope: str) -> str:
    assert scope in _SCOPES, f"scope {scope!r} is not one of {_SCOPES}"
    return scope


@dsl_user_op
def load_acquire(address: Any, scope: str, *, loc: Any = None, ip: Any = None) -> Any:
    """u32 at `address`; later accesses of this thread come after it."""
    text = f"ld.acquire.{_check(scope)}.global.u32 $0, [$1];"
    return Uint32(_asm(text, "=r,l", T.i32(), Int64(address), loc=loc, ip=ip))


@dsl_user_op
def load_acquire_u64(address: Any, scope: str, *, loc: Any = None, ip: Any = None) -> Any:
    """u64 at `address`; later accesses of this thread come after it."""
    text = f"ld.acquire.{_check(scope)}.global.u64 $0, [$1];"
    return Uint64(_asm(text, "=l,l", T.i64(), Int64(address), loc=loc, ip=ip))


@dsl_user_op
def load_relaxed(address: Any, scope: str, *, loc: Any = None, ip: Any = None) -> Any:
    """u32 at `address`, coherent but unordered."""
    text = f"ld.relaxed.{_check(scope)}.global.u32 $0, [$1];"
    return Uint32(_asm(text, "=r,l", T.i32(), Int64(address), loc=loc, ip=ip))


@dsl_user_op
def store_release(address: Any, value: Any, scope: str, *, loc: Any = None, ip: Any = None) -> None:
    """u32 store that publishes everything before it."""
    text = f"st.release.{_check(scope)}.global.u32 [$0], $1;"
    _asm(text, "l,r", None, Int64(address), Uint32(value), loc=loc, ip=ip)


@dsl_user_op
def store_release_u64(address: Any, value: Any, scope: str, *, loc: Any = None, ip: Any = None) -> None:
    """u64 store that publishes everything before it."""
    text = f"st.release.{_check(scope)}.global.u64 [$0], $1;"
    _asm(text, "l,l", None, Int64(address), Uint64(value), loc=loc, ip=ip)


@dsl_user_op
def store_relaxed(address: Any, value: Any, scope: str, *, loc: Any = None, ip: Any = None) -> None:
    """u32 store, coherent but unordered."""
    text = f"st.relaxed.{_check(scope)}.global.u32 [$0], $1;"
    _asm(text, "l,r", None, Int64(address), Uint32(value), loc=loc, ip=ip)


@dsl_user_op
def add_release(address: Any, value: Any, scope: str, *, loc: Any = None, ip: Any = None) -> None:
    """u32 add without a result that publishes everything before it."""
    text = f"red.release.{_check(scope)}.global.add.u32 [$0], $1;"
    _asm(text, "l,r", None, Int64(address), Uint32(value), loc=loc, ip=ip)


@dsl_user_op
def add_relaxed(address: Any, value: Any, scope: str, *, loc: Any = None, ip: Any = None) -> None:
    """u32 add without a result or an order."""
    text = f"red.relaxed.{_check(scope)}.global.add.u32 [$0], $1;"
    _asm(text, "l,r", None, Int64(address), Uint32(value), loc=loc, ip=ip)


@dsl_user_op
def load_relaxed_u64(address: Any, scope: str, *, loc: Any = None, ip: Any = None) -> Any:
    """u64 at `address`, coherent but unordered."""
    text = f"ld.relaxed.{_check(scope)}.global.u64 $0, [$1];"
    return Uint64(_asm(text, "=l,l", T.i64(), Int64(address), loc=loc, ip=ip))


@dsl_user_op
def add_relaxed_u64(address: Any, value: Any, scope: str, *, loc: Any = None, ip: Any = None) -> None:
    """u64 add without a result or an order."""
    text = f"red.relaxed.{_check(scope)}.global.add.u64 [$0], $1;"
    _asm(text, "l,l", None, Int64(address), Uint64(value), loc=loc, ip=ip)


@dsl_user_op
def fetch_add(address: Any, value: Any, scope: str, *, order: str = "acq_rel", loc: Any = None, ip: Any = None) -> Any:
    """u32 add that returns the value before; `order` is "relaxed", "acquire", "release" or "acq_rel"."""
    text = f"atom.{order}.{_check(scope)}.global.add.u32 $0, [$1], $2;"
    return Uint32(_asm(text, "=r,l,r", T.i32(), Int64(address), Uint32(value), loc=loc, ip=ip))


@dsl_user_op
def compare_and_swap(
    address: Any, expected: Any, value: Any, scope: str, *, order: str = "acq_rel", loc: Any = None, ip: Any = None
) -> Any:
    """u32 compare-and-swap; returns the value before."""
    text = f"atom.{order}.{_check(scope)}.global.cas.b32 $0, [$1], $2, $3;"
    operands = (Int64(address), Uint32(expected), Uint32(value))
    return Uint32(_asm(text, "=r,l,r,r", T.i32(), *operands, loc=loc, ip=ip))


@dsl_user_op
def fence(scope: str, *, loc: Any = None, ip: Any = None) -> None:
    """Orders this thread's accesses before it against those after it, in both directions."""
    _asm(f"fence.acq_rel.{_check(scope)};", "", None, loc=loc, ip=ip)
