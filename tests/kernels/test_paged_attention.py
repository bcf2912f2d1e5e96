"""Paged attention of decoding requests against float64."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from rose_dist.kernels import attention_tiling
from rose_dist.kernels.arch import DeviceInfo
from rose_dist.kernels.paged_attention import DecodeWorkspace, decode
from rose_dist.kernels.qk_norm import PagedCache, qk_norm_rope_cache
from rose_dist.kernels.variants import Ranges
from tests.kernels.conftest import emulated
from tests.kernels.paged_cache import BLOCK, NAN, Cache, assert_close, attend, check, exact


@pytest.fixture(params=[False, True], ids=["by heads", "whole tokens"])
def whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether blocks take whole tokens, as for many requests, where the number of key heads is even."""
    if request.param:
        if "gpu" in request.fixturenames:
            leave_blackwell(request.getfixturevalue("gpu"))
        take_whole_tokens(monkeypatch)
    return bool(request.param)


def leave_blackwell(gpu: Any) -> None:
    if gpu.info.arch.blackwell and not gpu.real:
        pytest.skip("takes minutes; the code is Hopper's, and test_registry compiles it")


def take_whole_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WHOLE_TOKENS", "WHOLE_TOKENS_OF_SHORT_WINDOWS"):
        monkeypatch.setattr(attention_tiling, name, 0)


@pytest.mark.parametrize("heads", [(8, 1, 64), (4, 1, 64), (2, 2, 64), (16, 1, 128)], ids=str)
def test_lengths(gpu: Any, heads: tuple[int, int, int]) -> None:
    check(gpu, [1, 16, 37, 0], heads)


@pytest.mark.parametrize("heads", [(8, 2, 64), (32, 2, 64), (4, 2, 128)], ids=str)
def test_windows(gpu: Any, heads: tuple[int, int, int]) -> None:
    """Windows that begin inside a tile, inside a block, and before the first token."""
    check(gpu, [70, 33, 9, 1], heads, window=20)


@pytest.mark.usefixtures("whole")
def test_merges_splits(gpu: Any) -> None:
    """17 and 33 tiles are 2 and 4 parts; the last of their blocks merges. The same counters serve the next call."""
    cache = Cache.filled([270, 15, 520], 2, 64)
    q = torch.randn(3, 8, 64).bfloat16()
    sinks = torch.randn(8)
    moved = gpu.tensor(q)
    workspace = DecodeWorkspace.allocate(
        requests=3, query_heads=8, key_heads=2, head_dim=64, context=4096, device=moved.device
    )
    first = attend(gpu, q, cache, sinks=sinks, workspace=workspace)
    for row in range(3):
        assert_close(first[row], exact(q, cache, row, 0.2, sinks))
    assert torch.equal(attend(gpu, q, cache, sinks=sinks, workspace=workspace), first)


@pytest.mark.usefixtures("whole")
def test_any_number_of_blocks_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block merges a request's parts as it goes if it has them all; else the last block does, from memory."""
    gpu = emulated(monkeypatch, "sm_90a")
    torch.manual_seed(0)
    cache = Cache.filled([300, 0, 520, 20, 270], 2, 64)
    q, sinks = torch.randn(5, 8, 64).bfloat16(), torch.randn(8)
    several = attend(gpu, q, cache, sinks=sinks)
    for row in range(5):
        assert_close(several[row], exact(q, cache, row, 0.2, sinks))
    for sms in (1, 2, 3):
        gpu.info = DeviceInfo(gpu.info.arch, sms)
        assert torch.equal(attend(gpu, q, cache, sinks=sinks), several)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
