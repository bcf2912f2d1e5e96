"""Float instructions against exact rational arithmetic (fractions) and torch's own number formats."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx.evaluate import evaluate
from tests.ptx.floats import f32_pairs, nearest, same, same16


def test_fma_rounds_once() -> None:
    a, b, c = f32_pairs()
    got = evaluate("fma.rn.f32 {d}, {a}, {b}, {c};", ("f32",) * 3, "f32", a, b, c)
    with np.errstate(all="ignore"):
        special = (a.astype(np.float64) * b + c).astype(np.float32)
    expected = special.copy()
    for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if exact:
            expected[i] = nearest(exact, np.float32)
    same(got, expected)


def test_a_double_rounding_that_must_not_happen() -> None:
    """a·b + c lies just above a tie of f32, by less than f64 can see."""
    a = np.full(32, 1 + 2**-12, np.float32)
    b = np.full(32, 1 + 2**-12, np.float32)
    c = np.full(32, 2**-60, np.float32)
    got = evaluate("fma.rn.f32 {d}, {a}, {b}, {c};", ("f32",) * 3, "f32", a, b, c)
    assert got[0] == np.float32(1 + 2**-11 + 2**-23)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_f32_arithmetic(name: str) -> None:
    a, b = f32_pairs(2)
    with np.errstate(all="ignore"):
        expected = {"add": a + b, "sub": a - b, "mul": a * b, "div": a / b}[name]
    rounding = ".rn" if name == "div" else ""
    same(evaluate(f"{name}{rounding}.f32 {{d}}, {{a}}, {{b}};", ("f32", "f32"), "f32", a, b), expected)


def test_flushing_to_zero_and_saturation() -> None:
    a = np.resize(np.array([2**-149, -(2**-140), 2**-126, 1, 0.25, 2], np.float32), 32)
    one = np.ones(32, np.float32)
    got = evaluate("mul.ftz.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", a, one)
    assert got[:3].tolist() == [0.0, -0.0, 2**-126]
    assert np.signbit(got[1])
    assert evaluate("mul.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", a, one)[0] == np.float32(2**-149)
    half = np.full(32, 0.5, np.float32)
    assert evaluate("mul.ftz.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", np.full(32, 2**-126, np.float32), half)[0] == 0
    got = evaluate(
        "add.sat.f32 {d}, {a}, {b};",
        ("f32", "f32"),
        "f32",
        np.resize(np.array([-3, 0.25, 5, np.nan], np.float32), 32),
        half,
    )
    assert got[:4].tolist() == [0.0, 0.75, 1.0, 0.0]


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_rounding(mode: str) -> None:
    a, b = (x[-768:] for x in f32_pairs(2))
    got = evaluate(f"add.{mode}.f32 {{d}}, {{a}}, {{b}};", ("f32", "f32"), "f32", a, b)
    for x, y, z in zip(a, b, got, strict=True):
        exact, value = Fraction(float(x)) + Fraction(float(y)), Fraction(float(z))
        step = Fraction(float(np.spacing(np.abs(z))))
        assert abs(value - exact) < step
        down = mode == "rm" or (mode == "rz" and exact > 0)
        assert value <= exact if down else value >= exact


def test_min_and_max() -> None:
    a, b = f32_pairs(2)
    for name in ("min", "max"):
        got = evaluate(f"{name}.f32 {{d}}, {{a}}, {{b}};", ("f32", "f32"), "f32", a, b)
        expected = (np.fmin if name == "min" else np.fmax)(a, b)
        zero = (a == 0) & (b == 0)
        pick = np.signbit(a) | np.signbit(b) if name == "min" else np.signbit(a) & np.signbit(b)
        same(got, np.where(zero, np.where(pick, np.float32(-0.0), np.float32(0.0)), expected))
        got = evaluate(f"{name}.NaN.f32 {{d}}, {{a}}, {{b}};", ("f32", "f32"), "f32", a, b)
        assert np.array_equal(np.isnan(got), np.isnan(a) | np.isnan(b))
        assert set(got[np.isnan(got)].view(np.uint32).tolist()) == {0x7FFFFFFF}
    three = evaluate(
        "max.f32 {d}, {a}, {b}, {c};", ("f32",) * 3, "f32", *(np.full(32, v, np.float32) for v in (1, 7, 3))
    )
    assert three[0] == 7


@pytest.mark.parametrize(
    "name",
    ["rcp.approx", "rsqrt.approx", "sqrt.approx", "ex2.approx", "lg2.approx", "tanh.approx", "rcp.rn", "sqrt.rn"],
)
def test_approximations_are_the_exact_value_rounded(name: str) -> None:
    a = np.abs(f32_pairs(1)[0])
    exact = {
        "rcp": lambda x: 1 / x,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "sqrt": np.sqrt,
        "ex2": np.exp2,
        "lg2": np.log2,
        "tanh": np.tanh,
    }
    with np.errstate(all="ignore"):
        expected = exact[name.partition(".")[0]](a.astype(np.float64)).astype(np.float32)
    same(evaluate(f"{name}.f32 {{d}}, {{a}};", ("f32",), "f32", a), expected)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("name", ["add", "mul", "sub", "fma"])
def test_16_bit_arithmetic(kind: str, name: str) -> None:
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    columns = [torch.from_numpy(x).to(dtype) for x in f32_pairs(3)][: 3 if name == "fma" else 2]
    wide = [c.double() for c in columns]
    exact = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "fma": lambda a, b, c: a * b + c,
    }[name](*wide)
    expected = _round16(wide, exact, name, dtype)
    letters = "{a}, {b}, {c}" if name == "fma" else "{a}, {b}"
    arrays = [c.view(torch.int16).numpy() for c in columns]
    modifier = ".rn" if name == "fma" else ""
    got = evaluate(f"{name}{modifier}.{kind} {{d}}, {letters};", (kind,) * len(arrays), kind, *arrays)
    same16(got.view(np.uint16), expected)
    packed = [a.view(np.uint32) for a in arrays]
    packed = [p[: len(p) // 32 * 32] for p in packed]
    got = evaluate(f"{name}{modifier}.{kind}x2 {{d}}, {letters};", (f"{kind}x2",) * len(arrays), f"{kind}x2", *packed)
    same16(got.view(np.uint16), expected[: 2 * len(packed[0])])


def _round16(wide: list[torch.Tensor], exact: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Rounds the rational result once: to the nearest of the neighbours of torch's (twice rounded) value."""
    guess = exact.to(dtype)
    result = guess.clone()
    for i in range(len(exact)):
        values = [float(w[i]) for w in wide]
        if not all(map(math.isfinite, values)) or not torch.isfinite(guess[i]):
            continue
        a, b = Fraction(values[0]), Fraction(values[1])
        true = {"add": a + b, "sub": a - b, "mul": a * b}[name] if name != "fma" else a * b + Fraction(values[2])
        if true == 0:
            continue
        bits = int(guess[i].view(torch.int16)) & 0x7FFF
        sign = 0x8000 if true < 0 else 0
        near = torch.tensor([max(bits - 1, 0) | sign, bits | sign, bits + 1 | sign]).to(torch.int16).view(dtype)
        finite = [n for n in near if torch.isfinite(n)]
        result[i] = min(finite, key=lambda n: (abs(Fraction(float(n)) - true), int(n.view(torch.int16)) & 1))
    return result


