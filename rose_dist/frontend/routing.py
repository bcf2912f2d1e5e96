"""Which data-parallel leader gets a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_BLOCK = 128
"""Tokens of a prompt's head that are remembered together."""
_MAX_BLOCKS = 16
_REMEMBERED = 8192
"""Heads remembered; the least recently used is forgotten."""


class Router:
    """The least loaded leader, unless another has lately seen the same head and is not clearly more loaded."""

    def __init__(self, leaders: int) -> None:
        self._leaders = leaders
        self._seen: OrderedDict[int, int] = OrderedDict()

    def choose(self, prompt: Sequence[int], loads: Sequence[int]) -> int:
        """
        Args:
            prompt: token ids.
            loads: requests in flight at each leader.

        Returns: the leader's index.
        """
        if self._leaders == 1:
            return 0
        heads = [hash(tuple(prompt[:end])) for end in self._ends(len(prompt))]
        chosen = min(range(self._leaders), key=loads.__getitem__)
        known = next((self._seen[head] for head in reversed(heads) if head in self._seen), None)
        if known is not None and loads[known] <= loads[chosen] * 1.25 + 2:
            chosen = known
        for head in heads:
            self._seen[head] = chosen
            self._seen.move_to_end(head)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return chosen

    @staticmethod
    def _ends(length: int) -> list[int]:
        return [min(length, _BLOCK * n) for n in range(1, min(_MAX_BLOCKS, -(-length // _BLOCK)) + 1)]
