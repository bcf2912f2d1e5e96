"""Hypothesis without time limits: an example may wait for other ranks, or for a busy machine."""

from hypothesis import settings

settings.register_profile("ranks")
settings.load_profile("ranks")
