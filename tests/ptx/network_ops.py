"""NVSHMEM's put-with-signal as an asynchronous message to another GPU.

The payload lands in pieces of any size and in any order, each some turns after the call, and the signal after all of
them. Nothing else is promised: messages overtake one another, and a signal publishes its own payload alone, nothing
that the sender did or had seen before. The source is read when a piece lands, so a sender that reuses it too early is
found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.allocation import Allocation
from tests.ptx.errors import OutOfBounds, PtxError, Site, UnknownInstruction
from tests.ptx.gang import Barrier, Gang, Split
from tests.ptx.memory_model import Access
from tests.ptx.number_formats import Array
from tests.ptx.ptx_types import ptx_type
from tests.ptx.syntax import Addr, Instruction, Sym, Vec
from tests.ptx.topology import SYS

if TYPE_CHECKING:
    from tests.ptx.program import Program

SIGNAL_SET = 9
"""NVSHMEM_SIGNAL_SET."""
PUT_SIGNAL = "nvshmemx_putmem_signal_nbi_block"
_PIECES = (1, 2, 4, 8)
_MEET = -1
"""The number, among a CTA's barriers, of the one at which its threads meet for a call."""


def store_argument(program: Program, instruction: Instruction) -> Callable[[Gang], None]:
    """st.param: an argument of the call that follows."""
    address, value = instruction.operands
    assert isinstance(address, Addr)
    assert isinstance(address.base, Sym)
    name, kind = address.base.name, ptx_type(instruction.parts[-1])
    if isinstance(value, Vec):
        return lambda g: None  # of a structure, which only printf takes
    source = program.operands.gather(value, kind)

    def run(g: Gang) -> None:
        lanes = g.active()
        g.arguments.setdefault(name, np.zeros(g.lanes, np.uint64))[lanes] = source(g, lanes).astype(np.uint64)

    return run


def put_signal(program: Program, instruction: Instruction) -> Callable[[Gang, Split], bool]:
    """By all threads of a CTA, with the same arguments: (target, source, bytes, signal, value, operation, PE)."""
    names = [item.name for item in instruction.operands[-1].items]  # type: ignore[union-attr]

    def handle(g: Gang, split: Split) -> bool:
        lanes = np.flatnonzero(split.mask)
        arguments = []
        for name in names:
            values = np.unique(g.arguments[name][lanes])
            if len(values) != 1:
                raise PtxError(f"argument {len(arguments)} of a block's put differs between its threads")
            arguments.append(int(values[0]))
        barrier = g.cta.barriers.setdefault(_MEET, Barrier())
        if barrier.then is None:
            site, thread = g.site_of(instruction, int(lanes[0])), int(g.threads[lanes[0]])
            barrier.then = lambda: _send(g, thread, site, arguments)
            g.cta.put_arguments = arguments
        elif g.cta.put_arguments != arguments:
            raise PtxError("the arguments of a block's put differ between its threads")
        barrier.arrived.append(g.threads[split.mask])
        barrier.waiting.append((g, split))
        split.waiting = "a block's put"
        from tests.ptx.control_ops import complete  # noqa: PLC0415 - which imports this module

        complete(g.cta, barrier)
        return not split.waiting

    return handle


def _send(g: Gang, thread: int, site: Site, arguments: list[int]) -> None:
    target, source, size, signal, value, operation, peer = arguments
    if operation != SIGNAL_SET:
        raise UnknownInstruction(f"signal operation {operation} is not modelled")
    machine, pe = g.machine, peer & 0xFFFFFFFF
    try:
        message = Message(
            g, thread, site, _find(g, source, size), _on(g, target, size, pe), _on(g, signal, 8, pe), value
        )
    except PtxError as error:
        raise error.at(site) from None
    cuts = {0, size, *(machine.rng.randrange(size) & -4 for _ in range(machine.rng.choice(_PIECES)) if size)}
    edges = sorted(cuts)
    message.left = len(edges) - 1
    machine.copies += [Piece(message, start, end) for start, end in pairwise(edges)]
    if not message.left:
        machine.copies.append(Signal(message))


def _find(g: Gang, address: int, size: int) -> tuple[Allocation, int]:
    memory = g.machine.addresses.find(address, max(size, 1))
    return memory, address - memory.base


def _on(g: Gang, address: int, size: int, pe: int) -> tuple[Allocation, int]:
    """The place on PE `pe` that a symmetric address of this GPU stands for."""
    mine, offset = _find(g, address, size)
    for members in g.machine.symmetric:
        if mine in members:
            if members.index(mine) != g.cta.gpu:
                raise OutOfBounds(f"0x{address:x} is symmetric memory of another GPU: a put takes this GPU's address")
            if not 0 <= pe < len(members):
                raise OutOfBounds(f"PE {pe} of {len(members)}")
            return members[pe], offset
    raise OutOfBounds(f"0x{address:x} lies in {mine.name}, which is not symmetric")


@dataclass(eq=False)
class Message:
    g: Gang
    thread: int
    site: Site
    source: tuple[Allocation, int]
    target: tuple[Allocation, int]
    signal: tuple[Allocation, int]
    value: int
    left: int = 0

    @property
    def agent(self) -> int:
        return self.g.machine.agent(self.g.cta)

    def write(self, place: tuple[Allocation, int], data: Array, access: Access) -> None:
        """As the CTA's asynchronous agent. What was read before the memory is reused is no race: the sender knows it
        from messages that came back, which this model does not follow through the network.
        """
        memory, offset = place
        model = self.g.machine.memory
        offsets = offset + access.size * np.arange(len(data))
        policy, model.races.policy = model.races.policy, "off"
        try:
            model.write(memory, offsets, data, access, np.full(len(data), self.agent))
        finally:
            model.races.policy = policy


@dataclass(eq=False)
class Piece:
    """A part of a message's payload, on its way."""

    message: Message
    start: int
    end: int

    def finish(self) -> None:
        message = self.message
        memory, offset = message.source
        data = memory.data[offset + self.start : offset + self.end].copy()
        target, at = message.target
        unit = 4 if not (self.start | self.end | at) & 3 else 1
        words: Any = data.view(np.uint32) if unit == 4 else data
        message.write((target, at + self.start), words, Access(unit, unit))
        message.left -= 1
        if not message.left:
            message.g.machine.copies.append(Signal(message))


@dataclass(eq=False)
class Signal:
    """The end of a message, whose payload is there."""

    message: Message

    def finish(self) -> None:
        message = self.message
        value = np.array([message.value], np.uint64)
        message.write(message.signal, value, Access(8, 8, SYS, release=True))
