"""What the kernels of an exchange between nodes share: places of messages, and waiting for them."""

from __future__ import annotations

from typing import Any

from rose_dist.kernels import ptx, sync, vector
from rose_dist.kernels.cute.exchange_parts import copy_of, header_word
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, Uint64, cute, cutlass
from rose_dist.kernels.exchange_sizes import HEADER_WORDS
from rose_dist.kernels.network_layout import NetworkLayout


def place_of(layout: NetworkLayout, kind: str, epoch: Any, rank: Any, message: Any) -> Any:
    """The number of a message of `kind` ("record" or "result") to or from `rank`, in outbox, inbox and signals."""
    exchange = layout.exchange
    if kind == "record":
        return group_of(layout, epoch, rank) * layout.record_messages + message
    return (copy_of(epoch, exchange.result_copies) * exchange.ranks + rank) * layout.result_messages + message


def group_of(layout: NetworkLayout, epoch: Any, rank: Any) -> Any:
    """The number of the group of `rank`, and of the epoch's copy, in areas of records."""
    return copy_of(epoch, layout.exchange.copies) * layout.groups + rank // layout.members


def first_member(layout: NetworkLayout, rank: Any) -> Any:
    """Of the group of `rank`."""
    return rank - rank % layout.members


def message_at(layout: NetworkLayout, kind: str, box: str, place: Any) -> Any:
    """Where a message stands in a network region. box: "outbox" or "inbox"."""
    size = layout.record_message_bytes if kind == "record" else layout.result_message_bytes
    return layout.start(f"{kind}_{box}") + place * size


def signal_at(layout: NetworkLayout, kind: str, place: Any) -> Any:
    """Where a message's signal stands in a network region."""
    return layout.start(f"{kind}_signals") + place * 8


def signal_of(count: Any, epoch: Any) -> Any:
    return Uint64(epoch) << Uint64(32) | Uint64(Uint32(count))


@cute.jit
def wait_signal(
    signal: Int64, epoch: Uint32, count: cute.Tensor, alive: Boolean, limit_ns: Int64, report: Int64, rank: Int32,
    peer: Int32, stage: cutlass.Constexpr,
) -> Boolean:  # fmt: skip
    """By a block: until the signal carries `epoch`; then its count is in `count`, Int32 [1] in shared memory, and the
    message is visible to the block.

    Returns:
        `alive`, or False if `limit_ns` ran out, the same in all threads; a report is then written. Without `alive`
        nothing is waited for.
    """
    cute.arch.sync_threads()
    if cute.arch.thread_idx()[0] == 0:
        count[0] = Int32(-1)
        if alive:
            count[0] = await_signal(signal, epoch, limit_ns, report, rank, peer, stage)
    cute.arch.sync_threads()
    return Boolean(count[0] >= 0)


@cute.jit
def await_signal(
    signal: Int64, epoch: Uint32, limit_ns: Int64, report: Int64, rank: Int32, peer: Int32, stage: cutlass.Constexpr
) -> Int32:
    """By one thread: the signal's count once it carries `epoch`; −1, with a report, if `limit_ns` ran out."""
    seen, count = ptx.load_acquire_u64(signal, "sys"), Int32(-1)
    polls, deadline, in_time = Int32(0), Uint64(0), Boolean(True)
    while in_time and Uint32(seen >> Uint64(32)) != epoch:
        seen = ptx.load_acquire_u64(signal, "sys")
        polls += 1
        if polls % sync.POLLS_PER_CLOCK == 0:
            now = ptx.clock_ns()
            if deadline == 0:
                deadline = now + Uint64(limit_ns)
            in_time = now < deadline
    if Uint32(seen >> Uint64(32)) == epoch:
        count = Int32(Uint32(seen & Uint64(0xFFFFFFFF)))
    else:
        sync.report_expired(report, rank, peer, stage, epoch, Uint32(seen >> Uint64(32)))
    return count


@cute.jit
def write_headers(
    layout: cutlass.Constexpr, counted: cute.Tensor, to: Int32, live: Int32, form: cutlass.Constexpr, message: Int64,
    threads: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Those for the group of `to`, by a block. counted: as for `send_headers`."""
    first, words = first_member(layout, to), HEADER_WORDS + layout.exchange.width
    for at in range(cute.arch.thread_idx()[0], layout.members * words, threads):
        member, word = at // words, at % words
        target = message + Int64(member) * layout.header_bytes + Int64(word) * 4
        vector.scalar(target, Uint32)[0] = header_word(layout.exchange, counted, first + member, word, live, form)


def load_words(address: Any, first: Any, count: int, most: int) -> Any:
    """Words `first` … of a row of `most`; any beyond its end."""
    found = []
    for i in range(count):
        at = vector.min_of(first + i, Int32(most - 1))
        found.append(Uint32(vector.scalar(address + Int64(at) * 4, Uint32)[0]))
    return found
