"""What an opcode says about a memory access: modifiers, order, scope, vector width."""

from collections.abc import Set

from tests.ptx.errors import UnknownInstruction
from tests.ptx.memory_model import Access
from tests.ptx.ptx_types import Type, is_type
from tests.ptx.spaces import SPACES
from tests.ptx.syntax import Operand, Vec
from tests.ptx.topology import GPU, SCOPES, SYS, WEAK

_PRIORITIES = ("evict_first", "evict_last", "evict_normal", "evict_unchanged", "no_allocate")
_HINTS = {
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B"),
    *(f"L{level}::{priority}" for level in (1, 2) for priority in _PRIORITIES),
}
_SEMANTICS = {"weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def check_modifiers(parts: tuple[str, ...], more: Set[str] = frozenset()) -> None:
    """Raises UnknownInstruction for a modifier that is neither common to memory instructions nor in `more`."""
    known = _HINTS | _SEMANTICS | SCOPES.keys() | SPACES | _VECTORS.keys() | more
    unknown = [p for p in parts[1:] if p not in known and not is_type(p)]
    if unknown:
        raise UnknownInstruction(f"modifier .{unknown[0]} of {parts[0]} is not modelled")


def access_of(parts: tuple[str, ...], kind: Type, count: int) -> Access:
    """The access of `count` elements of `kind` that an opcode describes.

    Atomic operations are relaxed at gpu scope unless they say more.
    """
    given = set(parts)
    scope = next((SCOPES[p] for p in parts if p in SCOPES), None)
    if given & {"volatile", "mmio"}:
        scope = SYS
    elif given & {"relaxed", "acquire", "release", "acq_rel"} or parts[0] in ("atom", "red"):
        scope = GPU if scope is None else scope
    else:
        scope = WEAK
    return Access(
        kind.bytes * count, kind.bytes, scope,
        acquire=bool(given & {"acquire", "acq_rel"}), release=bool(given & {"release", "acq_rel"}),
        non_coherent="nc" in given,
    )  # fmt: skip


def elements(operand: Operand) -> tuple[Operand, ...]:
    """The parts of a vector operand."""
    return operand.items if isinstance(operand, Vec) else (operand,)
