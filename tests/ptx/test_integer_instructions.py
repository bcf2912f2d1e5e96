"""Integer, logic, bit-field and predicate instructions against Python integers."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.ptx.evaluate import evaluate
from tests.ptx.ptx_types import ptx_type

EDGES = {
    16: [0, 1, 2, 0x7FFF, 0x8000, 0xFFFF, 0xFFFE, 1234],
    32: [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 123456789],
    64: [0, 1, 2, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 2, 12345678912345],
}


def operands(bits: int, count: int) -> list[np.ndarray]:
    """All pairs of edge values, and as many random ones."""
    rng = np.random.default_rng(bits)
    first, second = (x.ravel() for x in np.meshgrid(*[np.array(EDGES[bits], np.uint64)] * 2))
    columns = [first, second, np.roll(first, 13)][:count]
    random = [rng.integers(0, 2**bits, 64, dtype=np.uint64) for _ in columns]
    kind = np.dtype(f"u{bits // 8}")
    return [np.concatenate([c, r]).astype(kind) for c, r in zip(columns, random, strict=True)]


def signed(value: int, kind: str) -> int:
    bits = ptx_type(kind).bits
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": lambda a, b: truncated(a, b) if b else -1,
    "rem": lambda a, b: a - b * truncated(a, b) if b else a,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", BINARY)
def test_arithmetic(name: str, kind: str) -> None:
    a, b = operands(ptx_type(kind).bits, 2)
    got = evaluate(f"{name}.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, a, b)
    expected = [
        signed(BINARY[name](signed(int(x), kind), signed(int(y), kind)), kind) for x, y in zip(a, b, strict=True)
    ]
    assert got.tolist() == expected


@pytest.mark.parametrize("kind", ["u32", "s32", "u16", "s16"])
def test_wide_and_high_products(kind: str) -> None:
    bits = ptx_type(kind).bits
    a, b, c = operands(bits, 3)
    products = [signed(int(x), kind) * signed(int(y), kind) for x, y in zip(a, b, strict=True)]
    wide = f"{kind[0]}{2 * bits}"
    assert evaluate(f"mul.wide.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), wide, a, b).tolist() == products
    assert evaluate(f"mul.hi.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, a, b).tolist() == [
        p >> bits for p in products
    ]
    got = evaluate(f"mad.lo.{kind} {{d}}, {{a}}, {{b}}, {{c}};", (kind,) * 3, kind, a, b, c)
    assert got.tolist() == [signed(p + int(z), kind) for p, z in zip(products, c, strict=True)]


@pytest.mark.parametrize("kind", ["u64", "s64"])
def test_high_half_of_64_bit_products(kind: str) -> None:
    a, b = operands(64, 2)
    got = evaluate(f"mul.hi.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, a, b)
    assert got.tolist() == [
        signed((signed(int(x), kind) * signed(int(y), kind)) >> 64, kind) for x, y in zip(a, b, strict=True)
    ]


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "s16", "s32", "s64"])
def test_shifts_beyond_the_width(kind: str) -> None:
    bits = ptx_type(kind).bits
    (a,) = operands(bits, 1)
    amounts = np.resize(np.array([0, 1, bits - 1, bits, bits + 1, 200, 2**31, 5], np.uint32), len(a))
    unsigned = f"b{bits}"
    got = evaluate(f"shl.{unsigned} {{d}}, {{a}}, {{b}};", (unsigned, "u32"), unsigned, a, amounts)
    assert got.tolist() == [
        (int(x) << int(n)) & (2**bits - 1) if n < bits else 0 for x, n in zip(a, amounts, strict=True)
    ]
    got = evaluate(f"shr.{kind} {{d}}, {{a}}, {{b}};", (kind, "u32"), kind, a, amounts)
    assert got.tolist() == [signed(int(x), kind) >> min(int(n), bits) for x, n in zip(a, amounts, strict=True)]


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits: int) -> None:
    a, b = operands(bits, 2)
    rng = np.random.default_rng(1)
    position, length = (rng.integers(0, 256, len(a)).astype(np.uint32) for _ in range(2))
    position[:64], length[:64] = rng.integers(0, bits, 64), rng.integers(0, bits + 1, 64)
    whole = 2**bits - 1

    def extract(x: int, p: int, n: int, kind: str) -> int:
        """The loop of the PTX manual."""
        top = min(p + n - 1, bits - 1)
        sign = 0 if kind[0] == "u" or n == 0 else x >> top & 1
        out = 0
        for i in range(bits):
            out |= (x >> (p + i) & 1 if i < n and p + i < bits else sign) << i
        return signed(out, kind)

    for kind in (f"u{bits}", f"s{bits}"):
        got = evaluate(f"bfe.{kind} {{d}}, {{a}}, {{b}}, {{c}};", (kind, "u32", "u32"), kind, a, position, length)
        assert got.tolist() == [
            extract(int(x), int(p), int(n), kind) for x, p, n in zip(a, position, length, strict=True)
        ]

    def insert(x: int, y: int, p: int, n: int) -> int:
        for i in range(n):
            if p + i < bits:
                y = y & ~(1 << (p + i)) | (x >> i & 1) << (p + i)
        return y & whole

    kind = f"b{bits}"
    got = evaluate(
        f"bfi.{kind} {{d}}, {{a}}, {{b}}, {{c}}, {{e}};", (kind, kind, "u32", "u32"), kind, a, b, position, length
    )
    assert got.tolist() == [
        insert(int(x), int(y), int(p), int(n)) for x, y, p, n in zip(a, b, position, length, strict=True)
    ]


@pytest.mark.parametrize("bits", [32, 64])
def test_counts_and_reversal(bits: int) -> None:
    (a,) = operands(bits, 1)
    values = [int(x) for x in a]
    kind = f"b{bits}"
    assert evaluate(f"popc.{kind} {{d}}, {{a}};", (kind,), "u32", a).tolist() == [x.bit_count() for x in values]
    assert evaluate(f"clz.{kind} {{d}}, {{a}};", (kind,), "u32", a).tolist() == [bits - x.bit_length() for x in values]
    assert evaluate(f"brev.{kind} {{d}}, {{a}};", (kind,), kind, a).tolist() == [
        int(f"{x:0{bits}b}"[::-1], 2) for x in values
    ]
    found = [x.bit_length() - 1 & 0xFFFFFFFF for x in values]
    assert evaluate(f"bfind.u{bits} {{d}}, {{a}};", (f"u{bits}",), "u32", a).tolist() == found


def test_permute() -> None:
    a, b, selector = operands(32, 3)

    def pick(x: int, y: int, s: int) -> int:
        source = (y << 32 | x).to_bytes(8, "little")
        out = []
        for i in range(4):
            nibble = s >> 4 * i & 15
            byte = source[nibble & 7]
            out.append(0xFF * (byte >> 7) if nibble & 8 else byte)
        return int.from_bytes(bytes(out), "little")

    got = evaluate("prmt.b32 {d}, {a}, {b}, {c};", ("b32",) * 3, "b32", a, b, selector)
    assert got.tolist() == [pick(int(x), int(y), int(s)) for x, y, s in zip(a, b, selector, strict=True)]


@pytest.mark.parametrize("table", [0x00, 0xE8, 0x96, 0xCA, 0xFF])
def test_lop3(table: int) -> None:
    a, b, c = operands(32, 3)
    got = evaluate(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};", ("b32",) * 3, "b32", a, b, c)

    def bit(x: int, y: int, z: int, i: int) -> int:
        return table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | z >> i & 1) & 1

    expected = [sum(bit(int(x), int(y), int(z), i) << i for i in range(32)) for x, y, z in zip(a, b, c, strict=True)]
    assert got.tolist() == expected


@pytest.mark.parametrize(("mode", "wrap"), [("l", True), ("r", True), ("l", False), ("r", False)])
def test_funnel_shift(mode: str, wrap: bool) -> None:
    a, b, c = operands(32, 3)
    got = evaluate(
        f"shf.{mode}.{'wrap' if wrap else 'clamp'}.b32 {{d}}, {{a}}, {{b}}, {{c}};", ("b32",) * 3, "b32", a, b, c
    )

    def funnel(low: int, high: int, n: int) -> int:
        n = n & 31 if wrap else min(n, 32)
        joined = high << 32 | low
        return (joined << n >> 32 if mode == "l" else joined >> n) & 0xFFFFFFFF

    assert got.tolist() == [funnel(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]


COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("name", COMPARE)
def test_comparison_and_select(name: str, kind: str) -> None:
    a, b = operands(ptx_type(kind).bits, 2)
    expected = [COMPARE[name](signed(int(x), kind), signed(int(y), kind)) for x, y in zip(a, b, strict=True)]
    assert evaluate(f"setp.{name}.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), "pred", a, b).tolist() == expected
    got = evaluate(
        f"setp.{name}.{kind} %p1, {{a}}, {{b}}; selp.b{kind[1:]} {{d}}, {{a}}, {{b}}, %p1;", (kind, kind), kind, a, b
    )
    assert got.view(a.dtype).tolist() == np.where(expected, a, b).tolist()


def test_both_results_of_a_combined_comparison() -> None:
    """setp p|q: p = cmp op c, q = !cmp op c."""
    a, b = operands(32, 2)
    third = np.resize(np.array([True, False, False]), len(a))
    both = evaluate(
        "setp.lt.and.u32 %p1|%p2, {a}, {b}, !{c}; selp.u32 %r1, 1, 0, %p1; selp.u32 %r2, 2, 0, %p2; or.b32 {d}, %r1, %r2;",
        ("u32", "u32", "pred"), "u32", a, b, third,
    )  # fmt: skip
    less = a < b
    assert both.tolist() == (np.where(less & ~third, 1, 0) | np.where(~less & ~third, 2, 0)).tolist()


@pytest.mark.parametrize("target", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("source", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_conversion(source: str, target: str) -> None:
    (a,) = operands(ptx_type(source).bits, 1)
    values = [signed(int(x), source) for x in a]
    stored = target if ptx_type(target).bits > 8 else f"{target[0]}16"
    got = evaluate(f"cvt.{target}.{source} {{d}}, {{a}};", (source,), stored, a)
    assert got.tolist() == [signed(v, target) for v in values]
    low, high = np.iinfo(ptx_type(target).dtype).min, np.iinfo(ptx_type(target).dtype).max
    got = evaluate(f"cvt.sat.{target}.{source} {{d}}, {{a}};", (source,), stored, a)
    assert got.tolist() == [min(max(v, low), high) for v in values]


def test_packing_and_unpacking_moves() -> None:
    a, b = operands(32, 2)
    got = evaluate("mov.b64 {d}, {{{a}, {b}}};", ("b32", "b32"), "b64", a, b)
    assert got.tolist() == [int(y) << 32 | int(x) for x, y in zip(a, b, strict=True)]
    got = evaluate("mov.b32 {{%h1, %h2}}, {a}; mov.b32 {d}, {{%h2, %h1}};", ("b32",), "b32", a)
    assert got.tolist() == [(int(x) << 16 | int(x) >> 16) & 0xFFFFFFFF for x in a]


def test_dot_products() -> None:
    a, b, c = operands(32, 3)
    got = evaluate("dp4a.s32.u32 {d}, {a}, {b}, {c};", ("b32", "b32", "s32"), "s32", a, b, c)
    sums = [sum(int(p) * int(q) for p, q in zip(np.array([x]).view(np.int8), np.array([y]).view(np.uint8), strict=True)) + int(z)
            for x, y, z in zip(a, b, c, strict=True)]  # fmt: skip
    assert got.tolist() == [signed(s, "s32") for s in sums]
    got = evaluate("dp2a.lo.u32.u32 {d}, {a}, {b}, {c};", ("u32",) * 3, "u32", a, b, c)
    sums = [
        (int(x) & 0xFFFF) * (int(y) & 0xFF) + (int(x) >> 16) * (int(y) >> 8 & 0xFF) + int(z)
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert got.tolist() == [s & 0xFFFFFFFF for s in sums]


def test_absolute_negative_and_complement() -> None:
    (a,) = operands(32, 1)
    assert evaluate("abs.s32 {d}, {a};", ("s32",), "s32", a).tolist() == [
        signed(abs(signed(int(x), "s32")), "s32") for x in a
    ]
    assert evaluate("neg.s32 {d}, {a};", ("s32",), "s32", a).tolist() == [signed(-int(x), "s32") for x in a]
    assert evaluate("not.b32 {d}, {a};", ("b32",), "b32", a).tolist() == [~int(x) & 0xFFFFFFFF for x in a]
    assert evaluate("cnot.b32 {d}, {a};", ("b32",), "b32", a).tolist() == [int(x == 0) for x in a]


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_24_bit_products_saturated_sums_and_distances(kind: str) -> None:
    a, b, c = operands(32, 3)
    low = [[signed(int(x) << 8, kind) >> 8 for x in column] for column in (a, b)]
    got = evaluate(f"mul24.lo.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, a, b)
    assert got.tolist() == [signed(x * y, kind) for x, y in zip(*low, strict=True)]
    values = [[signed(int(x), kind) for x in column] for column in (a, b, c)]
    got = evaluate(f"sad.{kind} {{d}}, {{a}}, {{b}}, {{c}};", (kind, kind, kind), kind, a, b, c)
    assert got.tolist() == [signed(abs(x - y) + z, kind) for x, y, z in zip(*values, strict=True)]
    if kind == "s32":
        got = evaluate("sub.sat.s32 {d}, {a}, {b};", ("s32", "s32"), "s32", a, b)
        assert got.tolist() == [min(max(x - y, -(2**31)), 2**31 - 1) for x, y in zip(*values[:2], strict=True)]
