"""The base of every error that a user can cause and mend."""

from __future__ import annotations


class RoseError(Exception):
    """One line that says what was wrong, what is allowed and how to mend it.

    The command line prints it as `error: …` and exits with 1; it never shows a traceback for one.
    """
