"""What the kernels of an exchange share: who holds an expert, headers, and the words of scales.

The memory they write into one another is that of `rose_dist.kernels.exchange_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels import ptx, vector
from rose_dist.kernels.cute import packets
from rose_dist.kernels.dsl import Boolean, Int32, Int64, Uint8, Uint32, Uint64, const_expr, cute, cutlass
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import HEADER_WORDS, NO_PLACE, ORDINAL_BITS, ROWS
from rose_dist.kernels.peer_regions import HEADER_STAGE, PACKET_BYTES, PACKET_WORDS
from rose_dist.kernels.variants import WARP

ORDINAL_MASK = (1 << ORDINAL_BITS) - 1


def first_expert(layout: Any, rank: Any) -> Any:
    """`layout.first_expert` of a rank that the device knows."""
    size, longer = divmod(layout.experts, layout.ranks)
    return rank * size + vector.min_of(rank, Int32(longer))


def held(layout: Any, rank: Any) -> Any:
    """How many experts a rank has."""
    size, longer = divmod(layout.experts, layout.ranks)
    return vector.select(rank < longer, Int32(size + 1), Int32(size))


def owner(layout: Any, expert: Any) -> Any:
    """The rank that holds an expert ≥ 0."""
    size, longer = divmod(layout.experts, layout.ranks)
    long_ones = expert // (size + 1)
    if size == 0:
        return long_ones
    edge = longer * (size + 1)
    return Int32(vector.select(expert < edge, long_ones, longer + (expert - edge) // size))


def first_places(layout: Any, valid: list[Any], experts: list[Any], seen: Any) -> tuple[list[Any], Any]:
    """Of some places of a token's top k, which are the first of their expert's rank, or node with `node_ranks`; `seen`:
    u32, the ranks or nodes of earlier places as bits, also returned with those of these places.
    """
    first = []
    for here, expert in zip(valid, experts, strict=True):
        rank = owner(layout, vector.select(here, expert, Int32(0)))
        bit = Uint32(1) << Uint32(rank // max(1, layout.node_ranks))
        first.append(Boolean(here & (seen & bit == 0)))
        seen = Uint32(vector.select(here, seen | bit, seen))
    return first, seen


def peer(peers: Any, rank: Any) -> Any:
    """The address of a rank's region, 0 for a rank that is across the network. peers: address of int64 [ranks]."""
    return vector.scalar(peers + Int64(rank) * 8, Int64)[0]


def place(layout: Any, expert: Any, ordinal: Any) -> Any:
    """The word of `meta` for an expert ≥ 0 whose pair is the source's number `ordinal`."""
    local = expert - first_expert(layout, owner(layout, expert))
    return Uint32(local << ORDINAL_BITS | ordinal)


def across(expert: Any, ordinal: Any) -> Any:
    """The same in a message to several ranks, which says the expert's number among all."""
    return Uint32(expert << ORDINAL_BITS | ordinal)


def arrived(layout: Any, word: Any) -> tuple[Any, Any]:
    """What became of a word of `across`: the expert's rank, −1 if `NO_PLACE`, and that rank's word of `meta`."""
    there = word != Uint32(NO_PLACE)
    expert = Int32(vector.select(there, Int32(word >> Uint32(ORDINAL_BITS)), Int32(0)))
    mine = place(layout, expert, Int32(word & Uint32(ORDINAL_MASK)))
    return Int32(vector.select(there, owner(layout, expert), Int32(-1))), mine


def copy_of(epoch: Any, copies: int) -> Any:
    """Which copy of an area an exchange uses."""
    return Int64(epoch & Uint32(copies - 1))


@cute.jit
def send_headers(
    layout: cutlass.Constexpr, counted: cute.Tensor, peers: Int64, rank: Int32, live: Int32, form: Int32, epoch: Uint32,
    block: Int32, blocks: Int32, threads: cutlass.Constexpr,
) -> None:  # fmt: skip
    """This source's headers, each by one of `blocks` blocks. counted: Int32 [experts + ranks] in shared memory: pairs
    for each expert, then records for each rank.
    """
    at = layout.start("headers") + (copy_of(epoch, layout.copies) * layout.ranks + rank) * layout.header_bytes
    for to in range(block, layout.ranks, blocks):
        for packet in range(cute.arch.thread_idx()[0], layout.header_packets, threads):
            words = [
                header_word(layout, counted, to, packet * PACKET_WORDS + i, live, form) for i in range(PACKET_WORDS)
            ]
            if peer(peers, to) != 0:
                ptx.store_packet(peer(peers, to) + at + Int64(packet) * PACKET_BYTES, (*words, epoch))


