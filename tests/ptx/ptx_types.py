"""PTX's types: name -> width, kind and the numpy dtype that carries the raw or typed value."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tests.ptx.errors import UnknownInstruction

_NUMPY_FLOAT = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


@dataclass(frozen=True)
class Type:
    """`kind` is b (untyped bits), u, s, f (IEEE float), p (predicate) or x (packed or narrow float, carried as raw
    bits).
    """

    name: str
    kind: str
    bits: int

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @cached_property
    def dtype(self) -> np.dtype:
        if self.kind == "p":
            return np.dtype(np.bool_)
        if self.kind == "f":
            return np.dtype(_NUMPY_FLOAT[self.name])
        return np.dtype(f"{'i' if self.kind == 's' else 'u'}{self.bits // 8}")

    @cached_property
    def raw(self) -> np.dtype:
        """The unsigned dtype of the same width."""
        return np.dtype(np.bool_) if self.kind == "p" else np.dtype(f"u{self.bits // 8}")


_TYPES = {
    t.name: t
    for t in (
        *(Type(f"{k}{n}", k, n) for k in "bus" for n in (8, 16, 32, 64)),
        *(Type(name, "f", 8 * np.dtype(d).itemsize) for name, d in _NUMPY_FLOAT.items()),
        Type("pred", "p", 8),
        Type("bf16", "x", 16),
        Type("tf32", "x", 32),
        Type("f16x2", "x", 32),
        Type("bf16x2", "x", 32),
        Type("u16x2", "x", 32),
        Type("s16x2", "x", 32),
        Type("e4m3x2", "x", 16),
        Type("e5m2x2", "x", 16),
        Type("e2m3x2", "x", 16),
        Type("e3m2x2", "x", 16),
        Type("e2m1x2", "x", 8),
        Type("ue8m0x2", "x", 16),
        Type("f32x2", "x", 64),
    )
}


def is_type(name: str) -> bool:
    return name in _TYPES


def ptx_type(name: str) -> Type:
    """The type called `name`. Raises UnknownInstruction for one the interpreter does not carry (e.g. b128)."""
    try:
        return _TYPES[name]
    except KeyError:
        raise UnknownInstruction(f"type .{name} is not modelled; known: {', '.join(sorted(_TYPES))}") from None


def register_type(name: str) -> Type:
    """The type of a `.reg` declaration."""
    return ptx_type(name)
