"""Conversions between number formats against torch's own, tables and exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx.evaluate import evaluate
from tests.ptx.floats import f32_pairs, nearest, same, same16


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_conversion_between_f32_and_16_bits(kind: str, dtype: torch.dtype) -> None:
    a, b = f32_pairs(2)
    got = evaluate(f"cvt.rn.{kind}x2.f32 {{d}}, {{a}}, {{b}};", ("f32", "f32"), "b32", a, b)
    same16((got >> 16).astype(np.uint16), torch.from_numpy(a).to(dtype))
    same16(got.astype(np.uint16), torch.from_numpy(b).to(dtype))
    codes = np.arange(65536, dtype=np.uint16)
    same(
        evaluate(f"cvt.f32.{kind} {{d}}, {{a}};", (kind,), "f32", codes, block=1024),
        torch.from_numpy(codes.view(np.int16)).view(dtype).float().numpy(),
    )


FP8 = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}


@pytest.mark.parametrize("kind", FP8)
def test_fp8_saturates_and_rounds_to_even(kind: str) -> None:
    dtype, largest = FP8[kind]
    a, b = f32_pairs(2)
    got = evaluate(f"cvt.rn.satfinite.{kind}x2.f32 {{d}}, {{a}}, {{b}};", ("f32", "f32"), "b16", a, b)
    for codes, values in ((got >> 8, a), (got & 0xFF, b)):
        expected = torch.from_numpy(values).clamp(-largest, largest).to(dtype).view(torch.uint8).numpy()
        assert np.array_equal(np.where(np.isnan(values), 0x7F, expected), codes)


@pytest.mark.parametrize("kind", FP8)
def test_fp8_decodes_every_code(kind: str) -> None:
    codes = np.arange(65536, dtype=np.uint16)
    got = evaluate(f"cvt.rn.f16x2.{kind}x2 {{d}}, {{a}};", ("b16",), "b32", codes, block=1024).view(np.float16)
    same(got, torch.from_numpy(codes.view(np.uint8)).view(FP8[kind][0]).to(torch.float16).numpy())


E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP MX 1.0, table for FP4


def test_fp4_against_its_table() -> None:
    a, b = f32_pairs(2)

    def code(value: float) -> int:
        if math.isnan(value):
            return 7
        size = min(abs(value), 6.0)
        best = min(range(8), key=lambda i: (abs(Fraction(E2M1_VALUES[i]) - Fraction(size)), i & 1))
        return best | (8 if math.copysign(1, value) < 0 else 0)

    got = evaluate(
        "{{ .reg .b8 byte; cvt.rn.satfinite.e2m1x2.f32 byte, {a}, {b}; cvt.u32.u8 {d}, byte; }}",
        ("f32", "f32"),
        "b32",
        a,
        b,
    )
    assert got.tolist() == [code(float(x)) << 4 | code(float(y)) for x, y in zip(a, b, strict=True)]
    codes = np.arange(256, dtype=np.uint32)
    decoded = evaluate(
        "{{ .reg .b8 byte; cvt.u8.u32 byte, {a}; cvt.rn.f16x2.e2m1x2 {d}, byte; }}", ("b32",), "b32", codes
    ).view(np.float16)
    table = np.array(E2M1_VALUES + [-v for v in E2M1_VALUES], np.float16)
    assert np.array_equal(decoded.reshape(-1, 2), np.stack([table[codes & 15], table[codes >> 4]], axis=1))


def test_ue8m0_scales() -> None:
    """Powers of two, towards zero or up; decoded through bf16."""
    a = np.concatenate(
        [np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32), np.array([np.inf, np.nan, 0], np.float32)]
    )
    a = np.concatenate([a, a * np.float32(1.5), np.nextafter(a, np.float32(np.inf))])
    a = a[: len(a) // 32 * 32]
    for mode in ("rz", "rp"):
        got = evaluate(f"cvt.{mode}.satfinite.ue8m0x2.f32 {{d}}, {{a}}, {{b}};", ("f32", "f32"), "b16", a, a)
        for value, code in zip(a, got & 0xFF, strict=True):
            if math.isnan(value):
                assert code == 0xFF
                continue
            power = Fraction(2) ** (int(code) - 127)
            exact = Fraction(float(value)) if math.isfinite(value) else Fraction(2) ** 200
            if mode == "rz":
                assert power <= exact or code == 0
                assert 2 * power > exact or code == 0xFE
            else:
                assert power >= exact or code == 0xFE
                assert power / 2 < exact or code == 0
    codes = np.arange(32 * 8, dtype=np.uint16)
    decoded = evaluate("cvt.rn.bf16x2.ue8m0x2 {d}, {a};", ("b16",), "b32", codes)
    values = torch.from_numpy((decoded & 0xFFFF).astype(np.uint16).view(np.int16)).view(torch.bfloat16)
    assert values[:255].tolist() == [2.0 ** (c - 127) for c in range(255)]
    assert torch.isnan(values[255])


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("target", ["s32", "u32", "s64", "u64", "s16", "u16"])
def test_float_to_integer(mode: str, target: str) -> None:
    (a,) = f32_pairs(1)
    got = evaluate(f"cvt.{mode}.{target}.f32 {{d}}, {{a}};", ("f32",), target, a)
    limits = np.iinfo(got.dtype)
    rounding = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]

    def expected(x: float) -> int:
        if math.isnan(x):
            return 0
        return int(max(limits.min, min(limits.max, x if math.isinf(x) else rounding(x))))

    assert got.tolist() == [expected(float(x)) for x in a]


@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
def test_integer_to_float(source: str) -> None:
    rng = np.random.default_rng(3)
    bits = int(source[1:])
    raw = rng.integers(0, 2**bits, 128, dtype=np.uint64) >> rng.integers(0, bits - 1, 128).astype(np.uint64)
    values = raw.astype(np.dtype(f"u{bits // 8}")).view(np.dtype(f"{'i' if source[0] == 's' else 'u'}{bits // 8}"))
    got = evaluate(f"cvt.rn.f32.{source} {{d}}, {{a}};", (source,), "f32", values)
    assert got.tolist() == [float(nearest(Fraction(int(v)), np.float32)) for v in values]
