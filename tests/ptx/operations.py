"""Register-to-register instructions by opcode."""

from tests.ptx import float_instructions as floats
from tests.ptx import integer_instructions as integers
from tests.ptx import predicate_instructions as predicates
from tests.ptx.errors import UnknownInstruction
from tests.ptx.operation import Build, Operation, is_float
from tests.ptx.ptx_types import Type, is_type, ptx_type


def resolve(parts: tuple[str, ...]) -> Operation | None:
    """The operation of an opcode, or None if it is no register-to-register instruction. Raises UnknownInstruction for
    an unknown form.
    """
    build = _BUILDERS.get(parts[0])
    if build is None:
        return None
    types = [ptx_type(p) for p in parts[1:] if is_type(p)]
    modifiers = {p for p in parts[1:] if not is_type(p)}
    operation = build(parts, types, modifiers)
    if operation is None:
        raise UnknownInstruction(f"{'.'.join(parts)} is not modelled")
    return operation


def _by_kind(of_floats: Build, of_integers: Build) -> Build:
    def build(parts: tuple[str, ...], types: list[Type], modifiers: set[str]) -> Operation | None:
        return (of_floats if is_float(types[-1]) else of_integers)(parts, types, modifiers)

    return build


_ARITHMETIC = _by_kind(floats.arithmetic, integers.arithmetic)
_BUILDERS: dict[str, Build] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "fma", "mad"), _ARITHMETIC),
    **dict.fromkeys(("min", "max"), _by_kind(floats.min_max, integers.min_max)),
    **dict.fromkeys(("neg", "abs"), _by_kind(floats.negate_absolute, integers.negate_absolute)),
    **dict.fromkeys(("ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt"), floats.approximation),
    **dict.fromkeys(("mul24", "mad24"), integers.mul24),
    **dict.fromkeys(("and", "or", "xor"), integers.logic),
    **dict.fromkeys(("not", "cnot"), integers.complement),
    **dict.fromkeys(("shl", "shr"), integers.shift),
    **dict.fromkeys(("bfe", "bfi", "bmsk", "lop3", "prmt", "bfind", "popc", "clz", "brev"), integers.bit_fields),
    "shf": integers.funnel,
    "rem": integers.rem,
    "sad": integers.sad,
    "dp4a": integers.dot,
    "dp2a": integers.dot_pairs,
    "cvt": floats.cvt,
    "copysign": floats.copysign,
    "testp": predicates.testp,
    "setp": predicates.setp,
    "set": predicates.set_,
    "selp": predicates.selp,
    "slct": predicates.slct,
}
