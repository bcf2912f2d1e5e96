"""Runs one instruction on arrays: thread i applies it to element i of each input."""

from __future__ import annotations

import numpy as np
import torch

from tests.ptx.machine import Machine
from tests.ptx.number_formats import Array
from tests.ptx.ptx_types import Type, ptx_type
from tests.ptx.source import kernel, launch

_FILES = {"p": "%p", 16: "%h", 32: "%r", 64: "%d"}


def evaluate(
    instruction: str, inputs: tuple[str, ...], output: str, *arrays: Array, block: int = 32, seed: int = 0
) -> Array:
    """`instruction` is written with {d} for its result and {a}, {b}, {c}, {e} for its operands; `inputs` and `output`
    name their types. The arrays hold raw or typed elements; the result has the output type's dtype."""
    kinds, result = [ptx_type(t) for t in inputs], ptx_type(output)
    count = max((len(a) for a in arrays), default=block)
    params = [f"u64 in{i}" for i in range(len(kinds))] + ["u64 out"]
    lines = ["mov.u32 %r60, %tid.x; mov.u32 %r61, %ctaid.x; mov.u32 %r62, %ntid.x; mad.lo.u32 %r60, %r61, %r62, %r60;"]
    names = {}
    for i, (letter, kind) in enumerate(zip("abce", kinds, strict=False)):
        register = f"{_FILES['p' if kind.kind == 'p' else max(kind.bits, 16)]}{20 + i}"
        lines.append(_load(i, kind, register))
        names[letter] = register
    file = _FILES["p" if result.kind == "p" else max(result.bits, 16)]
    lines.append(instruction.format(d=f"{file}30", **names))
    lines.append(_store(result, f"{file}30"))
    machine = Machine()
    held = [_tensor(machine, np.resize(a, count), k) for a, k in zip(arrays, kinds, strict=True)]
    out = machine.zeros(count * max(result.bytes, 1), torch.uint8)
    assert count % block == 0, f"{count} elements are no multiple of {block}"
    program = kernel("\n".join(lines), params)
    machine.run([launch(program, *held, out, grid=count // block, block=block)], seed=seed)
    raw: Array = out.numpy().view(result.raw)
    return raw.view(result.dtype)


def _tensor(machine: Machine, values: Array, kind: Type) -> torch.Tensor:
    raw = np.ascontiguousarray(values).view(np.uint8)
    if len(raw) != len(values) * max(kind.bytes, 1):
        raise ValueError(f"{values.dtype} elements are not .{kind.name}")
    return machine.tensor(raw)


def _load(i: int, kind: Type, register: str) -> str:
    bits = 8 if kind.kind == "p" else kind.bits
    text = f"ld.param.u64 %d10, [in{i}]; mul.wide.u32 %d11, %r60, {bits // 8}; add.u64 %d10, %d10, %d11;"
    if kind.kind == "p":
        return text + f"ld.global.u8 %h39, [%d10]; setp.ne.u16 {register}, %h39, 0;"
    return text + f"ld.global.b{bits} {register}, [%d10];"


def _store(kind: Type, register: str) -> str:
    bits = 8 if kind.kind == "p" else kind.bits
    text = f"ld.param.u64 %d10, [out]; mul.wide.u32 %d11, %r60, {bits // 8}; add.u64 %d10, %d10, %d11;"
    if kind.kind == "p":
        return text + f"selp.u16 %h39, 1, 0, {register}; st.global.u8 [%d10], %h39;"
    return text + f"st.global.b{bits} [%d10], {register};"
