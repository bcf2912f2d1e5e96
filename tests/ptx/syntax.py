"""The parsed form of a PTX module."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Reg:
    """A virtual register; `name` is unique in its kernel (scoped ones are renamed)."""

    name: str


@dataclass(frozen=True)
class Special:
    """A special register such as %tid.x or %globaltimer."""

    name: str


@dataclass(frozen=True)
class Imm:
    """A literal. For 0f and 0d literals `bits` is the pattern and `float_bits` its width; else `value` is the
    integer.
    """

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Sym:
    """A label, a variable or a parameter."""

    name: str


@dataclass(frozen=True)
class Addr:
    """[base + offset]; for multi-part addresses (`[a], mbar` stays apart) only the first part."""

    base: "Reg | Sym | Imm"
    offset: int


@dataclass(frozen=True)
class Vec:
    """{a, b, …}"""

    items: "tuple[Operand, ...]"


@dataclass(frozen=True)
class Pair:
    """a|b of setp and shfl."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True)
class Not:
    """!p"""

    operand: Reg


@dataclass(frozen=True)
class Neg:
    """-a of a register operand."""

    operand: Reg


@dataclass(frozen=True)
class Sink:
    """_ : a result nobody wants."""


Operand = Reg | Special | Imm | Sym | Addr | Vec | Pair | Not | Neg | Sink


@dataclass(frozen=True)
class Guard:
    register: str
    negated: bool


@dataclass(frozen=True)
class Instruction:
    """`parts` is the opcode split at dots: ("ld", "acquire", "sys", "global", "u32")."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    text: str


@dataclass(frozen=True)
class Variable:
    """A .shared, .global, .const, .local or .param variable; size 0 means sized at launch (extern shared)."""

    name: str
    size: int
    align: int
    space: str
    data: bytes = b""


@dataclass
class Kernel:
    """One .entry. `labels` maps a label to the index of the instruction after it."""

    name: str
    params: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_targets: dict[str, list[str]] = field(default_factory=dict)
    """The tables of brx.idx."""
    required_threads: tuple[int, int, int] | None = None

    def short_name(self) -> str:
        """The name without the mangled argument types that CuTeDSL appends."""
        return self.name.split("__tensor")[0].removeprefix("kernel_cutlass_")[:60]


@dataclass
class Module:
    target: str
    kernels: dict[str, Kernel] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
