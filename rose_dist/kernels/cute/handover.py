"""From the router's launch to the experts', of one token, while the former still runs: data and flag in one access.

The experts' blocks are on the GPU by the time the router chooses. They need not wait for the end of that launch, nor
read counts that it has written: a packet of 16 bytes arrives as one, and its last word, the epoch, says that the other
three are there. Packets are relaxed accesses at system scope (`ptx.store_packet`) and publish nothing but themselves.

| packet | written by | read by | holds |
|---|---|---|---|
| of the choice | a thread of the router's first block | the feeding warp of each experts' block | an expert a byte |
| of the row | the router's blocks, a share each | the computing warps of each experts' block | six bf16 |
| of a result of the first layer | a warp of the experts' block that has it | the same | four bf16 |

Epoch: a u64, finished handovers in the high half and arrived blocks in the low one (`packets.current_epoch`), relaxed
at GPU scope; it publishes nothing either. A handover's is 1 + the high half, so graphs may be replayed. The router's
launch reads it behind its dependency wait. Each of the experts' blocks reads it first of all, then takes the choice,
and then adds its share, whether or not the choice came in time.

Why that is safe, given that the launch behind the router's is the experts', on the same stream:

- Epochs are those of before and after, never in between. Two handovers are used in turn, and between two launches of
  the experts that use the same one there is another such launch, or, between steps of an odd number of layers, ones
  that wait before they let the next begin (`draw`, the embedding). The experts let the next launch begin behind their
  own wait for the router's. So by then all up to the experts before are complete, and whoever reads an epoch early
  finds it finished.
- No packet is overwritten before it has been read. The router's launch has waited for all launches before it; and a
  block that gives a result has had the choice from a router that had.
- Waiting blocks keep no one from running. A launch starts when all blocks of the one before have, so the experts' wait
  for blocks that are on the GPU, the router's, and these for none behind them. For results the experts wait for one
  another: there is one block an SM, all of them find room when the launches before have ended, and the launch behind
  starts when all have. What another stream or process runs on the SMs meanwhile must end by itself, as for
  `phase_barrier`.
- Whatever is launched in between (prompts, larger batches, other layers' kernels) touches neither memory nor epoch.
- The launch behind the experts' may read early what the router's has written: it begins when that is complete.

Waits are bounded. Where the choice does not come there is no work; where the row does not, no result is waited for. If
a router's launch is not followed by one of the experts', as after an error on the host, its packets' epoch comes again:
the handover must not be used any more.
"""

from __future__ import annotations

from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute.mxfp4_operands import load_shared
from rose_dist.kernels.cute.packets import receive
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint32, Uint64, cute, cutlass, range_constexpr
from rose_dist.kernels.handover import (
    CHOICE_AT,
    EPOCH_AT,
    MOST_CHOSEN,
    NO_EXPERT,
    PACKET_BYTES,
    ROW_AT,
    result_packets,
    results_at,
    row_packets,
)
from rose_dist.kernels.stream_tiling import HANDOVER_STAGE, LAYERS_STAGE
from rose_dist.kernels.variants import WARP


@cute.jit
def give_row(
    handover: Int64, epoch: Uint32, row: Int32, hidden: cutlass.Constexpr, blocks: cutlass.Constexpr,
    threads: cutlass.Constexpr,
) -> None:  # fmt: skip
    """This block's share of the row at shared address `row`, behind which 8 bytes may be read."""
    packets = row_packets(hidden)
    share = (packets + blocks - 1) // blocks
    for first in range_constexpr(0, share, threads):
        # From the last thread on: the first warp goes on to choose.
        own = first + threads - 1 - ptx.thread_index()
        packet = cute.arch.block_idx()[0] * share + own
        if (own < share) & (packet < packets):
            words = [load_shared(row + packet * 12 + 4 * i, 1)[0] for i in range(3)]
            ptx.store_packet(handover + ROW_AT + Int64(packet) * PACKET_BYTES, (words[0], words[1], words[2], epoch))


def give_choice(handover: Any, epoch: Any, chosen: list[Any]) -> None:
    """By one thread. chosen: experts, −1 for none here."""
    experts = [Uint32(expert) & Uint32(NO_EXPERT) for expert in chosen]
    experts += [Uint32(NO_EXPERT)] * (MOST_CHOSEN - len(experts))
    words = []
    for first in range(0, MOST_CHOSEN, 4):
        word = experts[first]
        for i in range(1, 4):
            word = word | (experts[first + i] << Uint32(8 * i))
        words.append(word)
    ptx.store_packet(handover + CHOICE_AT, (words[0], words[1], words[2], epoch))


