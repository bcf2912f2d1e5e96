"""How the wrappers of PTX instructions put one into a kernel."""

from __future__ import annotations

from typing import Any

from rose_dist.kernels.dsl import llvm


def asm(text: str, constraints: str, result: Any, *operands: Any, volatile: bool = True, **at: Any) -> Any:
    """One instruction; `result` is an MLIR type or None, `volatile` keeps it where it stands."""
    values = [operand.ir_value(**at) for operand in operands]
    if volatile:
        constraints += ",~{memory}"
    return llvm.inline_asm(result, values, text, constraints.strip(","), has_side_effects=volatile, asm_dialect=0, **at)
