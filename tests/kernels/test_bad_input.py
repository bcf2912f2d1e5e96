"""Every public function refuses, by the argument's name and before any launch, what its kernel can't take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rose_dist.kernels import launch
from rose_dist.kernels.embedding import embed_with_angles
from rose_dist.kernels.errors import KernelArgumentError
from rose_dist.kernels.expert_map import map_experts
from rose_dist.kernels.formats import FP8, NVFP4
from rose_dist.kernels.moe_combine import combine
from rose_dist.kernels.qk_norm import PagedCache, Rotary, qk_norm, qk_norm_rope_cache, rotate
from rose_dist.kernels.quantize import dequantize, quantize
from rose_dist.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantized
from rose_dist.kernels.routing import Router, Score, route
from rose_dist.kernels.small_linear import small_linear
from rose_dist.kernels.swiglu import Gate, Rows, activate_quantized, clamped_swiglu, silu_mul

Tensors = dict[str, torch.Tensor]
EPS = 1e-5


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


def fp32(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


def norm_rope_cache(t: Tensors) -> None:
    qk_norm_rope_cache(
        t["q"], t["k"], t["v"], PagedCache(t["cache.keys"], t["cache.values"], t["slots"]), t["cos"], t["sin"],
        positions=t["positions"], norm=(t["q_weight"], t["k_weight"], EPS),
    )  # fmt: skip


def combine_rows(t: Tensors) -> None:
    combine(
        t["rows"], t["slots"], t["weights"], t["out"], tokens=t["slots"].shape[0], ids=t["ids"], bias=t["bias"],
        live_rows=t["live_rows"],
    )  # fmt: skip


@dataclass(frozen=True)
class Function:
    """
    call: with tensors by the names that errors have for them.
    good: tensors that it takes, for a number of rows.
    rows: those that are read or written row by row, in vectors.
    """

    call: Callable[[Tensors], Any]
    good: Callable[[int], Tensors]
    rows: tuple[str, ...]


FUNCTIONS = {
    "rms_norm": Function(
        lambda t: rms_norm(t["x"], t["weight"], EPS, out=t["out"]),
        lambda n: {"x": bf16(n, 256), "weight": bf16(256), "out": bf16(n, 256)},
        ("x", "weight", "out"),
    ),
    "add_rms_norm": Function(
        lambda t: add_rms_norm(t["x"], t["residual"], t["weight"], EPS),
        lambda n: {"x": bf16(n, 256), "residual": bf16(n, 256), "weight": bf16(256)},
        ("x", "residual", "weight"),
    ),
    "rms_norm_quantized": Function(
        lambda t: rms_norm_quantized(t["x"], t["weight"], EPS, NVFP4, global_scale=t["global_scale"]),
        lambda n: {"x": bf16(n, 256), "weight": bf16(256), "global_scale": fp32(1)},
        ("x", "weight"),
    ),
    "clamped_swiglu": Function(
        lambda t: clamped_swiglu(
            t["gate_up"], limit=7.0, bias=t["bias"], rows=Rows(live=t["live_rows"], experts=t["rows.experts"])
        ),
        lambda n: {
            "gate_up": bf16(n, 256), "bias": bf16(3, 256), "rows.experts": ints(n), "live_rows": ints(1)
        },
        ("gate_up", "bias"),
    ),
    "silu_mul": Function(lambda t: silu_mul(t["gate_up"]), lambda n: {"gate_up": bf16(n, 256)}, ("gate_up",)),
    "activate_quantized": Function(
        lambda t: activate_quantized(Gate.SILU, t["gate_up"], NVFP4, global_scale=t["global_scale"]),
        lambda n: {"gate_up": bf16(n, 256), "global_scale": fp32(1)},
        ("gate_up",),
    ),
    "quantize": Function(
        lambda t: quantize(t["x"], FP8, live_rows=t["live_rows"]),
        lambda n: {"x": bf16(n, 256), "live_rows": ints(1)},
        ("x",),
    ),
    "dequantize": Function(
        lambda t: dequantize(t["codes"], t["scales"], FP8),
        lambda n: {"codes": torch.zeros(n, 256).to(torch.float8_e4m3fn), "scales": fp32(n, 2)},
        ("codes",),
    ),
    "route": Function(
        lambda t: route(t["logits"], Router(4, Score.SIGMOID), bias=t["bias"], live_rows=t["live_rows"]),
        lambda n: {"logits": fp32(n, 32), "bias": fp32(32), "live_rows": ints(1)},
        (),
    ),
    "embed": Function(
        lambda t: embed_with_angles(t["ids"], t["positions"], t["table"], t["cos"], t["sin"]),
        lambda n: {
            "table": bf16(4, 64), "ids": ints(n, dtype=torch.int64), "positions": ints(n, dtype=torch.int64),
            "cos": fp32(9, 32), "sin": fp32(9, 32),
        },
        ("table",),
    ),
    "qk_norm": Function(
        lambda t: qk_norm(t["q"], t["k"], t["q_weight"], t["k_weight"], EPS),
        lambda n: {"q": bf16(n, 4, 64), "k": bf16(n, 2, 64), "q_weight": bf16(64), "k_weight": bf16(64)},
        ("q", "k", "q_weight", "k_weight"),
    ),
    "rotate": Function(
        lambda t: rotate(t["q"], t["cos"], t["sin"], Rotary.NEOX),
        lambda n: {"q": bf16(n, 4, 64), "cos": fp32(n, 32), "sin": fp32(n, 32)},
        ("q", "cos", "sin"),
    ),
    "map_experts": Function(
        lambda t: map_experts(t["ids"], t["load"], t["table"], live_rows=t["live_rows"]),
        lambda n: {
            "ids": ints(n, 4), "load": ints(8, dtype=torch.int64), "table": ints(8, 3), "live_rows": ints(1)
        },
        (),
    ),
    "small_linear": Function(
        lambda t: small_linear(t["x"], t["weight"], t["bias"]),
        lambda n: {"x": bf16(n, 288), "weight": bf16(32, 288), "bias": bf16(32)},
        ("x", "weight", "bias"),
    ),
    "qk_norm_rope_cache": Function(
        norm_rope_cache,
        lambda n: {
            "q": bf16(n, 4, 64), "k": bf16(n, 2, 64), "v": bf16(n, 2, 64), "q_weight": bf16(64), "k_weight": bf16(64),
            "cos": fp32(9, 32), "sin": fp32(9, 32), "positions": ints(n, dtype=torch.int64),
            "slots": ints(n, dtype=torch.int64), "cache.keys": bf16(2, 4, 2, 64), "cache.values": bf16(2, 4, 2, 64),
        },
        ("q", "k", "v", "q_weight", "k_weight", "cos", "sin", "cache.keys", "cache.values"),
    ),
    "combine": Function(
        combine_rows,
        lambda n: {
            "rows": bf16(4 * n + 1, 64), "slots": ints(n, 4), "weights": fp32(n, 4), "out": bf16(n, 64),
            "ids": ints(n, 4), "bias": bf16(3, 64), "live_rows": ints(1),
        },
        ("rows", "out", "bias"),
    ),
}  # fmt: skip
FIRST = {name: next(iter(function.good(1))) for name, function in FUNCTIONS.items()}


def other_dtype(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.float64) if t.is_floating_point() else t.to(torch.int16)


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each."""
    return torch.stack([t, t], -1).flatten(-2)


