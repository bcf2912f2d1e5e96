"""What stands where in the memory through which ranks of different nodes dispatch and combine, as plain arithmetic.

Beside its exchange region (`exchange_layout`) every rank has a network region of `region_bytes` bytes of symmetric
memory, zeroed before the first exchange. A sender lays a message out in its outbox and puts it, with one signal, into
the receiver's inbox; the receiver *lands* it: copies it, in the form that NVLink peers give it, into its own exchange
region, where the kernels that receive from NVLink peers find it. They don't care who wrote.

A message holds up to `RECORDS` records that one rank sends another, or the results for as many of its records. Its
signal, u64, is epoch << 32 | a count: of all the records that this rank sends that one in this exchange, so that the
first message (there always is one, and it carries the header too) says how many follow; or of the results in this
message. Signals are never reset, no message depends on another's arrival, and none on an order of arrival.

Plain rows, of sources with many tokens, need no landing: the records of a chunk stand side by side, so they are put to
where the receiver takes them, and the chunk's run and flag, side by side too, are the signal (run | epoch << 32). Only
the header comes as a message without records. A source's results come back in one message for each of its chunks, even
without any, and land as plain rows with the chunk's flag.

    record message   a header for each member, u32 [3 + most experts a rank], padded to 16 bytes; in the first message
                     only, its place in all; then records: meta u32 [1 + top_k + members], padded to 16 bytes, row,
                     scales padded to 16 bytes. In meta a place's expert is numbered among all (`exchange_parts.across`)
                     and behind the places stands the record's number among those of each member that it is for
    result message   results: u32 token · top_k + place, padded to 16 bytes; row

Members. Usually a rank's messages are its own: one member. With *rail forwarding* a node's ranks, `members` neighbours
in rank order, share the records of each source: what goes to several of them crosses the network once, to the member
with the sender's place in its own node (its rail peer), and that one lands it in the regions of all members that it is
for. Packets need nothing more, their words carry the epoch, whoever wrote them. Plain rows come by chunks, as one
message each, and the forwarder sets the chunk's flag of every member. So a member waits for nothing but what
`exchange_layout` says, and sees who the source is, not who brought it. Results don't take that way: they go from the
experts' ranks to the source, one message a rank; except with the exchange's `node_ranks`. Then a node's ranks return
them, as they return results inside a node, to the one that forwarded the token (`node_results`), which adds up what the
node has for a record in the order of the top k and sends the sums for a message's records as one, to the source's rail
peer of `result_inbox`: itself. It reads places and weights from the record's message, which stays until then.

Areas, where a sender or receiver is a group of `members` ranks, that is, one of them:

- `record_outbox`: [copies, receiver, record_messages, record_message_bytes], written by this rank, read by its network.
- `record_inbox`: [copies, sender, record_messages, record_message_bytes], written by the senders' network.
- `record_signals`: u64 [copies, sender, record_messages]: written by the senders' network, once the message is there;
  read by thread 0 of the blocks that land it, and by one thread for each sender of those that forward rows (acquire,
  system scope). It publishes the message.
- `result_outbox`, `result_inbox`, `result_signals`: alike, with `result_copies`, for results, and always by rank.
- `row_outbox`: bytes [copies, receiver, max_records, exchange.record_bytes], written by this rank, read by its network.
- `row_inbox`: alike by sender, and `row_signals`: u64 [copies, sender, chunks], with several members only. The signal,
  run | epoch << 32, is written by the sender's network and read by thread 0 of the block that forwards the chunk
  (acquire, system scope). It publishes the chunk's records. The flags that follow from it, in the regions of the
  members: written by thread *member* of that block (release, system scope), behind a block barrier that all its reads
  of the inbox and its stores into the members' regions precede.
- `nothing`: 16 bytes, sent with the signal of a chunk without records, and received.

Copies: as in `exchange_layout`, whose argument holds here too: whoever sends exchange e knows that its messages of e −
2F (records) or e − F (results) have been landed, so that outbox, inbox and signal may be used again. A forwarder writes
into a member's region what the source has sent, so after the source knew that the member was done with e − 2F.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import checks
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.exchange_sizes import CHUNK, HEADER_WORDS
from rose_dist.kernels.memory_areas import MemoryAreas, round_up

RECORDS = CHUNK
"""Of a message, at most."""


@dataclass(frozen=True)
class NetworkLayout(MemoryAreas):
    """Offsets and sizes are in bytes. All ranks must have equal ones."""

    exchange: ExchangeLayout
    """Chunks of `RECORDS`, no `RETURNS` and no partial sums: results that cross nodes land as their records came."""
    members: int = 1
    """Ranks that share records, one node's; 1: none do."""

    @property
    def sums(self) -> bool:
        """Whether nodes' sums go back."""
        return self.exchange.node_ranks > 0

    def __post_init__(self) -> None:
        if self.sums and self.members < 2:
            raise checks.fail("members", f"is {self.members}; sums by node need several ranks a node")
        if self.sums and self.exchange.node_ranks != self.members:
            raise checks.fail("members", f"is {self.members}, and {self.exchange.node_ranks} ranks add up results")
        if self.members < 1 or self.exchange.ranks % self.members:
            raise checks.fail("members", f"is {self.members}; must divide the {self.exchange.ranks} ranks")
        if self.exchange.chunk != RECORDS or self.exchange.has_returns or self.exchange.partial_sums:
            wanted = f"chunks of {RECORDS}, all results of packets as packets, and no partial sums"
            raise checks.fail("exchange", f"must have {wanted}: rows do not go back summed between nodes")

    @property
    def groups(self) -> int:
        """Of `members` ranks."""
        return self.exchange.ranks // self.members

    @property
    def forwards_rows(self) -> bool:
        """Whether plain rows are landed too, for several ranks."""
        return self.members > 1 and self.exchange.has_rows

    @property
    def header_bytes(self) -> int:
        """From one member's header to the next one's."""
        return round_up(4 * (HEADER_WORDS + self.exchange.width), 16)

    @property
    def headers_bytes(self) -> int:
        return self.members * self.header_bytes

    @property
    def meta_words(self) -> int:
        return self.exchange.meta_words + self.members

    @property
    def meta_bytes(self) -> int:
        return round_up(4 * self.meta_words, 16)

    @property
    def record_bytes(self) -> int:
        return self.meta_bytes + round_up(4 * self.exchange.data_words, 16)

    @property
    def record_message_bytes(self) -> int:
        """From one record message to the next."""
        return self.headers_bytes + RECORDS * self.record_bytes

    @property
    def result_bytes(self) -> int:
        return 16 + self.exchange.result_bytes

    @property
    def result_message_bytes(self) -> int:
        """From one result message to the next."""
        return RECORDS * self.exchange.top_k * self.result_bytes

    @property
    def record_messages(self) -> int:
        """Of one rank to another in one exchange, at most."""
        return -(-self.exchange.packet_tokens // RECORDS)

    @property
    def result_messages(self) -> int:
        return -(-self.exchange.max_tokens // RECORDS)

    @property
    def _areas(self) -> dict[str, int]:
        """Bytes of each area, in their order."""
        exchange = self.exchange
        sent = exchange.copies * self.groups
        records = sent * self.record_messages
        results = exchange.result_copies * exchange.ranks * self.result_messages
        return {
            "record_outbox": records * self.record_message_bytes,
            "record_inbox": records * self.record_message_bytes,
            "record_signals": records * 8,
            "result_outbox": results * self.result_message_bytes,
            "result_inbox": results * self.result_message_bytes,
            "result_signals": results * 8,
            "row_outbox": sent * exchange.source_record_bytes,
            "row_inbox": sent * exchange.source_record_bytes * (self.members > 1),
            "row_signals": sent * exchange.source_run_bytes * (self.members > 1),
            "nothing": 16,
        }