def header_word(layout: Any, counted: Any, to: Any, at: Any, live: Any, form: Any) -> Any:
    """Words beyond the destination's experts are any."""
    expert = vector.min_of(first_expert(layout, to) + at - HEADER_WORDS, Int32(layout.experts - 1))
    word = counted[vector.select(at < HEADER_WORDS, layout.experts + to, expert)]
    word = vector.select(at == 1, live, word)
    return Uint32(vector.select(at == 2, Int32(form), word))


@cute.jit
def receive_headers(
    layout: cutlass.Constexpr, own: Int64, epoch: Uint32, headers: cute.Tensor, passed: cute.Tensor, limit_ns: Int64,
    report: Int64, rank: Int32, threads: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Every source's header into `headers` Int32 [ranks, header words] in shared memory; all 0 if one has not come in
    time, and `passed`, Int32 [1] in shared memory, is then 0, else 1. Visible to the block.
    """
    thread, words = cute.arch.thread_idx()[0], HEADER_WORDS + layout.width
    if thread == 0:
        passed[0] = Int32(1)
    cute.arch.sync_threads()
    start = own + layout.start("headers") + copy_of(epoch, layout.copies) * (layout.ranks * layout.header_bytes)
    local, alive = held(layout, rank), Boolean(True)
    for number in range(thread, layout.ranks * layout.header_packets, threads):
        source, packet = number // layout.header_packets, number % layout.header_packets
        received = cute.make_rmem_tensor(4, Uint32)
        alive = packets.receive(
            [start + Int64(number) * PACKET_BYTES], [True], [source], epoch, received, alive, limit_ns, report, rank,
            HEADER_STAGE,
        )  # fmt: skip
        for i in cutlass.range_constexpr(PACKET_WORDS):
            at = packet * PACKET_WORDS + i
            if at < words:
                headers[source * words + at] = Int32(
                    vector.select(at < HEADER_WORDS + local, Int32(received[i]), Int32(0))
                )
    if not alive:
        passed[0] = Int32(0)
    cute.arch.sync_threads()
    if passed[0] == 0:
        for at in range(thread, layout.ranks * words, threads):
            headers[at] = Int32(0)
    cute.arch.sync_threads()


@dataclass(frozen=True)
class Arrivals:
    """What the sources have sent, by their headers: Int32 [ranks, `stride`] in shared memory. Units are records that
    came as packets or chunks of plain rows, by the form that is asked for.
    """

    layout: ExchangeLayout
    stride: int

    def units(self, headers: Any, forms: tuple[int, ...], source: Any) -> Any:
        """Of a source, 0 if it chose none of `forms`."""
        at = source * self.stride
        count = headers[at]
        if ROWS in forms:
            count = (headers[at + 1] + (self.layout.chunk - 1)) // self.layout.chunk
        chosen = headers[at + 2] == forms[0]
        for form in forms[1:]:
            chosen = chosen | (headers[at + 2] == form)
        return Int32(vector.select(chosen, count, Int32(0)))

    @cute.jit
    def total(self, headers: cute.Tensor, forms: cutlass.Constexpr) -> Int32:
        """Of all sources."""
        total = Int32(0)
        for source in range(self.layout.ranks):
            total += self.units(headers, forms, source)
        return total

    @cute.jit
    def locate(self, headers: cute.Tensor, forms: cutlass.Constexpr, item: Int32, rank: Int32) -> Any:
        """Unit number `item`: its source, and its number there. The next rank's come first, this one's own last."""
        source, left, found = Int32(0), item, Boolean(False)
        for step in range(1, self.layout.ranks + 1):
            candidate = (rank + step) % self.layout.ranks
            count = self.units(headers, forms, candidate)
            if not found:
                if left < count:
                    source, found = Int32(candidate), Boolean(True)
                else:
                    left -= count
        return source, left

    @cute.jit
    def turns(self, headers: cute.Tensor, forms: cutlass.Constexpr) -> Int32:
        """Items for `by_turns`."""
        most = Int32(0)
        for source in range(self.layout.ranks):
            most = vector.max_of(most, self.units(headers, forms, source))
        return most * self.layout.ranks

    def turns_of_others(self, headers: Any, forms: tuple[int, ...]) -> Any:
        """Items for `others_by_turns`."""
        return self.turns(headers, forms) // self.layout.ranks * (self.layout.ranks - 1)

    def others_by_turns(self, headers: Any, forms: tuple[int, ...], item: Any, rank: Any) -> Any:
        """`by_turns` without this rank's own units. Blocks that take every n-th item of `by_turns` would have other
        numbers of own ones, for even n and two ranks all or none."""
        others = self.layout.ranks - 1
        # A number of blocks that is a multiple of `others` must not tie a block to one source.
        number = item // others
        source = (rank + 1 + (item + number) % others) % self.layout.ranks
        return source, number, Boolean(number < self.units(headers, forms, source))

    def by_turns(self, headers: Any, forms: tuple[int, ...], item: Any, rank: Any) -> Any:
        """Item number `item`, in the order in which units arrive: first units of all sources, second ones, …: its
        source, its number there, and whether there is one.
        """
        ranks = self.layout.ranks
        source, number = (rank + 1 + item % ranks) % ranks, item // ranks
        return source, number, Boolean(number < self.units(headers, forms, source))


@cute.jit
def count_sent(
    layout: cutlass.Constexpr, counted: cute.Tensor, sent: Int64, rank: Int32, threads: cutlass.Constexpr
) -> None:
    """Add the pairs for other ranks' experts to the u64 at `sent`; by one block."""
    thread, mine = cute.arch.thread_idx()[0], first_expert(layout, rank)
    total = Int32(0)
    for first in range(0, layout.experts, threads):
        expert = first + thread
        if (expert < layout.experts) & ((expert < mine) | (expert >= mine + held(layout, rank))):
            total += counted[expert]
    total = cute.arch.warp_redux_sync(total, "add")
    if thread % WARP == 0:
        ptx.add_relaxed_u64(sent, Uint64(total), "gpu")


@cute.jit
def store_scale_word(target: Int64, at: Int32, word: Uint32, scale_bytes: cutlass.Constexpr) -> None:
    """Word number `at` of a row's scales, which may end within it, to `target`."""
    if const_expr(scale_bytes % 4 == 0):
        vector.scalar(target + Int64(at) * 4, Uint32)[0] = word
    else:
        for i in cutlass.range_constexpr(4):
            if at * 4 + i < scale_bytes:
                vector.scalar(target + Int64(at) * 4 + i, Uint8)[0] = Uint8(word >> Uint32(8 * i))


@cute.jit
def load_scale_word(source: Int64, at: Int32, scale_bytes: cutlass.Constexpr) -> Uint32:
    """Word number `at` of a row's scales, with zeros behind their end."""
    word = Uint32(0)
    if const_expr(scale_bytes % 4 == 0):
        word = Uint32(vector.scalar(source + Int64(at) * 4, Uint32)[0])
    else:
        for i in cutlass.range_constexpr(4):
            if at * 4 + i < scale_bytes:
                word = word | Uint32(vector.scalar(source + Int64(at) * 4 + i, Uint8)[0]) << Uint32(8 * i)
    return word


@cute.jit
def slot_of(
    layout: cutlass.Constexpr, packed: cutlass.Constexpr, word: Uint32, source: Int32, headers: cute.Tensor,
    starts: cute.Tensor,
) -> Int32:  # fmt: skip
    """The packed row for a place in `meta`: −1 if it is not this rank's, −2 if its expert has no row left for it.

    headers: Int32 [ranks, header words] in shared memory, with where each source's rows of each expert start in place
    of their counts.
    """
    slot = Int32(-1)
    if word != Uint32(NO_PLACE):
        expert, ordinal = Int32(word >> Uint32(ORDINAL_BITS)), Int32(word & Uint32(ORDINAL_MASK))
        slot = headers[source * (HEADER_WORDS + layout.width) + HEADER_WORDS + expert] + ordinal
        if const_expr(packed.rows_per_expert > 0):
            if slot >= starts[expert + 1]:
                slot = Int32(-2)
    return slot
