"""The blocks of one KV group: who holds them, what they contain, which goes next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

BlockHash = bytes
"""Names a block's content: its own tokens and all tokens before them."""


class BlockPool:
    """Reference-counted blocks. A block that nobody holds keeps its content, and can be found by it, until its turn
    comes to be handed out again, least recently used first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._holders = [0] * size
        self._hash: list[BlockHash | None] = [None] * size
        self._by_hash: dict[BlockHash, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))

    @property
    def free(self) -> int:
        """Blocks that nobody holds, whatever they contain."""
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Blocks of the caller's own, their old content forgotten, in ascending order: attention reads keys where they
        are if their blocks follow one another. At least as many must be free.
        """
        blocks = sorted(self._free.popitem(last=False)[0] for _ in range(count))
        for block in blocks:
            content = self._hash[block]
            if content is not None:
                del self._by_hash[content]
                self._hash[block] = None
            self._holders[block] = 1
        return blocks

    def find(self, content: BlockHash) -> int | None:
        return self._by_hash.get(content)

    def hold(self, block: int) -> None:
        """Share a block that was found."""
        if self._holders[block] == 0:
            del self._free[block]
        self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give back blocks of the caller's. Of those that nobody holds any more, the first is forgotten first."""
        holders, free = self._holders, self._free
        for block in blocks:
            assert holders[block] > 0, f"block {block} is held by nobody"
            holders[block] -= 1
            if holders[block] == 0:
                free[block] = None
                if self._hash[block] is None:
                    free.move_to_end(block, last=False)

    def publish(self, block: int, content: BlockHash) -> None:
        """Let others find `block` by its content, now complete. The first block with a content keeps the name."""
        if content not in self._by_hash and self._hash[block] is None:
            self._by_hash[content] = block
            self._hash[block] = content
