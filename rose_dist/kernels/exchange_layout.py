"""Where everything stands that ranks write into one another's memory to dispatch MoE rows and to bring results back.

Every rank has one region of `region_bytes` bytes, zeroed before the first exchange. Others write into it, each into its
own part, and only the owner reads it. Nothing is ever reset: whatever is waited for carries the epoch of its exchange.

A rank sends a token once to every rank that holds any of its experts, as a record: the row, its scales, and `meta`:

    meta    u32 [1 + top_k]: the token's number at its source, then for each place in its top k 0xFFFFFFFF if that
            expert is not the receiver's, else local expert << 20 | how many earlier (token, place) pairs of the same
            source and expert there are; where sums go back then the weight of each place, fp32 [top_k]

The records from one source to one destination stand in the order of tokens, without gaps (plain rows: without gaps in
each chunk, which starts at `chunk` times its number). A source also sends every destination one header:

    header  u32 [3 + most experts a rank]: records to follow (if they come as packets), the source's live tokens, in
            which form its records come and its results go back (`PACKETS`, `ROWS` or `RETURNS`); then the pairs for
            each of the receiver's experts

Headers are all that a receiver needs to place any record: expert e's rows from source s start where e starts, plus the
counts of the sources before s. So no rank waits for another before its first byte leaves, and the order of the packed
rows (source, token, place) is nobody's choice.

A source with at most `packet_tokens` tokens sends packets (`cute.packets`: 12 bytes of data and the epoch, no flag);
with more it sends plain rows, `chunk` tokens at a time, each chunk with a flag. Results come back to place (token,
place in the top k) of the source: of up to `result_packet_tokens` tokens as packets, of more as plain rows with a flag
a token (`RETURNS`), of sources that sent plain rows with a flag a chunk. Each area has several copies, used in turn by
epoch.

With `partial_sums` a rank sends no results but their weighted sum, to the first of the token's places that are its own,
so that areas and flags are the same; the source adds up what stands at those places.

With `node_ranks` a node does so instead of a rank, for sources of other nodes, as `network_layout` says; to those of
its own node each of its ranks returns all results, and they make their node's sum themselves.

With `quantized`, a source that sends packets is given bf16 rows and quantises them as it sends. Its records' packets
then carry units of 128 values: 32 words of codes and one word of scales, an fp32 or four bytes, are `UNIT_PACKETS`
packets without a gap. So whoever takes a part of a record makes and places its codes and scales without the rest.

The areas:

- `headers`: packets [copies, source, header_packets], written by every source.
- `record_packets`: packets [copies, source, packet_tokens, record_packets], written by sources with few tokens.
- `records`: bytes [copies, source, max_records, record_bytes], written by sources with many.
- `runs`: u32 [copies, source, chunks, 2]: first record << 8 | number of records, then the chunk's flag. Flag: written
  by thread `destination` of the block that wrote the chunk's records (release, system scope), with the epoch; read by
  one thread of the block that takes the chunk (acquire, system scope). It publishes the run and its records.
- `result_packets`: packets [result_copies, result_packet_tokens, top_k, result_packets], written by the experts' ranks.
- `results`: bytes [result_copies, max_tokens, top_k, result_bytes], written by the experts' ranks.
- `result_flags`: u32 [result_copies, experts' rank, max_records], by chunk, or by token for `RETURNS`: written by one
  thread of the block that wrote what it has of the chunk's or the token's results (release, system scope), with the
  epoch; read by thread `rank` of the block that sums them (acquire, system scope). It publishes those results. With
  `RETURNS` only ranks that hold an expert of the token write one, and only theirs are waited for. Where a rank sends
  and sums in one launch, it takes its own experts' results from where they are: none come through its region.

- `node_results`: [groups, return_bytes], with `node_ranks`: for each other node's rank on this one's rail what the
  three areas of results are for this rank: written by this node's ranks for that source, read by this rank, which adds
  them up and sends the sums. Packets and flags are those of results, with the same publishing.

Copies. Let F dispatches wait for their combine at most (`in_flight`). Whoever sends exchange e has received e − F from
every rank (headers always come), and that rank had received e − 2F before it sent e − F: so 2F copies suffice for what
dispatch sends. Whoever returns a result has received a header of the newest exchange e, whose source had taken e − F
combines to their end before: F copies suffice for results. Both are rounded up to powers of two, so that the epoch may
wrap around.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rose_dist.kernels.exchange_sizes import ExchangeSizes
from rose_dist.kernels.memory_areas import ALIGNMENT, MemoryAreas, round_up
from rose_dist.kernels.peer_regions import PACKET_BYTES


@dataclass(frozen=True, kw_only=True)
class ExchangeLayout(ExchangeSizes, MemoryAreas):
    """Offsets are in bytes and fit 64 bits."""

    @property
    def copies(self) -> int:
        """Of what dispatch sends."""
        return 2 * self.result_copies

    @property
    def result_copies(self) -> int:
        """Of results."""
        return 1 << (self.in_flight - 1).bit_length()

    @property
    def header_bytes(self) -> int:
        """From one source's header to the next one's."""
        return self.header_packets * PACKET_BYTES

    @property
    def source_packet_bytes(self) -> int:
        """From one source's packet records to the next one's."""
        return self.packet_tokens * self.record_packets * PACKET_BYTES

    @property
    def source_record_bytes(self) -> int:
        """From one source's plain records to the next one's."""
        return self.max_records * self.record_bytes if self.has_rows else 0

    @property
    def source_run_bytes(self) -> int:
        """From one source's runs to the next one's."""
        return 8 * self.chunks if self.has_rows else 0

    @property
    def result_packet_bytes(self) -> int:
        """From one copy of the result packets to the next."""
        return self.result_packet_tokens * self.top_k * self.result_packets * PACKET_BYTES

    @property
    def result_row_bytes(self) -> int:
        """From one copy of the plain results to the next."""
        return self.max_tokens * self.top_k * self.result_bytes if self.has_result_rows else 0

    @property
    def result_flag_bytes(self) -> int:
        """From one copy of the result flags to the next."""
        return 4 * self.ranks * self.max_records if self.has_result_rows else 0

    @property
    def _result_areas(self) -> dict[str, int]:
        copies = self.result_copies
        return {
            "result_packets": copies * self.result_packet_bytes,
            "results": copies * self.result_row_bytes,
            "result_flags": copies * self.result_flag_bytes,
        }

    @property
    def return_bytes(self) -> int:
        """Of the areas of results together."""
        return sum(round_up(size, ALIGNMENT) for size in self._result_areas.values())

    def node_region(self, group: Any) -> Any:
        """Behind the start of a region: what stands for one whose areas of results are those for a group's rank."""
        return self.start("node_results") - self.start("result_packets") + group * self.return_bytes

    @property
    def _areas(self) -> dict[str, int]:
        """Bytes of each area, in the order in which they stand in a region."""
        sent, groups = self.copies * self.ranks, self.ranks // self.node_ranks if self.node_ranks else 0
        return {
            "headers": sent * self.header_bytes,
            "record_packets": sent * self.source_packet_bytes,
            "records": sent * self.source_record_bytes,
            "runs": sent * self.source_run_bytes,
            **self._result_areas,
            "node_results": groups * self.return_bytes,
        }
