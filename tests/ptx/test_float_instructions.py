"""Float instructions against exact rational arithmetic (fractions) and torch's own number formats."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx.evaluate import evaluate

F32_EDGES = np.array([0.0, -0.0, 1.0, -1.0, 1.5, 2**-149, -(2**-149), 2**-126, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan,
                      1 + 2**-23, 1 - 2**-24, 2**-75, 1e-20, 65504, 65520, 448, 480, 1e20], np.float32)  # fmt: skip


def f32_pairs(count: int = 3) -> list[np.ndarray]:
    """Edge values against each other, random ones, and values near rounding ties."""
    rng = np.random.default_rng(0)
    grid = np.meshgrid(F32_EDGES, F32_EDGES)
    columns = []
    for i in range(count):
        edges = np.roll(grid[i % 2].ravel(), 7 * (i // 2))
        random = (rng.standard_normal(800) * 2.0 ** rng.integers(-20, 20, 800)).astype(np.float32)
        small = rng.integers(-15, 16, 796).astype(np.float32) * np.float32(2) ** rng.integers(-26, 4, 796).astype(
            np.float32
        )
        columns.append(np.concatenate([edges, random, small]))
    return [c[: len(c) // 32 * 32] for c in columns]


def nearest(exact: Fraction, like: Callable[[float], np.floating]) -> np.floating:
    """The value of a float type nearest to `exact`, ties to even: by comparing neighbours."""
    kind = like(0).dtype
    with np.errstate(over="ignore"):
        guess = like(float(exact) if abs(exact) < Fraction(10) ** 300 else math.copysign(math.inf, exact))
    top = np.finfo(kind).max
    if not np.isfinite(guess):
        limit = Fraction(float(top)) + (Fraction(float(top)) - Fraction(float(np.nextafter(top, like(0))))) / 2
        return guess if abs(exact) >= limit else np.copysign(top, guess)
    around = [guess, np.nextafter(guess, like(-np.inf)), np.nextafter(guess, like(np.inf))]
    raw = np.dtype(f"u{kind.itemsize}")
    return min(
        (g for g in around if np.isfinite(g)), key=lambda g: (abs(Fraction(float(g)) - exact), int(g.view(raw)) & 1)
    )


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Bitwise equality, all NaNs alike."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    raw = np.dtype(f"u{got.dtype.itemsize}")
    different = np.flatnonzero(~nan & (got.view(raw) != expected.view(raw)))
    assert different.size == 0, (different[:5], got[different[:5]], expected[different[:5]])


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
    _same16(got.view(np.uint16), expected)
    packed = [a.view(np.uint32) for a in arrays]
    packed = [p[: len(p) // 32 * 32] for p in packed]
    got = evaluate(f"{name}{modifier}.{kind}x2 {{d}}, {letters};", (f"{kind}x2",) * len(arrays), f"{kind}x2", *packed)
    _same16(got.view(np.uint16), expected[: 2 * len(packed[0])])


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


def _same16(got: np.ndarray, expected: torch.Tensor) -> None:
    nan = torch.isnan(expected).numpy()
    bits = expected.view(torch.int16).numpy().view(np.uint16)
    bad = np.flatnonzero(~nan & (got != bits))
    assert bad.size == 0, (bad[:5], got[bad[:5]], bits[bad[:5]])
    assert set(got[nan].tolist()) <= {0x7FFF}


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


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_conversion_between_f32_and_16_bits(kind: str, dtype: torch.dtype) -> None:
    a, b = f32_pairs(2)
    got = evaluate(f"cvt.rn.{kind}x2.f32 {{d}}, {{a}}, {{b}};", ("f32", "f32"), "b32", a, b)
    _same16((got >> 16).astype(np.uint16), torch.from_numpy(a).to(dtype))
    _same16(got.astype(np.uint16), torch.from_numpy(b).to(dtype))
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