def test_mixed_precision_arithmetic() -> None:
    a, b, c = f32_pairs(3)
    narrow = [torch.from_numpy(x).bfloat16() for x in (a, b)]
    bits = [n.view(torch.int16).numpy() for n in narrow]
    wide = [n.float().numpy() for n in narrow]
    got = evaluate("fma.rn.f32.bf16 {d}, {a}, {b}, {c};", ("bf16", "bf16", "f32"), "f32", *bits, c)
    same(got, evaluate("fma.rn.f32 {d}, {a}, {b}, {c};", ("f32",) * 3, "f32", *wide, c))
    with np.errstate(all="ignore"):
        same(evaluate("sub.rn.f32.bf16 {d}, {a}, {b};", ("bf16", "f32"), "f32", bits[0], c), wide[0] - c)


def test_packed_f32_arithmetic() -> None:
    a, b, c = f32_pairs(3)
    packed = [x.view(np.uint64) for x in (a, b, c)]
    packed = [p[: len(p) // 32 * 32] for p in packed]
    got = evaluate("fma.rn.f32x2 {d}, {a}, {b}, {c};", ("f32x2",) * 3, "f32x2", *packed)
    same(
        got.view(np.float32),
        evaluate("fma.rn.f32 {d}, {a}, {b}, {c};", ("f32",) * 3, "f32", *(p.view(np.float32) for p in packed)),
    )


def test_comparisons_with_nan() -> None:
    a, b = f32_pairs(2)
    with np.errstate(all="ignore"):
        expected = {
            "eq": a == b, "ne": (a != b) & ~np.isnan(a) & ~np.isnan(b), "lt": a < b, "geu": ~(a < b), "neu": a != b,
            "equ": (a == b) | np.isnan(a) | np.isnan(b), "num": ~np.isnan(a) & ~np.isnan(b), "nan": np.isnan(a) | np.isnan(b),
        }  # fmt: skip
    for name, flags in expected.items():
        assert np.array_equal(evaluate(f"setp.{name}.f32 {{d}}, {{a}}, {{b}};", ("f32", "f32"), "pred", a, b), flags)


def test_signs() -> None:
    (a,) = f32_pairs(1)
    same(evaluate("neg.f32 {d}, {a};", ("f32",), "f32", a), -a)
    same(evaluate("abs.f32 {d}, {a};", ("f32",), "f32", a), np.abs(a))
    same(evaluate("copysign.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", np.full_like(a, -1), a), -np.abs(a))
