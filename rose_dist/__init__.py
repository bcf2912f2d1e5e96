"""rose_dist: an LLM inference runtime that spans one GPU to many nodes."""

__version__ = "0.1.0"