def test_any_bytes_of_a_token_a_block_give_the_same_bits(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    cache = Cache.filled([300, 0, 20, 270], 4, 64, dtype=dtype)
    q, sinks = torch.randn(4, 16, 64).bfloat16(), torch.randn(16)
    found = []
    for size in (64, 128, 256):
        monkeypatch.setattr(attention_tiling, "ROW_BYTES", dict.fromkeys((1, 2), Ranges((0,), (size,))))
        found.append(attend(gpu, q, cache, sinks=sinks))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads", [(4, 2, 64), (64, 8, 64), (8, 4, 128)], ids=str)
def test_whole_tokens_have_the_same_bits(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    query_heads, key_heads, head_dim = heads
    cache = Cache.filled([270, 0, 1, 33], key_heads, head_dim, window=window, dtype=dtype)
    q, sinks = torch.randn(4, query_heads, head_dim).bfloat16(), torch.randn(query_heads)
    options = {"sinks": sinks, "key_scale": 2.0, "value_scale": 0.5, "scale": 0.1}
    leave_blackwell(gpu)
    by_heads = attend(gpu, q, cache, **options)
    take_whole_tokens(monkeypatch)
    assert torch.equal(attend(gpu, q, cache, **options), by_heads)
    for row in range(4):
        wanted = exact(q, cache, row, 0.2, sinks) * 0.5
        assert (by_heads[row].double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_more_tiles_than_a_warp_looks_up_at_once(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of 130 tiles: a feeding warp looks up 128."""
    leave_blackwell(gpu)
    monkeypatch.setattr(attention_tiling, "MOST_SPLITS", 1)
    take_whole_tokens(monkeypatch)
    check(gpu, [130 * 16 - 3], (2, 2, 64), context=1 << 12)


def test_few_requests_with_a_window_have_the_same_bits(gpu: Any) -> None:
    """Two heads a block or one."""
    many = 150 if gpu.real else 9
    cache = Cache.filled([70, 33] + [17] * (many - 2), 2, 64, window=40)
    q = torch.randn(many, 8, 64).bfloat16()
    together = attend(gpu, q, cache)
    two = slice(0, 2)
    alone = Cache(cache.keys, cache.values, cache.tables[two], cache.first[two], cache.lengths[two], 40, BLOCK)
    assert torch.equal(attend(gpu, q[two], alone), together[two])


def test_heads_that_lie_apart(gpu: Any) -> None:
    """A cache whose heads have room between them."""
    cache = Cache.filled([50, 7], 2, 64)
    q = torch.randn(2, 8, 64).bfloat16()
    keys, values = (
        gpu.tensor(torch.cat([x, torch.full_like(x, NAN)], 2))[:, :, :64] for x in (cache.keys, cache.values)
    )
    out = decode(
        gpu.tensor(q), keys, values, gpu.tensor(cache.tables), None, gpu.tensor(cache.lengths), None, window=None,
        block_size=BLOCK, scale=0.2,
    )  # fmt: skip
    for row in range(2):
        assert_close(gpu.plain(out)[row], exact(q, cache, row, 0.2, None))


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("window", [None, 40])
def test_fetches_older_keys_while_the_last_ones_are_written(gpu: Any, window: int | None) -> None:
    """The launch before rotates queries in place and writes each request's last key and value, as in a decode step."""
    lengths = [300, 17, 16, 1, 0, 90]
    cache = Cache.filled(lengths, 2, 64, window=window)
    last = [
        int(cache.tables[row, (n - 1) // BLOCK - int(cache.first[row])]) * BLOCK + (n - 1) % BLOCK if n else -1
        for row, n in enumerate(lengths)
    ]
    q, new = torch.randn(6, 8, 64).bfloat16(), [cache.keys[last].clone(), cache.values[last].clone()]
    written = [slot for slot in last if slot >= 0]
    cache.keys[written] = cache.values[written] = NAN
    held = [gpu.tensor(x) for x in (q, *new, cache.keys, cache.values, cache.tables, cache.lengths, cache.first)]
    moved, new_keys, new_values, keys, values, tables, counts, first = held
    slots, turns = gpu.tensor(torch.tensor(last)), [gpu.tensor(torch.full((6, 32), x)) for x in (1.0, 0.0)]
    workspace = DecodeWorkspace.allocate(
        requests=6, query_heads=8, key_heads=2, head_dim=64, context=512, device=moved.device
    )
    for seed in range(3):
        with contextlib.nullcontext() if gpu.real else gpu.together(seed):
            qk_norm_rope_cache(moved, new_keys, new_values, PagedCache(keys, values, slots), *turns)
            out = decode(
                moved, keys, values, tables, first, counts, None, window=window, block_size=BLOCK, scale=0.2,
                workspace=workspace, early=True,
            )  # fmt: skip
        complete = replace(cache, keys=gpu.plain(keys), values=gpu.plain(values))
        for row in range(6):
            assert_close(gpu.plain(out)[row], exact(q, complete, row, 0.2, None))


def test_more_splits_than_one_batch_of_loads(gpu: Any) -> None:
    """17 parts of one key head; a thread merges 16 at a time."""
    check(gpu, [17 * 8 * 16 + 5], (1, 1, 64))


def test_alone_and_in_a_batch_the_bits_are_the_same(gpu: Any) -> None:
    lengths = [300, 77, 5, 290] + ([1000, 128] * 40 if gpu.real else [31] * 40)
    cache = Cache.filled(lengths, 1, 64)
    q = torch.randn(len(lengths), 8, 64).bfloat16()
    together = attend(gpu, q, cache)
    for row in (0, 1, 3, 43):
        one = slice(row, row + 1)
        alone = Cache(cache.keys, cache.values, cache.tables[one], cache.first[one], cache.lengths[one], None, BLOCK)
        assert torch.equal(attend(gpu, q[one], alone)[0], together[row])
        assert_close(together[row], exact(q, cache, row, 0.2, None))


@pytest.mark.usefixtures("whole")
def test_dead_rows_are_zero_and_not_looked_up(gpu: Any) -> None:
    cache = Cache.filled([40, 20, 40, 40], 2, 64)
    cache.tables[2:] = 1 << 28
    cache.lengths[2:] = 1 << 28
    q = torch.randn(4, 8, 64).bfloat16()
    out = attend(gpu, q, cache, rows=2, context=1024)
    for row in range(2):
        assert_close(out[row], exact(q, cache, row, 0.2, None))
    assert not out[2:].any()
    assert not attend(gpu, q, cache, rows=0, context=1024).any()


@pytest.mark.usefixtures("whole")
def test_queries_in_a_fused_projection_and_larger_blocks(gpu: Any) -> None:
    cache = Cache.filled([90, 64], 2, 64, window=40, block_size=48)
    fused = gpu.tensor(torch.randn(2, 8 + 4, 64).bfloat16())
    q = gpu.plain(fused)[:, :8]
    out = decode(
        fused[:, :8], gpu.tensor(cache.keys), gpu.tensor(cache.values), gpu.tensor(cache.tables),
        gpu.tensor(cache.first), gpu.tensor(cache.lengths), None, window=40, block_size=48, scale=0.2,
    )  # fmt: skip
    for row in range(2):
        assert_close(gpu.plain(out)[row], exact(q, cache, row, 0.2, None))


def test_sinks_and_scores_of_any_size(gpu: Any) -> None:
    """A sink far above all scores takes everything; one far below nothing; huge scores do not overflow."""
    cache = Cache.filled([20], 1, 64)
    q = torch.randn(1, 8, 64).bfloat16()
    sinks = torch.tensor([200.0, -200.0, 0.0, 5.0, 1e4, -1e4, 88.0, -88.0])
    assert_close(attend(gpu, q, cache, sinks=sinks)[0], exact(q, cache, 0, 0.2, sinks))
    assert_close(attend(gpu, q, cache, sinks=sinks, scale=50.0)[0], exact(q, cache, 0, 50.0, sinks))


@pytest.mark.parametrize("heads", [(8, 1, 64), (8, 4, 64), (32, 2, 64), (4, 2, 128)], ids=str)
def test_fp8_cache(gpu: Any, heads: tuple[int, int, int]) -> None:
    """Every e4m3 is an fp16, in which products are taken: the results are closer than with bf16 weights."""
    query_heads, key_heads, head_dim = heads
    for window in (None, 30):
        cache = Cache.filled([37, 270, 1], key_heads, head_dim, window=window, dtype=torch.float8_e4m3fn)
        q, sinks = torch.randn(3, query_heads, head_dim).bfloat16(), torch.randn(query_heads)
        out = attend(gpu, q, cache, sinks=sinks, scale=0.1, key_scale=2.0, value_scale=0.5)
        for row in range(3):
            wanted = exact(q, cache, row, 0.2, sinks) * 0.5
            assert (out[row].double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


def test_fp8_codes_are_exact(gpu: Any) -> None:
    """A query that sees one key gives its value back: for finite codes of all kinds, subnormals among them."""
    codes = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 127) != 127]
    stored = torch.zeros(256, 64, dtype=torch.uint8)
    stored[: len(codes)] = codes[:, None]
    values = stored.view(torch.float8_e4m3fn).view(256, 1, 64)
    keys, tables, first = torch.zeros_like(values), torch.arange(16).int()[None], torch.zeros(1).int()
    for length in range(1, 255) if gpu.real else (1, 2, 9, 100, 127, 128, 254):
        cache = Cache(keys, values, tables, first, torch.tensor([length]).int(), 1)
        out = attend(gpu, torch.zeros(1, 8, 64).bfloat16(), cache)
        assert torch.equal(out[0].double(), values[length - 1].double().expand(8, 64))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("heads", [(64, 8, 64), (64, 4, 128), (8, 8, 64), (8, 1, 64)], ids=str)
def test_true_shapes_on_a_gpu(heads: tuple[int, int, int], window: int | None) -> None:
    """Long contexts, replayed from a graph with other lengths than it was captured with."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    query_heads, key_heads, head_dim = heads
    long = [1, 127, 128, 129, 1000, 4097, 33000, 0]
    caches = [Cache.filled(lengths, key_heads, head_dim, window=window) for lengths in (long[::-1], long)]
    moved = [
        {name: getattr(cache, name).cuda() for name in ("keys", "values", "tables", "first", "lengths")}
        for cache in caches
    ]
    held = moved[0]
    q = torch.randn(len(long), query_heads, head_dim).bfloat16()
    sinks = torch.randn(query_heads)
    queries, logits = q.cuda(), sinks.cuda()
    workspace = DecodeWorkspace.allocate(
        requests=len(long), query_heads=query_heads, key_heads=key_heads, head_dim=head_dim, context=40000,
        device=queries.device,
    )  # fmt: skip

    def step() -> torch.Tensor:
        return decode(
            queries, held["keys"], held["values"], held["tables"], held["first"], held["lengths"], logits,
            window=window, block_size=BLOCK, scale=0.125, workspace=workspace,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for cache, other in zip(caches, moved, strict=True):
        for name, tensor in held.items():
            tensor.copy_(other[name])
        graph.replay()
        first = out.cpu()
        for row in range(len(long)):
            assert_close(first[row], exact(q, cache, row, 0.125, sinks))
        graph.replay()
        assert torch.equal(out.cpu(), first)


def test_reference_on_the_cpu() -> None:
    class Here:
        real = True

        @staticmethod
        def tensor(values: torch.Tensor) -> torch.Tensor:
            return values

        plain = tensor

    for window in (None, 20):
        check(Here, [1, 16, 37, 0, 70], (8, 2, 64), window)
    check(Here, [40, 30], (8, 8, 128), rows=2)
