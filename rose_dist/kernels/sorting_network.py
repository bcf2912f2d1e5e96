"""A sorting network, for a few values that are in registers."""

from __future__ import annotations

from collections.abc import Iterator


def comparators(count: int) -> Iterator[tuple[int, int]]:
    """Which of `count` values to put in order, one pair after the other: merge exchange (Knuth, The Art of Computer
    Programming 3, 5.2.2, algorithm M).
    """
    top = 1 << (count - 1).bit_length() >> 1
    p = top
    while p:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(count - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2
