"""Which data-parallel leader gets a request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

_BLOCK = 128
"""Tokens of a prompt's head that are remembered together."""
_MAX_BLOCKS = 16
_REMEMBERED = 8192
"""Heads remembered; the least recently used is forgotten."""


class Router:
    """The least loaded leader, unless another has lately seen the same head and is not clearly more loaded."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, int] = OrderedDict()

    def choose(self, prompt: Sequence[int], loads: Mapping[int, int]) -> int:
        """
        Args:
            prompt: token ids.
            loads: requests in flight at each leader that takes requests, by its number; at least one.

        Returns: the leader's number.
        """
        if len(loads) == 1:
            return next(iter(loads))
        heads = [hash(tuple(prompt[:end])) for end in self._ends(len(prompt))]
        chosen = min(loads, key=loads.__getitem__)
        known = next((self._seen[head] for head in reversed(heads) if self._seen.get(head) in loads), None)
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
