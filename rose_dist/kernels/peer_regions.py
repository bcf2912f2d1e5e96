"""How the memory that GPUs share for exchanges is laid out, as plain arithmetic."""

from __future__ import annotations

MAX_RANKS = 8
"""GPUs of one NVLink domain that exchange."""
MAX_BLOCKS = 256
"""Of a grid, that meet their counterparts on other GPUs one by one."""
MAX_ROUNDS = 4
"""In which a block of a two-shot exchange takes its part."""
LINE_BYTES = 128
"""What crosses a link as one write at most, and where what is cut for it begins."""
PACKET_BYTES = 16
PACKET_WORDS = 3
"""Data words of a packet; the fourth is its epoch."""
PACKET_VALUES = 2 * PACKET_WORDS
"""Of bf16."""

ASSIGN_STAGE, ONE_SHOT_STAGE, ADD_STAGE, TAKE_STAGE, MULTICAST_ADD_STAGE, MULTICAST_TAKE_STAGE = range(16, 22)
HEADER_STAGE, RECORD_STAGE, CHUNK_STAGE, RESULT_STAGE, RESULT_CHUNK_STAGE = range(22, 27)
NETWORK_RECORD_STAGE, NETWORK_RESULT_STAGE = range(40, 42)
"""The numbers of waits in reports."""
STAGES = {
    ASSIGN_STAGE: "the slot assignment of a local dispatch",
    ONE_SHOT_STAGE: "a one-shot all-reduce",
    ADD_STAGE: "a two-shot all-reduce, for parts to add",
    TAKE_STAGE: "a two-shot all-reduce, for sums",
    MULTICAST_ADD_STAGE: "an all-reduce by multicast, for what is to be added",
    MULTICAST_TAKE_STAGE: "an all-reduce by multicast, for sums",
    HEADER_STAGE: "a dispatch, for its header",
    RECORD_STAGE: "a dispatch, for a token's packets",
    CHUNK_STAGE: "a dispatch, for a chunk of rows",
    RESULT_STAGE: "a combine, for a result's packets",
    NETWORK_RECORD_STAGE: "a dispatch, for a message from another node",
    NETWORK_RESULT_STAGE: "a combine, for a message from another node",
    RESULT_CHUNK_STAGE: "a combine, for a chunk of results",
}


def packets(words: int) -> int:
    """Packets that a row of so many words takes."""
    return -(-words // PACKET_WORDS)


def lines(size: int) -> int:
    """`size` bytes rounded up to whole lines, at least one."""
    return max(1, -(-size // LINE_BYTES)) * LINE_BYTES


def inbox_bytes(ranks: int, source_bytes: int) -> int:
    """Of one rank's inbox; `source_bytes` for what one sender sends in one exchange."""
    return 2 * ranks * source_bytes


def two_shot_bytes(ranks: int, slice_bytes: int) -> int:
    """Of one rank's region for two shots: inbox and outbox, and the flags of both stages."""
    return 2 * ranks * slice_bytes + 2 * MAX_ROUNDS * ranks * MAX_BLOCKS * 4


def multicast_bytes(size: int) -> int:
    """Of one rank's region for multicast, for tensors of up to `size` bytes, a multiple of 16."""
    return 2 * size + 2 * MAX_BLOCKS * 4
