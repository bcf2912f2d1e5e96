"""`python -m rose_dist.frontend '<LaunchSpec as JSON>'`: how rank 0 starts a frontend process."""

from __future__ import annotations

import logging
import sys

import msgspec

from rose_dist.errors import RoseError
from rose_dist.frontend.config import LaunchSpec
from rose_dist.frontend.server import die_with_parent, serve


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="[frontend] %(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        spec = msgspec.json.decode(sys.argv[1], type=LaunchSpec)
    except (IndexError, msgspec.DecodeError) as error:
        sys.exit(f"rose_dist.frontend takes one argument, a LaunchSpec as JSON: {error}")
    die_with_parent(spec.parent_pid)
    try:
        serve(spec)
    except RoseError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