def cases() -> Iterator[tuple[str, str, str]]:
    """(function, argument, fault)"""
    for name, function in FUNCTIONS.items():
        for argument in function.good(1):
            yield name, argument, "dtype"
            yield name, argument, "shape"
            if argument != FIRST[name]:  # the first one says where the others must be
                yield name, argument, "device"
        for argument in function.rows:
            yield name, argument, "stride"
            yield name, argument, "address"


def spoil(gpu: Any, tensor: torch.Tensor, fault: str) -> torch.Tensor:
    match fault:
        case "dtype":
            return gpu.tensor(other_dtype(tensor))
        case "shape":
            return gpu.tensor(tensor[None])
        case "device":
            return tensor.to("meta")
        case "stride":
            return gpu.tensor(strided(tensor))[..., ::2]
        case "address":
            longer = gpu.tensor(torch.zeros(tensor.numel() + 1, dtype=tensor.dtype))
            return longer[1:].view(tensor.shape)
    raise AssertionError(fault)


@pytest.mark.parametrize(("name", "argument", "fault"), [pytest.param(*case, id="-".join(case)) for case in cases()])
def test_faults_are_named(gpu: Any, monkeypatch: pytest.MonkeyPatch, name: str, argument: str, fault: str) -> None:
    monkeypatch.setattr(launch, "run", no_launch)
    function = FUNCTIONS[name]
    given = {key: gpu.tensor(tensor) for key, tensor in function.good(3).items()}
    given[argument] = spoil(gpu, function.good(3)[argument], fault)
    with pytest.raises(KernelArgumentError, match=rf"^{argument}\b"):
        function.call(given)


def no_launch(*arguments: Any) -> None:
    raise AssertionError("a kernel was launched")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_good_tensors_are_taken(gpu: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    launched = []
    monkeypatch.setattr(launch, "run", lambda *arguments: launched.append(arguments))
    function = FUNCTIONS[name]
    function.call({key: gpu.tensor(tensor) for key, tensor in function.good(3).items()})
    assert launched


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"small_linear"}))
def test_no_rows_need_no_launch(gpu: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(launch, "run", no_launch)
    function = FUNCTIONS[name]
    function.call({key: gpu.tensor(tensor) for key, tensor in function.good(0).items()})


@pytest.mark.parametrize("argument", ["out", "slots", "weights", "ids"])
def test_combine_has_as_many_rows_as_tokens(gpu: Any, argument: str) -> None:
    t = {key: gpu.tensor(tensor) for key, tensor in FUNCTIONS["combine"].good(3).items()}
    t[argument] = t[argument][:2]
    with pytest.raises(KernelArgumentError, match=f"{argument}: has 2 rows, fewer than the 3 tokens"):
        combine(t["rows"], t["slots"], t["weights"], t["out"], tokens=3, ids=t["ids"], bias=t["bias"])


ROW_SIZES = {
    "rms_norm": {"x": bf16(3, 252), "weight": bf16(252), "out": bf16(3, 252)},
    "clamped_swiglu": {"gate_up": bf16(3, 264), "bias": bf16(3, 264)},
    "silu_mul": {"gate_up": bf16(3, 264)},
    "quantize": {"x": bf16(3, 248)},
    "embed": {"table": bf16(4, 68)},
    "qk_norm": {"q": bf16(3, 4, 72), "k": bf16(3, 2, 72)},
    "small_linear": {"x": bf16(3, 280), "weight": bf16(32, 280)},
    "combine": {"rows": bf16(13, 68), "out": bf16(3, 68), "bias": bf16(3, 68)},
}


@pytest.mark.parametrize("name", ROW_SIZES)
def test_rows_that_are_no_whole_vectors(gpu: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(launch, "run", no_launch)
    function = FUNCTIONS[name]
    given = {key: gpu.tensor(tensor) for key, tensor in {**function.good(3), **ROW_SIZES[name]}.items()}
    with pytest.raises(KernelArgumentError, match=r"multiple of|head_dim is 72"):
        function.call(given)
