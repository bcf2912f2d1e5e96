"""Hand-written PTX for tests: a kernel from its body, and a launch from plain arguments."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from tests.ptx.launch import Launch
from tests.ptx.parser import parse
from tests.ptx.program import Program

_REGISTERS = (
    ".reg .pred %p<40>; .reg .b16 %h<40>; .reg .b32 %r<80>; .reg .b64 %d<40>; .reg .f32 %f<40>; .reg .f64 %fd<20>;"
)


def kernel(body: str, params: Sequence[str] = (), *, declarations: str = "") -> Program:
    """A program of one kernel. `params` are "type name"; registers are %p (pred), %h (16), %r (32), %d (64), %f and
    %fd.
    """
    listed = ", ".join(f".param .{p.split()[0]} {p.split()[1]}" for p in params)
    head = f".version 9.4\n.target sm_90a\n.address_size 64\n{declarations}\n.visible .entry test({listed})\n"
    text = f"{head}{{\n{_REGISTERS}\n{body}\nret;\n}}\n"
    module = parse(text)
    return Program(module, module.kernels["test"])


def parameters(program: Program, arguments: Sequence[Any]) -> bytes:
    """The parameter block: tensors by address, ints and floats by the parameter's size."""
    block = bytearray(program.param_size)
    for parameter, argument in zip(program.kernel.params, arguments, strict=True):
        value = argument.data_ptr() if isinstance(argument, torch.Tensor) else argument
        if isinstance(value, float):
            data = struct.pack("<f" if parameter.size == 4 else "<d", value)
        else:
            data = (int(value) & ((1 << 8 * parameter.size) - 1)).to_bytes(parameter.size, "little")
        at = program.param_offsets[parameter.name]
        block[at : at + parameter.size] = data
    return bytes(block)


def launch(program: Program, *arguments: Any, grid: int = 1, block: int = 32, gpu: int = 0, **options: Any) -> Launch:
    return Launch(program, (grid, 1, 1), (block, 1, 1), parameters(program, arguments), gpu, **options)
