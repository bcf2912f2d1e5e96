"""Every way to weaken the synchronisation of a kernel by one step: a protocol test must catch each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from tests.ptx.launch import Launch
from tests.ptx.program import Program
from tests.ptx.syntax import Instruction

_ORDERED = ("ld", "st", "red", "atom", "multimem", "fence")
_NOTHING = ("pmevent",)


@dataclass(frozen=True)
class Weakening:
    """`program` is the kernel with one instruction changed, as `change` says; `line` and `text` are the original's."""

    line: int
    text: str
    change: str
    program: Program

    def __str__(self) -> str:
        return f"line {self.line}: `{self.text}`: {self.change}"

    def apply(self, launch: Launch) -> Launch:
        """The same launch of the weakened kernel."""
        return dataclasses.replace(launch, program=self.program)


def weakenings(program: Program, *, scopes: bool = True, barriers: bool = True) -> Iterator[Weakening]:
    """One weakened program after the other.

    Releases and acquires are made relaxed, one side at a time; with `scopes`, sys becomes gpu and gpu becomes cta;
    fences and griddepcontrol.wait are dropped and, with `barriers`, the barriers of CTAs, warps and clusters too.
    """
    for index, instruction in enumerate(program.kernel.instructions):
        for change, parts in _changes(instruction.parts, scopes=scopes, barriers=barriers):
            yield Weakening(instruction.line, instruction.text, change, _replaced(program, index, parts))


def _changes(parts: tuple[str, ...], *, scopes: bool, barriers: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    fence = parts[0] == "fence" or parts == ("griddepcontrol", "wait")
    if fence or (barriers and parts[0] in ("bar", "barrier") and {"sync", "wait"} & set(parts)):
        yield "dropped", _NOTHING
    elif parts[0] in _ORDERED:
        for order in ("release", "acquire"):
            if order in parts:
                yield f"{order} made relaxed", _with(parts, order, "relaxed")
        if "acq_rel" in parts:
            yield "release dropped", _with(parts, "acq_rel", "acquire")
            yield "acquire dropped", _with(parts, "acq_rel", "release")
    if scopes and parts[0] in _ORDERED and {"release", "acquire", "acq_rel", "sc"} & set(parts):
        for wide, narrow in (("sys", "gpu"), ("gpu", "cta")):
            if wide in parts:
                yield f"scope {wide} made {narrow}", _with(parts, wide, narrow)


def _with(parts: tuple[str, ...], old: str, new: str) -> tuple[str, ...]:
    return tuple(new if part == old else part for part in parts)


def _replaced(program: Program, index: int, parts: tuple[str, ...]) -> Program:
    old = program.kernel.instructions[index]
    operands = () if parts == _NOTHING else old.operands
    return program.replaced(index, Instruction(parts, operands, old.guard, old.line, old.text))
