"""Rows between the GPUs of one NVLink domain in 16-byte packets: three words of data and the epoch.

A packet arrives as one, so its epoch says that its data is there: no fence, no flag of its own, no barrier. The data
may be any bits, because they are never looked at to find out.

Inbox: in every rank's symmetric memory, packets [2 parities, ranks (the sender), source_bytes / 16]. Only the sender
writes its part, by `store_packet`; the owner polls it by `load_packet`.

Epoch: `state` is a u64 in local memory, completed exchanges in its high half and arrived blocks in its low half. Every
block adds to it once when it is done, and the sum of one launch's blocks is 2^32, whatever their number. It so grows by
one for each exchange on the device, in replayed graphs too, and nothing is ever reset. The u32 epoch of an exchange is
1 + the high half; all ranks make the same exchanges.

Why two parities are enough: whoever sends in exchange e has finished e − 1, so has received from every peer in e − 1,
and that peer began e − 1 after it had read all that was sent to it in e − 2, which had the same parity.
"""

from __future__ import annotations

from typing import Any

import torch

from rose_dist.kernels import ptx, sync, vector
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, Uint64, cute, cutlass, range_constexpr


@cute.jit
def current_epoch(state: Int64) -> Uint32:
    """The epoch of the exchange that this launch makes; the same in all its threads."""
    return Uint32(ptx.load_relaxed_u64(state, "gpu") >> Uint64(32)) + Uint32(1)


@cute.jit
def finish_epoch(state: Int64, first_block: Boolean, blocks: Int32, used: Boolean) -> None:
    """Every block, after its last wait. Without `used`, the same in all blocks, no exchange is counted."""
    cute.arch.sync_threads()
    if (cute.arch.thread_idx()[0] == 0) & used:
        share = Uint64(1)
        if first_block:
            share = Uint64(1 << 32) - Uint64(blocks - 1)
        ptx.add_relaxed_u64(state, share, "gpu")


def apart(peers: list[Any], rank: Any) -> tuple[list[Any], Any]:
    """The other ranks' addresses, in rank order, and this rank's own."""
    others = [Int64(vector.select(rank > i, peers[i], peers[i + 1])) for i in range(len(peers) - 1)]
    own = peers[0]
    for other in range(1, len(peers)):
        own = Int64(vector.select(rank == other, peers[other], own))
    return others, own


def other_ranks(ranks: int, rank: Any) -> list[Any]:
    """Their numbers."""
    return [Int32(vector.select(rank > i, Int32(i), Int32(i + 1))) for i in range(ranks - 1)]


def in_rank_order(own: Any, received: Any, word: Any, rank: Any, ranks: int) -> list[Any]:
    """A word of every rank: this rank's `own`, and of the others' packets in `received` [4 · (ranks − 1)]."""
    words = []
    for source in range(ranks):
        found = own
        if source > 0:
            found = vector.select(rank < source, received[4 * (source - 1) + word], found)
        if source < ranks - 1:
            found = vector.select(rank > source, received[4 * source + word], found)
        words.append(Uint32(found))
    return words


def send(inboxes: list[Any], offset: Any, words: list[Any], epoch: Any) -> None:
    """One packet into each of the inboxes."""
    for inbox in inboxes:
        ptx.store_packet(inbox + offset, (words[0], words[1], words[2], epoch))


def widen(word: Any, dtype: Any) -> Any:
    """The elements of a word, one fp32 or two bf16, as fp32."""
    if dtype == torch.float32:
        return [ptx.from_bits(word)]
    return [ptx.from_bits(word << Uint32(16)), ptx.from_bits(word & Uint32(0xFFFF0000))]


def narrow(values: Any, dtype: Any) -> Any:
    """The word of one fp32, or of two fp32 rounded to bf16."""
    if dtype == torch.float32:
        return ptx.bits(values[0])
    return ptx.to_bf16x2(values[0], values[1])


@cute.jit
def poll(addresses: list[Any], wanted: list[Any], epoch: Uint32, received: cute.Tensor) -> Boolean:
    """One look at the packets at `addresses` into `received` [4 · packets]; whether all that are wanted are there."""
    there = Boolean(True)
    for number in range_constexpr(len(addresses)):
        packet = ptx.load_packet(addresses[number])
        for word in range_constexpr(4):
            received[4 * number + word] = Uint32(packet[word])
        there = there & ((Uint32(packet[3]) == epoch) | ~Boolean(wanted[number]))
    return there


@cute.jit
def receive(
    addresses: list[Any], wanted: list[Any], senders: list[Any], epoch: Uint32, received: cute.Tensor, alive: Boolean,
    limit_ns: Int64, report: Int64, rank: Int32, stage: cutlass.Constexpr,
) -> Boolean:  # fmt: skip
    """The packets at `addresses`, which may all be read, until those that are `wanted` are there.

    Returns:
        `alive`, or False if `limit_ns` ran out: a report then names the rank, the sender, the stage, the epoch wanted
        and the one seen. Without `alive` nothing is waited for.
    """
    there = poll(addresses, wanted, epoch, received)
    if alive and not there:
        polls, deadline, in_time = Int32(0), Uint64(0), Boolean(True)
        while in_time and not there:
            there = poll(addresses, wanted, epoch, received)
            polls += 1
            if polls % sync.POLLS_PER_CLOCK == 0:
                now = ptx.clock_ns()
                if deadline == 0:
                    deadline = now + Uint64(limit_ns)
                in_time = now < deadline
        if not there:
            alive = Boolean(False)
            for number in range_constexpr(len(addresses)):
                if Boolean(wanted[number]) & (received[4 * number + 3] != epoch):
                    seen = received[4 * number + 3]
                    sync.report_expired(report, rank, Int32(senders[number]), stage, epoch, seen)
    return alive
