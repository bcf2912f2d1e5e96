"""For all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes depends on the machine's other work; what it finds does not.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
