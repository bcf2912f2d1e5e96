"""What a register-to-register instruction does: operand types and a pure numpy function."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.ptx.number_formats import Array
from tests.ptx.ptx_types import Type, ptx_type

U32, PRED = ptx_type("u32"), ptx_type("pred")

ROUNDING = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "rna"}


@dataclass(frozen=True)
class Operation:
    """`function` takes arrays of `sources`' dtypes and returns one array per result (a tuple if there are two)."""

    results: tuple[Type, ...]
    sources: tuple[Type, ...]
    function: Callable[..., Array | tuple[Array, ...]]
    variadic: bool = False


Build = Callable[[tuple[str, ...], list[Type], set[str]], Operation | None]
"""(opcode parts, the types among them, the other modifiers) -> operation, or None for a form that is not modelled."""


def is_float(kind: Type) -> bool:
    return kind.kind in "fx" and kind.name not in ("u16x2", "s16x2")
