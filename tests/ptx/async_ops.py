"""Asynchronous copies: cp.async, and what routes to mbarrier and bulk instructions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tests.ptx import bulk_ops, mbarrier_ops
from tests.ptx.errors import UnknownInstruction
from tests.ptx.gang import WARP, CopyGroup, Gang
from tests.ptx.memory_model import Access
from tests.ptx.ptx_types import ptx_type
from tests.ptx.spaces import SPACES, load, store
from tests.ptx.syntax import Instruction
from tests.ptx.topology import CLUSTER

if TYPE_CHECKING:
    from tests.ptx.program import Program

Step = Callable[[Gang], None]

U32 = ptx_type("u32")


def build(program: Program, instruction: Instruction) -> Step | None:
    parts = instruction.parts
    if parts[0] == "mbarrier":
        return mbarrier_ops.build(program, instruction)
    if parts[:2] == ("fence", "proxy") or (parts[0] == "fence" and parts[1].startswith(("proxy", "mbarrier_init"))):
        return _proxy_fence(instruction)
    if parts[:3] == ("cp", "async", "bulk"):
        return bulk_ops.build(program, instruction)
    if parts[:2] == ("cp", "async"):
        return _copy(program, instruction)
    return None


def is_async(parts: tuple[str, ...]) -> bool:
    return parts[0] in ("mbarrier", "cp")


def _proxy_fence(instruction: Instruction) -> Step:
    """fence.proxy.async: generic accesses before it are seen by asynchronous copies. The alias fence needs no model."""
    parts = instruction.parts
    kind = next((p for p in parts if p.startswith(("proxy", "async", "alias", "tensormap", "mbarrier_init"))), "")
    known = {"fence", "proxy", "async", "alias", "mbarrier_init", "release", "cluster"}
    if any(p not in known | SPACES and not p.startswith("async::") for p in parts):
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")
    if kind == "mbarrier_init":
        return lambda g: g.machine.memory.fence(g.threads[g.mask], CLUSTER, acquire=False)
    if "alias" in parts:
        return lambda g: None
    return lambda g: g.machine.memory.proxy_fence(g.threads[g.mask])


def _copy(program: Program, instruction: Instruction) -> Step | None:
    """cp.async: the source is read at once, the destination is written when its group is waited for."""
    parts = instruction.parts
    if "commit_group" in parts:
        return _commit
    if "wait_group" in parts or "wait_all" in parts:
        left = program.operands.read(instruction.operands[0], U32) if "wait_group" in parts else None

        def wait(g: Gang) -> None:
            keep = int(left(g)[0]) if left is not None else -1
            for warp in g.active_warps():
                open_groups = g.copy_groups[warp]
                finished = open_groups[:-1] if keep <= 0 else open_groups[: -1 - keep]
                for group in finished if keep >= 0 else open_groups:
                    group.finish()
                del open_groups[: len(finished)]

        return wait
    if "mbarrier" in parts or parts[2] not in ("ca", "cg"):
        return None
    # A cache policy changes nothing here.
    operands = instruction.operands[:-1] if "L2::cache_hint" in parts else instruction.operands
    to, of = program.operands.gather_address(operands[0]), program.operands.gather_address(operands[1])
    size = int(program.operands.read(operands[2], U32)(None)[0])  # type: ignore[arg-type]
    used = program.operands.gather(operands[3], U32) if len(operands) > 3 else None
    access = Access(size, size)

    def run(g: Gang) -> None:
        active = g.active()
        for warp in g.active_warps():
            lanes = active[active // WARP == warp]
            values = np.zeros((len(lanes), size), np.uint8)
            amounts = used(g, lanes) if used is not None else np.full(len(lanes), size)
            read = amounts > 0
            if read.any():
                loaded = load(g, "global", of(g, lanes)[read], access, lanes[read])
                values[read] = loaded.view(np.uint8).reshape(-1, size)
            values[np.arange(size)[None, :] >= amounts[:, None]] = 0
            packed = values.view(np.dtype(f"u{size}") if size <= 8 else np.dtype((np.void, size))).reshape(-1)
            write = partial(store, g, "shared", to(g, lanes), packed, access, lanes)
            g.copy_groups[warp][-1].copies.append(write)

    return run


def _commit(g: Gang) -> None:
    for warp in g.active_warps():
        g.copy_groups[warp].append(CopyGroup())
