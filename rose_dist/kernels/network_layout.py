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

    record message   header u32 [3 + most experts a rank], padded to 16 bytes; in the first message only, its place in
                     all; then records: meta u32 [1 + top_k], padded to 16 bytes, row, scales padded to 16 bytes
    result message   results: u32 token · top_k + place, padded to 16 bytes; row

Areas:

- `record_outbox`: [copies, receiver, record_messages, record_message_bytes], written by this rank, read by its network.
- `record_inbox`: [copies, sender, record_messages, record_message_bytes], written by the senders' network.
- `record_signals`: u64 [copies, sender, record_messages]: written by the senders' network, once the message is there;
  read by thread 0 of the blocks that land it (acquire, system scope). It publishes the message.
- `result_outbox`, `result_inbox`, `result_signals`: alike, with `result_copies`, for results.
- `row_outbox`: bytes [copies, receiver, max_records, exchange.record_bytes], written by this rank, read by its network.
- `nothing`: 16 bytes, sent with the signal of a chunk without records, and received.

Copies: as in `exchange_layout`, whose argument holds here too: whoever sends exchange e knows that its messages of e −
2F (records) or e − F (results) have been landed, so that outbox, inbox and signal may be used again.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import checks
from rose_dist.kernels.exchange_layout import CHUNK, HEADER_WORDS, ExchangeLayout
from rose_dist.kernels.memory_areas import MemoryAreas, round_up

RECORDS = CHUNK
"""Of a message, at most."""


@dataclass(frozen=True)
class NetworkLayout(MemoryAreas):
    """Offsets and sizes are in bytes. All ranks must have equal ones."""

    exchange: ExchangeLayout
    """Chunks of `RECORDS`, no `RETURNS` and no partial sums: results that cross nodes land as their records came."""

    def __post_init__(self) -> None:
        if self.exchange.chunk != RECORDS or self.exchange.has_returns or self.exchange.partial_sums:
            wanted = f"chunks of {RECORDS}, all results of packets as packets, and no partial sums"
            raise checks.fail("exchange", f"must have {wanted}: rows do not go back summed between nodes")

    @property
    def header_bytes(self) -> int:
        return round_up(4 * (HEADER_WORDS + self.exchange.width), 16)

    @property
    def meta_bytes(self) -> int:
        return round_up(4 * self.exchange.meta_words, 16)

    @property
    def record_bytes(self) -> int:
        return self.meta_bytes + round_up(4 * self.exchange.data_words, 16)

    @property
    def record_message_bytes(self) -> int:
        """From one record message to the next."""
        return self.header_bytes + RECORDS * self.record_bytes

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
        records = exchange.copies * exchange.ranks * self.record_messages
        results = exchange.result_copies * exchange.ranks * self.result_messages
        return {
            "record_outbox": records * self.record_message_bytes,
            "record_inbox": records * self.record_message_bytes,
            "record_signals": records * 8,
            "result_outbox": results * self.result_message_bytes,
            "result_inbox": results * self.result_message_bytes,
            "result_signals": results * 8,
            "row_outbox": exchange.copies * exchange.ranks * exchange.source_record_bytes,
            "nothing": 16,
        }
