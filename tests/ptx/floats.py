"""Operands for tests of float instructions, and comparisons of their results."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch

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


def same16(got: np.ndarray, expected: torch.Tensor) -> None:
    nan = torch.isnan(expected).numpy()
    bits = expected.view(torch.int16).numpy().view(np.uint16)
    bad = np.flatnonzero(~nan & (got != bits))
    assert bad.size == 0, (bad[:5], got[bad[:5]], bits[bad[:5]])
    assert set(got[nan].tolist()) <= {0x7FFF}