@cute.jit
def take_choice(handover: Int64, epoch: Uint32, limit_ns: Int64, report: Int64) -> tuple[Int32, Int32, Int32]:
    """By one warp: this lane's expert, how many come before it by their numbers, and how many there are. Lanes without
    one have a number above all experts'. After a wait that expired there is none.
    """
    received = cute.make_rmem_tensor(4, Uint32)
    address, none = handover + CHOICE_AT, Int32(0)
    alive = receive(
        [address], [Boolean(True)], [none], epoch, received, Boolean(True), limit_ns, report, none, HANDOVER_STAGE
    )  # fmt: skip
    lane = cute.arch.thread_idx()[0] % WARP
    word = vector.select(lane < 4, received[0], vector.select(lane < 8, received[1], received[2]))
    expert = Int32((Uint32(word) >> (Uint32(lane % 4) * Uint32(8))) & Uint32(NO_EXPERT))
    expert = vector.select(alive & (lane < MOST_CHOSEN), expert, Int32(NO_EXPERT))
    key = vector.select(expert < NO_EXPERT, expert * WARP + lane, Int32(NO_EXPERT * WARP))
    before = Int32(0)
    for other in range_constexpr(MOST_CHOSEN):
        before += vector.select(cute.arch.shuffle_sync(key, other) < key, Int32(1), Int32(0))
    return Int32(expert), before, cute.arch.shuffle_sync(before, WARP - 1)  # the last lane has none


def give_results(handover: Any, epoch: Any, expert: Any, number: Any, value: Any, hidden: int) -> None:
    """By one warp: results 8 · number … 8 · number + 7 of the token's so manieth expert, result g of which lane 4g has
    as fp32.
    """
    lane = cute.arch.thread_idx()[0] % WARP
    word = ptx.to_bf16x2(value, cute.arch.shuffle_sync(value, (lane + 4) % WARP))
    other = cute.arch.shuffle_sync(word, (lane + 8) % WARP)
    packet = expert * result_packets(hidden) + number * 2 + lane // 16
    _store_if(lane % 16 == 0, handover + results_at(hidden) + Int64(packet) * PACKET_BYTES, word, other, epoch)


@cute.jit
def _store_if(wanted: Boolean, address: Int64, first: Uint32, second: Uint32, epoch: Uint32) -> None:
    if wanted:
        ptx.store_packet(address, (first, second, Uint32(0), epoch))


def take_row(
    handover: Any, epoch: Any, limit_ns: Any, report: Any, targets: list[Any], hidden: int, threads: int
) -> Any:
    """The row, by the block's first `threads`, to shared addresses behind which 8 bytes may be written; returns whether
    this thread's part came in time.
    """
    return _take(
        handover + ROW_AT, targets, epoch, Boolean(True), limit_ns, report, row_packets(hidden), 3, threads,
        HANDOVER_STAGE,
    )  # fmt: skip


def take_results(
    handover: Any, epoch: Any, limit_ns: Any, report: Any, alive: Any, expert: Any, target: Any, hidden: int,
    threads: int,
) -> None:  # fmt: skip
    """All of an expert's, by the block's first `threads`, to a shared address. Without `alive` none is waited for."""
    packets = result_packets(hidden)
    first = handover + results_at(hidden) + Int64(expert) * (packets * PACKET_BYTES)
    _take(first, [target], epoch, alive, limit_ns, report, packets, 2, threads, LAYERS_STAGE)


@cute.jit
def _take(
    first: Int64, targets: list[Any], epoch: Uint32, alive: Boolean, limit_ns: Int64, report: Int64,
    packets: cutlass.Constexpr, words: cutlass.Constexpr, threads: cutlass.Constexpr, stage: cutlass.Constexpr,
) -> Boolean:  # fmt: skip
    """So many packets from address `first` on, of so many words each, as `receive`."""
    rounds = (packets + threads - 1) // threads
    received, none = cute.make_rmem_tensor(4 * rounds, Uint32), Int32(0)
    numbers = [i * threads + cute.arch.thread_idx()[0] for i in range(rounds)]
    there = [Boolean(number < packets) for number in numbers]
    addresses = [first + Int64(vector.min_of(number, Int32(packets - 1))) * PACKET_BYTES for number in numbers]
    alive = receive(addresses, there, [none] * rounds, epoch, received, alive, limit_ns, report, none, stage)
    for i in range_constexpr(rounds):
        behind, own = numbers[i] * (4 * words), [received[4 * i + j] for j in range(words)]
        if there[i]:
            for target in targets:
                _put(target + behind, own)
    return alive


def _put(address: Any, words: list[Any]) -> None:
    """To shared memory."""
    pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=4)
    tensor = cute.make_tensor(pointer, cute.make_layout(len(words)))
    for i, word in enumerate(words):
        tensor[i] = word


def take_epoch(handover: Any, first_block: Any, blocks: Any) -> None:
    """One thread of each block, when all of the block's have read the epoch."""
    share = vector.select(first_block, Uint64(1 << 32) - Uint64(blocks - 1), Uint64(1))
    ptx.add_relaxed_u64(handover + EPOCH_AT, share, "gpu")
