"""Sampled Harmony ids to deltas: a state machine over tokens that accepts any ids.

It is either in a header, whose pieces it collects, or in a body, whose text it delivers token by token. What a message
is, its header decides:

| header | delivered as |
|---|---|
| recipient names an offered tool, on any channel | tool call |
| channel `final`, or no channel | content |
| channel `commentary` without a recipient (a preamble) | content; reasoning where the answer must fit a schema |
| channel `analysis`, any unknown channel, or a recipient that is no offered tool | reasoning |
| role other than assistant | nothing |

Several messages of one kind are joined by a line feed. Faults and what becomes of them: a missing `<|end|>` is implied
by `<|start|>` or `<|channel|>`; text between a stop and the next marker is dropped; where `<|message|>` is missing,
the header's leftover words are the content; a header that is cut short delivers nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from rose_dist.frontend.formats.base import Delta, Section, TextDelta, ToolCallDelta
from rose_dist.frontend.formats.harmony_header import Header, OfferedTools, parse_header
from rose_dist.frontend.formats.harmony_vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    END_OF_TEXT,
    MESSAGE,
    RETURN,
    START,
    HarmonyVocabulary,
)

_ENDS = frozenset({END, RETURN, CALL, END_OF_TEXT})


class HarmonyMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message as sampled, its header cleaned."""

    role: str
    channel: str | None
    recipient: str | None
    content_type: str | None
    content: str


class HarmonyParser:
    """Reads the ids that follow the generation prompt `<|start|>assistant`."""

    def __init__(self, vocabulary: HarmonyVocabulary, tools: OfferedTools, *, show_preambles: bool = True):
        self.section: Section = "control"
        self._vocabulary = vocabulary
        self._whole_texts = vocabulary.whole_texts
        self._tools = tools
        self._show_preambles = show_preambles
        self._messages: list[HarmonyMessage] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = False
        """The decoder holds the first bytes of a character."""
        self._header_begun_by: Literal["prompt", "start", "stray text"] = "prompt"
        self._header_pieces: list[bytes] = []
        self._header: Header | None = None
        """Of the message whose body is being read; None while in a header."""
        self._body: list[str] = []
        self._body_section: Section = "control"
        self._deliver: Callable[[str], Sequence[Delta]] = _deliver_nothing
        self._joint = ""
        self._delivered: set[Section] = set()
        self._calls = 0

    @property
    def messages(self) -> list[HarmonyMessage]:
        """All messages so far, the unfinished one included. Costs a join of its text: not for every token."""
        return self._messages if self._header is None else [*self._messages, self._message(self._header)]

    def feed(self, token_id: int) -> Sequence[Delta]:
        if self._header is not None and not self._partial:
            text = self._whole_texts.get(token_id)
            if text is not None:
                self.section = self._body_section
                self._body.append(text)
                return self._deliver(text)
        return self._feed_other(token_id)

    def finish(self) -> Sequence[Delta]:
        if self._header is not None:
            return self._close()
        header = self._read_header()
        if header.channel or header.recipient:
            self._header, self._body = header, []
            self._close()
        self._begin_header("stray text")
        return ()

    def _feed_other(self, token_id: int) -> Sequence[Delta]:
        """A control token, or a piece of a header or of a character."""
        data = self._vocabulary.bytes_of(token_id)
        if data and self._header is not None:
            return self._feed_partial(data)
        self.section = "control"
        if data:
            self._header_pieces.append(data)
        elif token_id == START:
            deltas = self._close()
            self._begin_header("start")
            return deltas
        elif token_id == CHANNEL:
            return self._feed_channel()
        elif token_id == CONSTRAIN and self._header is None:
            self._header_pieces.append(b"<|constrain|>")
        elif token_id == MESSAGE and self._header is None:
            return self._open(self._read_header())
        elif token_id in _ENDS:
            return self._close() if self._header is not None else self._end_header()
        return ()

    def _feed_partial(self, data: bytes) -> Sequence[Delta]:
        self.section = self._body_section
        text = self._decoder.decode(data)
        self._partial = bool(self._decoder.getstate()[0])
        if not text:
            return ()
        self._body.append(text)
        return self._deliver(text)

    def _feed_channel(self) -> Sequence[Delta]:
        deltas: Sequence[Delta] = ()
        if self._header is not None:
            deltas = self._close()
        if self._header_begun_by == "stray text":
            self._header_begun_by = "start" if self._header_pieces else "prompt"
        self._header_pieces.append(b"<|channel|>")
        return deltas

    def _begin_header(self, begun_by: Literal["start", "stray text"]) -> None:
        self._header_begun_by = begun_by
        self._header_pieces = []

    def _read_header(self) -> Header:
        text = b"".join(self._header_pieces).decode("utf-8", "replace")
        return parse_header(text, self._tools, role_first=self._header_begun_by != "prompt")

    def _end_header(self) -> Sequence[Delta]:
        """A message ended before `<|message|>`: what its header has left over is the content."""
        header = self._read_header()
        stray = self._header_begun_by == "stray text"
        self._begin_header("stray text")
        if stray or not (header.channel or header.recipient or header.leftover):
            return ()
        opening = self._open(header)
        self._body.append(header.leftover)
        text = self._deliver(header.leftover) if header.leftover else ()
        return [*opening, *text, *self._close()]

    def _open(self, header: Header) -> Sequence[Delta]:
        self._header = header
        self._body = []
        self._body_section = self._section_of(header)
        if header.call:
            self._calls += 1
            self._deliver = self._deliver_arguments
            return (ToolCallDelta(self._calls - 1, "", header.call),)
        if self._body_section == "control":
            self._deliver = _deliver_nothing
        else:
            self._joint = "\n" if self._body_section in self._delivered else ""
            self._deliver = self._deliver_first_text
        return ()

    def _close(self) -> Sequence[Delta]:
        """End the body, if one is open; the first bytes of a character that never came are U+FFFD."""
        if self._header is None:
            return ()
        deltas: Sequence[Delta] = ()
        if self._partial:
            text = self._decoder.decode(b"", final=True)
            self._partial = False
            self._body.append(text)
            deltas = self._deliver(text)
        self._messages.append(self._message(self._header))
        self._header = None
        self._begin_header("stray text")
        return deltas

    def _section_of(self, header: Header) -> Section:
        if header.role != "assistant":
            return "control"
        if header.call:
            return "tool_call"
        if header.channel == "final":
            return "content"
        if header.channel in (None, "commentary") and not header.to_a_tool:
            return "content" if self._show_preambles or header.channel is None else "reasoning"
        return "reasoning"

    def _deliver_first_text(self, text: str) -> Sequence[Delta]:
        section: Literal["reasoning", "content"] = "content" if self._body_section == "content" else "reasoning"
        self._delivered.add(section)
        self._deliver = _deliver_content if section == "content" else _deliver_reasoning
        return self._deliver(self._joint + text)

    def _deliver_arguments(self, text: str) -> Sequence[Delta]:
        return (ToolCallDelta(self._calls - 1, text),)

    def _message(self, header: Header) -> HarmonyMessage:
        return HarmonyMessage(
            role=header.role,
            channel=header.channel,
            recipient=header.recipient,
            content_type=header.content_type,
            content="".join(self._body),
        )


def _deliver_reasoning(text: str) -> Sequence[Delta]:
    return (TextDelta("reasoning", text),)


def _deliver_content(text: str) -> Sequence[Delta]:
    return (TextDelta("content", text),)


def _deliver_nothing(text: str) -> Sequence[Delta]:
    return ()
