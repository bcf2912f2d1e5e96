"""Stop strings in streamed text."""

from __future__ import annotations


class StopMatcher:
    """Cuts a text at the first stop string that is complete, whatever pieces the text comes in.

    Text that could be the beginning of a stop string is held back until it is known not to be one. When several stop
    strings match, the one that ends first counts, and of those that end together the longest.
    """

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        self._longest = max(map(len, stops)) - 1
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""
        self.rest = ""
        """What was fed together with a match and comes after it."""

    def feed(self, text: str) -> str:
        """The text that may be shown now. Nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self.rest = text[end:]
            self._held = ""
            return text[:start]
        shown = len(text) - self._beginning_at_end(text)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The text ended without a match: what was held back."""
        held, self._held = self._held, ""
        return held

    def _beginning_at_end(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0
