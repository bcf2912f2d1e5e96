"""Which KV blocks a request holds, in every group of layers, and which prompt beginnings are still cached."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rose_dist.engine.block_pool import BlockPool
from rose_dist.engine.request import BlockTable, Request


@dataclass(frozen=True)
class GroupSpec:
    """
    blocks: size of the group's pool.
    window: tokens that a layer of this group sees, the current one included; None sees all.
    """

    blocks: int
    window: int | None


class KVCache:
    """Block tables for all groups at once: a request has room in each, or it does not get any."""

    def __init__(self, groups: Sequence[GroupSpec], block_size: int, prefix_cache: bool = True) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pools = tuple(BlockPool(group.blocks) for group in groups)

    @property
    def capacity(self) -> int:
        """Most tokens of one request; groups with a window limit it only where they are the only ones."""
        full = [group.blocks for group in self.groups if group.window is None]
        return min(full or [group.blocks for group in self.groups]) * self.block_size

    @property
    def used_blocks(self) -> int:
        return sum(pool.used for pool in self.pools)

    @property
    def total_blocks(self) -> int:
        return sum(pool.size for pool in self.pools)

    def empty_tables(self) -> list[BlockTable]:
        return [BlockTable() for _ in self.groups]

    def match(self, request: Request) -> None:
        """Give a request that holds nothing the longest cached beginning of its tokens, short of the last one."""
        assert request.computed == 0
        if not self.prefix_cache:
            return
        blocks = self._longest_match(request)
        for group, pool, table in self._held(request):
            table.first = self._first_needed(group, blocks * self.block_size)
            for content in request.hashes[table.first : blocks]:
                block = pool.find(content)
                assert block is not None
                pool.hold(block)
                table.blocks.append(block)
        request.computed = blocks * self.block_size

    def _longest_match(self, request: Request) -> int:
        """Blocks of the longest beginning of which every group still has what it would read. A device may be waiting:
        no block is hashed behind one that could not be used.
        """
        usable = 0
        runs = [0] * len(self.groups)
        """For each group, how many blocks up to here are cached without a gap."""
        for end in range(1, (len(request.tokens) - 1) // self.block_size + 1):
            self._extend_hashes(request, end * self.block_size)
            content = request.hashes[end - 1]
            for index, pool in enumerate(self.pools):
                runs[index] = runs[index] + 1 if pool.find(content) is not None else 0
            if all(
                run >= end - self._first_needed(group, end * self.block_size)
                for run, group in zip(runs, self.groups, strict=True)
            ):
                usable = end
            elif any(run < end for run, group in zip(runs, self.groups, strict=True) if group.window is None):
                break
        return usable

    def has_room(self, request: Request) -> bool:
        """Whether all of the request's tokens and the next one would fit now; groups with a window need little."""
        wanted = len(request.tokens) // self.block_size + 1
        return all(
            wanted - table.end <= pool.free for group, pool, table in self._held(request) if group.window is None
        )

    def grow(self, request: Request, end: int) -> bool:
        """Make room for the request's tokens up to `end`; False, and nothing changed, if a pool has too few blocks."""
        wanted = -(-end // self.block_size)
        for _, pool, table in self._held(request):
            if wanted - table.end > pool.free:
                return False
        for _, pool, table in self._held(request):
            table.blocks.extend(pool.allocate(wanted - table.end))
        return True

    def place(self, request: Request, computed: int) -> bool:
        """Room for the first `computed` tokens of a request that holds nothing, and for the next one, as if they had
        been computed here; somebody else puts keys and values there. False, and nothing changed, if there is none.
        """
        for group, _, table in self._held(request):
            table.first = self._first_needed(group, computed)
        if not self.grow(request, computed + 1):
            self.free(request)
            return False
        request.computed = computed
        self._extend_hashes(request, computed)
        return True

    def advance(self, request: Request, computed: int) -> None:
        """The request's tokens up to `computed` are in the cache, or will be before any later step reads them: share
        full blocks, let go of unneeded ones.
        """
        before = request.computed // self.block_size
        request.computed = computed
        if self.prefix_cache:
            self._extend_hashes(request, computed)
            for _, pool, table in self._held(request):
                for index in range(max(before, table.first), computed // self.block_size):
                    pool.publish(table.blocks[index - table.first], request.hashes[index])
        for group, pool, table in self._held(request):
            needed = min(self._first_needed(group, computed), table.end)
            if needed > table.first:
                pool.release(table.blocks[: needed - table.first])
                del table.blocks[: needed - table.first]
                table.first = needed

    def free(self, request: Request) -> None:
        """Take everything from the request. Its content stays findable until the blocks are needed."""
        for _, pool, table in self._held(request):
            # The last block first: a beginning is worth more than an end that needs it.
            pool.release(reversed(table.blocks))
            table.blocks.clear()
            table.first = 0
        request.computed = 0

    def _first_needed(self, group: GroupSpec, computed: int) -> int:
        """Index of the first block that the token at position `computed` reads."""
        return 0 if group.window is None else max(0, computed - group.window + 1) // self.block_size

    def _extend_hashes(self, request: Request, tokens: int) -> None:
        hashes = request.hashes
        for index in range(len(hashes), tokens // self.block_size):
            content = array("q", request.tokens[index * self.block_size : (index + 1) * self.block_size])
            parent = hashes[-1] if hashes else b""
            hashes.append(hashlib.blake2b(parent + content.tobytes(), digest_size=16).digest())

    def _held(self, request: Request) -> zip[tuple[GroupSpec, BlockPool, BlockTable]]:
        return zip(self.groups, self.pools, request.tables, strict=True)
