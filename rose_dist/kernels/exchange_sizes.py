"""What ranks exchange to dispatch MoE rows and to bring results back, and in which sizes: plain arithmetic.

Where it stands in memory, and what it means: `exchange_layout`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_dist.kernels import checks
from rose_dist.kernels.expert_slots import MAX_EXPERTS, MAX_K, MAX_PAIRS
from rose_dist.kernels.formats import FP8, MXFP8, BlockFormat
from rose_dist.kernels.memory_areas import ALIGNMENT, round_up
from rose_dist.kernels.peer_regions import PACKET_WORDS, packets
from rose_dist.kernels.variants import Ranges

MAX_PEERS = 32
"""Ranks that may exchange; a token's destinations are the bits of one word."""
PACKET_TOKENS = 256
"""Most tokens that travel as packets, which cost a third more bytes and save a flag's way."""
CHUNK = 16
"""Tokens of plain rows that share a flag, at most; so many across nodes, where it is a message."""
NVLINK_CHUNKS = Ranges((0, 8193), (16, 8))
"""The same within a node, by the bytes of a result (two H200, 4,096 tokens: 16 is 5 % faster at 5,760 bytes, 8 is 2 %
faster at 14,336)."""
PACKETS, ROWS, RETURNS = range(3)
"""In a header: records and results as packets; both as plain rows; records as packets and results as plain rows."""
RESULT_PACKET_BYTES = 8 << 20
"""Of a rank's results in packets, at most: packets send a third more, which from here on takes longer than a flag (two
H200: packets are faster at 5.9 and 7.3 MB, plain rows at 14.7)."""
HEADER_WORDS = 3
UNIT_VALUES, UNIT_WORDS = 128, 33
"""Of a quantised record's row: values, and the words that carry their codes and scales."""
UNIT_PACKETS = UNIT_WORDS // PACKET_WORDS
FUSED_FORMATS = (FP8, MXFP8)
"""Formats with one word of scales for the codes of `UNIT_VALUES` values."""
ORDINAL_BITS = 20
"""Of a place in `meta`: how many pairs of one source and expert may be told apart."""
NO_PLACE = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class ExchangeSizes:
    """In bytes. All ranks must have equal ones."""

    ranks: int
    experts: int
    """Of all ranks together; the first `experts % ranks` hold one more than the others."""
    top_k: int
    max_tokens: int
    """On one rank in one exchange."""
    row_bytes: int
    scale_bytes: int
    result_bytes: int
    """Of an expert's output row."""
    in_flight: int = 1
    """Dispatches that may wait for their combine at once."""
    most_packet_tokens: int = PACKET_TOKENS
    most_result_packet_bytes: int = RESULT_PACKET_BYTES
    """Of results, packets' own words not counted."""
    chunk: int = CHUNK
    """Tokens of plain rows that share a flag."""
    quantized: BlockFormat | None = None
    """What a source of few tokens makes of bf16 rows as it sends them; None: rows travel as they are given."""
    partial_sums: bool = False
    """A rank's results for a token go back as one row, their sum."""
    node_ranks: int = 0
    """Neighbours in rank order, a node, whose results for a token of another node go back as one row; 0: none do."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("ranks", 2, MAX_PEERS), ("experts", 1, MAX_EXPERTS), ("top_k", 1, MAX_K), ("in_flight", 1, 16),
            ("max_tokens", 1, (1 << ORDINAL_BITS) // self.top_k if self.top_k > 0 else 0), ("scale_bytes", 0, 1 << 16),
            ("most_packet_tokens", 1, PACKET_TOKENS), ("chunk", 1, CHUNK),
        ):  # fmt: skip
            value = getattr(self, name)
            if not least <= value <= most:
                raise checks.fail(name, f"is {value}; must be {least} … {most}")
        if self.node_ranks and (self.partial_sums or self.ranks % self.node_ranks):
            raise checks.fail(
                "node_ranks", f"is {self.node_ranks}; must divide the ranks, and not go with partial_sums"
            )
        for name in ("row_bytes", "result_bytes"):
            value = getattr(self, name)
            if value <= 0 or value % 16:
                raise checks.fail(name, f"is {value}; must be a multiple of 16: rows travel 16 bytes at a time")
        if self.quantized is not None:
            allowed = ", ".join(map(str, FUSED_FORMATS))
            if self.quantized not in FUSED_FORMATS:
                raise checks.fail("quantized", f"is {self.quantized}; allowed: {allowed}")
            wanted = self.quantized.blocks(self.row_bytes) * self.quantized.scale.bytes
            if self.scale_bytes != wanted:
                raise checks.fail("scale_bytes", f"is {self.scale_bytes}; {self.quantized} rows have {wanted}")

    # --- Which rank holds an expert ------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Most experts of a rank."""
        return -(-self.experts // self.ranks)

    def first_expert(self, rank: int) -> int:
        size, longer = divmod(self.experts, self.ranks)
        return rank * size + min(rank, longer)

    def held(self, rank: int) -> range:
        """The experts of a rank."""
        return range(self.first_expert(rank), self.first_expert(rank + 1))

    def owner(self, expert: int) -> int:
        """The rank that holds an expert."""
        return next(rank for rank in range(self.ranks) if expert in self.held(rank))

    # --- What travels ------------------------------------------------------------------------------------------------

    @property
    def header_packets(self) -> int:
        return packets(HEADER_WORDS + self.width)

    @property
    def note_words(self) -> int:
        """Of what a record's receiver keeps for combine: the places' rows, with `partial_sums` their weights too."""
        return self.top_k * (2 if self.partial_sums else 1)

    @property
    def weighted(self) -> bool:
        """Whether weights travel, since others than the source add up results."""
        return self.partial_sums or self.node_ranks > 0

    @property
    def meta_words(self) -> int:
        return 1 + self.top_k * (2 if self.weighted else 1)

    @property
    def meta_packets(self) -> int:
        return packets(self.meta_words)

    @property
    def data_words(self) -> int:
        """Of a record's row and scales, the latter padded to words."""
        return self.row_bytes // 4 + -(-self.scale_bytes // 4)

    @property
    def units(self) -> int:
        """Of a quantised record's row; the last may be partly beyond it."""
        return -(-self.row_bytes // UNIT_VALUES)

    @property
    def data_packets(self) -> int:
        return packets(self.data_words) if self.quantized is None else self.units * UNIT_PACKETS

    @property
    def record_packets(self) -> int:
        """Of a record: first those of its meta, then those of its row and scales."""
        return self.meta_packets + self.data_packets

    @property
    def meta_offset(self) -> int:
        """In a plain record, where its meta starts: behind the row and the scales."""
        return self.row_bytes + round_up(self.scale_bytes, 16)

    @property
    def record_bytes(self) -> int:
        """From one plain record to the next."""
        return round_up(self.meta_offset + 4 * self.meta_words, ALIGNMENT)

    @property
    def result_packets(self) -> int:
        """Of one expert's output row."""
        return packets(self.result_bytes // 4)

    @property
    def packet_tokens(self) -> int:
        """Most tokens of a rank that sends packets."""
        return min(self.max_tokens, self.most_packet_tokens, MAX_PAIRS // self.top_k)

    @property
    def has_rows(self) -> bool:
        """Whether any rank may send plain rows."""
        return self.max_tokens > self.packet_tokens

    @property
    def result_packet_tokens(self) -> int:
        """Most tokens of a rank whose results come back as packets."""
        rows = min(self.top_k, self.ranks) if self.partial_sums else self.top_k
        return min(self.packet_tokens, self.most_result_packet_bytes // (rows * self.result_bytes))

    @property
    def has_result_rows(self) -> bool:
        """Whether any rank's results may come back as plain rows."""
        return self.max_tokens > self.result_packet_tokens

    @property
    def has_returns(self) -> bool:
        """Whether any rank may send packets and get plain rows back."""
        return self.packet_tokens > self.result_packet_tokens

    @property
    def chunks(self) -> int:
        """Of one source in one exchange, at most."""
        return -(-self.max_tokens // self.chunk)

    @property
    def max_records(self) -> int:
        """Places for records from one source to one destination."""
        return self.chunks * self.chunk
