"""One request while it is in the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rose_dist.engine.block_pool import BlockHash
from rose_dist.engine.grammar import TokenGrammar
from rose_dist.engine.protocol import Generate


@dataclass(eq=False)
class BlockTable:
    """The blocks that hold a request's tokens in one KV group.

    first: index, counted in blocks from the request's start, of `blocks[0]`; a window group lets go of earlier ones.
    """

    first: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Index after the last block."""
        return self.first + len(self.blocks)


@dataclass(eq=False)
class Request:
    """
    client: who gets the output.
    limit: prompt and output together may not be longer.
    seed: drawn when the client gave none.
    tokens: prompt and output. The last may be one that a step still under way samples: −1 − its row there.
    computed: how many of `tokens` have their keys and values in the cache, once the steps under way have ended.
    compiling: its grammar is not there yet; until then it is not admitted.
    grammar: what the output must match, at the place it has reached.
    arrived, admitted: when it came and when its first step was planned, as `time.monotonic` counts.
    done: it has ended, and what a step still under way finds for it is dropped.
    """

    client: bytes
    generate: Generate
    limit: int
    seed: int
    tables: list[BlockTable]
    tokens: list[int] = field(init=False)
    computed: int = 0
    cached_tokens: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    stop_ids: frozenset[int] = field(init=False)
    compiling: bool = False
    grammar: TokenGrammar | None = None
    arrived: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    done: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.generate.prompt)
        self.stop_ids = frozenset(self.generate.stop_ids)

    @property
    def id(self) -> str:
        return self.generate.request_id

    @property
    def prompt_length(self) -> int:
        return len(self.generate.prompt)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def complete(self) -> bool:
        """It is as long as it may get, though its last token may still be under way."""
        return len(self.tokens) >= self.limit
