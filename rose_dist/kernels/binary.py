"""What a compiled kernel says of itself: registers, stack and the widths of its global accesses."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from rose_dist.kernels.jit import Binary

_EIATTR_FRAME_SIZE = 0x11
_EIATTR_REGCOUNT = 0x2F
_WORD_FORMAT = 0x04  # the attribute's value follows it, its size in the third and fourth byte
_ACCESS = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?(ld|st)(?:\.\w+(?:::\w+)*)*?\.global(?:[\w.:]*?)(\.v\d)?\.\w?(\d+)\b", re.MULTILINE
)


@dataclass(frozen=True)
class Facts:
    """One kernel's cost as compiled."""

    registers: int
    stack_bytes: int
    """Local memory a thread: 0 unless registers spilled or an array was indexed at run time."""
    widest_load: int
    widest_store: int
    """Bits of the widest access to global memory; 0 without any."""


def facts(binary: Binary) -> Facts:
    """Read registers and stack from the cubin, access widths from the PTX."""
    attributes = _kernel_attributes(binary.cubin)
    widths: dict[str, int] = {"ld": 0, "st": 0}
    for kind, lanes, bits in _ACCESS.findall(binary.ptx):
        widths[kind] = max(widths[kind], int(bits) * int(lanes[2:] or 1))
    return Facts(
        registers=max(attributes[_EIATTR_REGCOUNT]),
        stack_bytes=max(attributes[_EIATTR_FRAME_SIZE], default=0),
        widest_load=widths["ld"],
        widest_store=widths["st"],
    )


def _kernel_attributes(cubin: bytes) -> dict[int, list[int]]:
    """All values of the two attributes in `.nv.info`, which lists (format, attribute, size, symbol, value)."""
    found: dict[int, list[int]] = {_EIATTR_REGCOUNT: [], _EIATTR_FRAME_SIZE: []}
    section = _section(cubin, b".nv.info")
    position = 0
    while position + 4 <= len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, position)
        position += 4
        if form == _WORD_FORMAT:
            if attribute in found and size == 8:
                found[attribute].append(struct.unpack_from("<I", section, position + 4)[0])
            position += size
    return found


def _section(elf: bytes, name: bytes) -> bytes:
    """Content of a section of a 64-bit little-endian ELF file; empty if there is none."""
    table, entry_size, count, names_index = struct.unpack_from("<Q", elf, 0x28) + struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name_offset, _, _, _, offset, size in headers:
        start = names + name_offset
        if elf[start : elf.index(b"\0", start)] == name:
            return elf[offset : offset + size]
    return b""
