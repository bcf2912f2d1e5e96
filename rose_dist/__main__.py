"""`python -m rose_dist` is `rose`."""

from rose_dist.cli.main import main

main()
