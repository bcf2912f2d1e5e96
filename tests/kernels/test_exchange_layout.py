"""The layout of the memory through which ranks dispatch and combine: areas that don't overlap, sizes that suffice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_dist.comm.layout import even_split
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.exchange_layout import ExchangeLayout
from rose_dist.kernels.formats import FP8, NVFP4

GPT_OSS = ExchangeLayout(ranks=8, experts=128, top_k=4, max_tokens=64, row_bytes=5760, scale_bytes=0, result_bytes=5760)
DEEPSEEK = ExchangeLayout(
    ranks=2, experts=256, top_k=8, max_tokens=4096, row_bytes=7168, scale_bytes=224, result_bytes=14336
)
AREAS = ("headers", "record_packets", "records", "runs", "result_packets", "results", "result_flags")

layouts = st.builds(
    ExchangeLayout,
    ranks=st.integers(2, 32), experts=st.integers(1, 2048), top_k=st.integers(1, 32), max_tokens=st.integers(1, 20_000),
    row_bytes=st.integers(1, 2048).map(lambda n: 16 * n), scale_bytes=st.integers(0, 512),
    result_bytes=st.integers(1, 4096).map(lambda n: 16 * n), in_flight=st.integers(1, 5),
    chunk=st.integers(1, 16), most_result_packet_bytes=st.integers(0, 1 << 26),
)  # fmt: skip


@given(layouts)
def test_areas_follow_one_another_and_are_aligned(layout: ExchangeLayout) -> None:
    starts = [layout.start(area) for area in AREAS]
    assert starts[0] == 0
    assert all(start % 128 == 0 for start in starts)
    sent, results = layout.copies * layout.ranks, layout.result_copies
    sizes = (
        sent * layout.header_bytes, sent * layout.source_packet_bytes, sent * layout.source_record_bytes,
        sent * layout.source_run_bytes, results * layout.result_packet_bytes, results * layout.result_row_bytes,
        results * layout.result_flag_bytes,
    )  # fmt: skip
    for start, size, end in zip(starts, sizes, [*starts[1:], layout.region_bytes], strict=True):
        assert end - 128 < start + size <= end


@given(layouts)
def test_every_expert_has_one_owner_as_the_ranks_split_them(layout: ExchangeLayout) -> None:
    for rank in range(layout.ranks):
        assert layout.held(rank) == even_split(layout.experts, layout.ranks, rank)
        assert len(layout.held(rank)) <= layout.width
    assert layout.owner(layout.experts - 1) == max(rank for rank in range(layout.ranks) if layout.held(rank))


@given(layouts)
def test_what_travels_fits(layout: ExchangeLayout) -> None:
    assert 12 * layout.data_packets >= layout.row_bytes + layout.scale_bytes > 12 * layout.data_packets - 16
    assert layout.meta_offset % 16 == 0
    assert layout.meta_offset >= layout.row_bytes + layout.scale_bytes
    assert layout.record_bytes >= layout.meta_offset + 4 * (1 + layout.top_k)
    assert layout.packet_tokens <= layout.max_tokens
    assert layout.packet_tokens * layout.top_k <= 2048
    assert layout.has_rows == (layout.max_tokens > layout.packet_tokens)
    assert layout.max_tokens <= layout.max_records < layout.max_tokens + layout.chunk
    assert 0 <= layout.result_packet_tokens <= layout.packet_tokens
    assert layout.has_result_rows == (layout.has_rows or layout.has_returns)


@pytest.mark.parametrize(("hidden", "units"), [(7168, 56), (2880, 23), (16, 1)])
def test_quantised_rows_travel_in_units(hidden: int, units: int) -> None:
    """33 words of codes and scales in 11 packets, without a gap."""
    layout = replace(DEEPSEEK, row_bytes=hidden, scale_bytes=4 * units, quantized=FP8)
    assert (layout.units, layout.data_packets) == (units, 11 * units)


def test_copies_for_dispatches_in_flight() -> None:
    for in_flight, copies in {1: 2, 2: 4, 3: 8, 4: 8}.items():
        layout = replace(GPT_OSS, in_flight=in_flight)
        assert (layout.copies, layout.result_copies) == (copies, copies // 2)


def test_bytes_of_models() -> None:
    """By hand: GPT-OSS: 483 record packets (2 of meta, 480 of 5760 bytes … and header of 3 + 16 words in 7)."""
    assert (GPT_OSS.meta_packets, GPT_OSS.data_packets, GPT_OSS.header_packets) == (2, 480, 7)
    assert not GPT_OSS.has_rows
    assert GPT_OSS.region_bytes == 2 * 8 * 7 * 16 + 2 * 8 * 64 * 482 * 16 + 64 * 4 * 480 * 16
    assert (DEEPSEEK.meta_packets, DEEPSEEK.data_packets, DEEPSEEK.meta_offset) == (3, 616, 7392)
    assert DEEPSEEK.record_bytes == 7552
    assert (DEEPSEEK.packet_tokens, DEEPSEEK.result_packet_tokens, GPT_OSS.result_packet_tokens) == (256, 73, 64)
    assert DEEPSEEK.start("result_flags") > 1 << 28


def test_partial_sums() -> None:
    """Weights travel behind the places; a token gets no more rows back than there are ranks."""
    layout = replace(DEEPSEEK, partial_sums=True)
    assert (layout.note_words, layout.meta_words, layout.meta_packets) == (16, 17, 6)
    assert [replace(layout, ranks=ranks).result_packet_tokens for ranks in (2, 8, 16)] == [256, 73, 73]


def test_offsets_beyond_32_bits() -> None:
    layout = replace(DEEPSEEK, ranks=32, max_tokens=65536, row_bytes=32768, result_bytes=65536)
    assert layout.region_bytes > 1 << 37


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 33}, "ranks: is 33"), ({"experts": 2049}, "experts: is 2049"), ({"top_k": 33}, "top_k: is 33"),
        ({"row_bytes": 24}, "row_bytes: is 24"), ({"result_bytes": 8}, "result_bytes: is 8"),
        ({"max_tokens": 1 << 19}, "max_tokens"), ({"in_flight": 0}, "in_flight"), ({"chunk": 17}, "chunk: is 17"),
        ({"quantized": NVFP4}, "quantized: is nvfp4; allowed: fp8, mxfp8"),
        ({"quantized": FP8, "scale_bytes": 56}, "scale_bytes: is 56; fp8 rows have 224"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        replace(DEEPSEEK, **change)
