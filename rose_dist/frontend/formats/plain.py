"""Text without structure, for the Completions API."""

from __future__ import annotations

from collections.abc import Sequence

from rose_dist.frontend.formats.base import Delta, Section, TextDelta
from rose_dist.frontend.tokenizer import Detokenizer


class PlainParser:
    """A `ChatParser` for which everything is content."""

    section: Section = "content"

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    def feed(self, token_id: int) -> Sequence[Delta]:
        text = self._detokenizer.feed(token_id)
        return (TextDelta("content", text),) if text else ()

    def finish(self) -> Sequence[Delta]:
        text = self._detokenizer.finish()
        return (TextDelta("content", text),) if text else ()
