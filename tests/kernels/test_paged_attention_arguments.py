"""What paged attention for decode says to arguments that it can't take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.paged_attention import DecodeWorkspace, decode
from tests.kernels.paged_cache import Cache, attend


def test_no_requests() -> None:
    empty = torch.zeros(0, 8, 64).bfloat16()
    cache = torch.zeros(16, 1, 64).bfloat16()
    none = torch.zeros(0, dtype=torch.int32)
    out = decode(empty, cache, cache, none[:, None], None, none, None, window=None, block_size=16, scale=1.0)
    assert out.shape == (0, 8, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 8, 64).half()}, "q: dtype is torch.float16"),
        ({"q": torch.zeros(2, 9, 64).bfloat16()}, "q: 9 query heads for 2 key heads"),
        ({"q": torch.zeros(2, 64, 64).bfloat16()}, "q: 64 query heads for 2 key heads; needs 1 to 16"),
        ({"q": torch.zeros(2, 64, 8).bfloat16().transpose(1, 2)}, "q: rows are not contiguous"),
        ({"keys": torch.zeros(32, 2, 64)}, "keys: dtype"),
        ({"values": torch.zeros(32, 2, 64).to(torch.float8_e4m3fn)}, "values: dtype"),
        ({"values": torch.zeros(48, 2, 64).bfloat16()}, "values: must have the shape"),
        ({"tables": torch.zeros(2, 3, dtype=torch.int64)}, "tables: dtype"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths: shape"),
        ({"block_size": 24}, "block_size: is 24; must be a positive multiple of 16"),
        ({"window": 0}, "window: is 0"),
        ({"sinks": torch.zeros(8).bfloat16()}, "sinks: dtype"),
        ({"first": torch.zeros(2)}, "first: dtype"),
        ({"rows": torch.zeros(2, dtype=torch.int32)}, "rows: shape"),
        ({"out": torch.zeros(2, 8, 128).bfloat16()[..., ::2]}, "out: is not contiguous"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    cache = torch.zeros(32, 2, 64).bfloat16()
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 8, 64).bfloat16(), "keys": cache, "values": cache,
        "tables": torch.zeros(2, 3, dtype=torch.int32), "first": None, "lengths": torch.zeros(2, dtype=torch.int32),
        "sinks": None, "window": None, "block_size": 16, "scale": 1.0,
    }  # fmt: skip
    with pytest.raises(KernelArgumentError, match=message):
        decode(**arguments | change)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.zeros(2, 8, 64), "q: dtype is torch.float32; allowed: torch.bfloat16"),
        (torch.zeros(2, 8, 96).bfloat16(), r"q: head_dim is 96; allowed: \(64, 128\)"),
    ],
)
def test_bad_arguments_on_a_gpu(gpu: Any, q: torch.Tensor, message: str) -> None:
    """A CPU takes more."""
    with pytest.raises(KernelArgumentError, match=message):
        attend(gpu, q, Cache.filled([20, 20], 2, q.shape[2]))


def test_workspace_of_another_shape(gpu: Any) -> None:
    cache = Cache.filled([20, 20], 2, 64)
    q = torch.randn(2, 8, 64).bfloat16()
    device = gpu.tensor(q).device
    for other in ({"requests": 1}, {"key_heads": 1}, {"head_dim": 128}):
        sizes = {"requests": 2, "query_heads": 8, "key_heads": 2, "head_dim": 64, "context": 64} | other
        with pytest.raises(KernelArgumentError, match="workspace: was allocated for"):
            attend(gpu, q, cache, workspace=DecodeWorkspace.allocate(**sizes, device=device))
