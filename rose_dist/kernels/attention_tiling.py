"""How decode attention spreads its work over blocks: pure data and arithmetic, no GPU needed."""

from __future__ import annotations

import math

from rose_dist.kernels.variants import Ranges

TILE = 16
"""Keys that a warp takes at a time; a divisor of every block size."""
MIN_TILES = 8
"""Tiles a part of a request's keys, at least: below, merging costs more than further blocks gain."""
MOST_SPLITS = 128
"""Parts of a request's keys."""
SPLIT_DIMENSIONS = 16384
"""Dimensions of all key heads times parts, at most: with two heads of 64 a block, nearly every SM of a Hopper GPU gets
a part, and what is merged stays little beside the keys."""
ROW_BYTES = {2: Ranges((0, 33, 1024), (128, 256, 128)), 1: Ranges((0, 33), (128, 256))}
"""Neighbouring bytes of a token that a block reads, if there are so many: by bytes of an element, and by requests times
key heads. Measured on H200 with 8 heads of 64 and 1,024 tokens, 1, 8, 32 and 128 requests; up to 32, blocks of more
bytes would be fewer than SMs."""
WHOLE_TOKENS, WHOLE_TOKENS_OF_SHORT_WINDOWS = 65, 256
"""Requests times key heads from which on blocks take all key heads of a token, the latter with one part of keys a
request. Measured on H200 with 8 heads of 64 in bf16: as fast as by heads at 8 requests, and at between 8 and 32."""
WHOLE_TOKEN_DIMENSIONS = 512
"""Of all key heads, at most: a block's results have no room for more."""
WIDE_DIMENSIONS = 128
"""Of a token's neighbouring heads, all that a thread has registers for with 16 query heads a key head."""


GIVING_REQUESTS, GIVING_DIMENSIONS = 8, 2048
"""Of all query heads: what an output projection has for each of its inputs is then half of GPT-OSS's on one GPU."""


def gives_way(requests: int, dimensions: int) -> bool:
    """Whether the launch behind finds room beside this one and the one before: an output projection of few rows and
    inputs. It then begins at once, so that its weights have come when the queries are there. Else it begins when this
    one's last accesses are on their way, or its weights would come before them.
    """
    return requests <= GIVING_REQUESTS and dimensions <= GIVING_DIMENSIONS


def most_splits(context: int, key_heads: int, head_dim: int) -> int:
    """Parts of the keys of a request with `context` visible tokens."""
    most = min(MOST_SPLITS, SPLIT_DIMENSIONS // (key_heads * head_dim))
    return max(1, min(-(-context // TILE) // MIN_TILES, most))


def heads_together(requests: int, key_heads: int, head_dim: int, itemsize: int, *, wide_group: bool) -> int:
    """Neighbouring key heads that one block reads, if a token's lie side by side.

    itemsize: bytes of an element of the cache. wide_group: more than 8 query heads a key head.
    """
    heads = ROW_BYTES[itemsize].select(requests * key_heads) // (head_dim * itemsize)
    if wide_group:
        heads = min(heads, WIDE_DIMENSIONS // head_dim)
    return math.gcd(max(heads, 1), key_heads)


def takes_whole_tokens(
    requests: int, key_heads: int, head_dim: int, window: int | None, *, wide_group: bool
) -> bool:  # fmt: skip
    """Whether a block takes all key heads, if tokens lie side by side. Arguments as of `heads_together`."""
    fits = key_heads % 2 == 0 and key_heads * head_dim <= WHOLE_TOKEN_DIMENSIONS and not wide_group
    short = window is not None and window <= MIN_TILES * TILE
    return fits and requests * key_heads >= (WHOLE_TOKENS_OF_SHORT_WINDOWS if short else WHOLE_TOKENS)


def is_brief(works: int, window: int | None, sms: int) -> bool:
    """Whether latency counts and not bytes: one short part of keys for each of a few requests' heads."""
    return window is not None and window <= MIN_TILES * TILE and works <= 2 * sms
