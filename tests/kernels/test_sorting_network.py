from itertools import product

import pytest

from rose_dist.kernels.sorting_network import comparators


@pytest.mark.parametrize("count", range(1, 13))
def test_zeros_and_ones_are_sorted(count: int) -> None:
    """So that everything is (the 0-1 principle; Knuth, The Art of Computer Programming 3, 5.3.4, theorem Z)."""
    pairs = list(comparators(count))
    for bits in product((0, 1), repeat=count):
        values = list(bits)
        for a, b in pairs:
            assert a < b
            values[a], values[b] = max(values[a], values[b]), min(values[a], values[b])
        assert values == sorted(bits, reverse=True)
