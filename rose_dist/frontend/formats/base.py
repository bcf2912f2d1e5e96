"""The chat format plug-in: a conversation becomes token ids, and generated token ids become what a client reads.

A format is chosen once, from the checkpoint, when a frontend starts. The API layer feeds a parser one token at a
time, so that a step that yields several tokens (speculative decoding) gives the same deltas as one that yields one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from rose_dist.errors import RoseError

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Section = Literal["reasoning", "content", "tool_call", "control"]
"""What a generated token belongs to. `control`: headers, markers and stop ids; never shown."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call in the history; `arguments` is the raw text that the model wrote, JSON or not."""

    id: str
    name: str
    arguments: str


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the history, already checked: text parts are joined, unknown fields are gone."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    """The assistant's own, sent back by the client."""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""
    """On role `tool`: the call that this answers."""
    name: str = ""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call; `parameters` is its JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False
    """The arguments must match the schema even where the model calls of its own accord."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer's text must match."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    schema: dict[str, Any] = {}
    """Of kind `json_schema`."""
    text: str = ""
    """The regular expression, or the grammar in llguidance's Lark dialect."""
    name: str = "response"
    description: str = ""


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """What a format renders: the history, the tools offered and the template's own arguments."""

    messages: list[Message]
    tools: list[Tool] = []
    required_tools: list[str] = []
    """Unless empty, the answer must call one of these: all offered for `tool_choice` required, one for a named one."""
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    template_arguments: dict[str, Any] = {}
    """The request's `chat_template_kwargs`."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    section: Literal["reasoning", "content"]
    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of the call number `index`. `name` is set on the first piece of each call and only there."""

    index: int
    arguments: str
    name: str | None = None


Delta = TextDelta | ToolCallDelta


class ChatParser(Protocol):
    """Turns one choice's generated ids into deltas. Never raises, whatever the ids are."""

    section: Section
    """Where the last token fed belongs."""

    def feed(self, token_id: int) -> Sequence[Delta]:
        """Take the next generated token. Incomplete UTF-8 is held back until it is whole."""

    def finish(self) -> Sequence[Delta]:
        """The output has ended, at a stop id or cut short: deliver what was held back."""


class ChatFormat(Protocol):
    name: str
    stop_ids: frozenset[int]
    """Ids that end an assistant turn."""

    def render(self, conversation: Conversation) -> list[int]:
        """Prompt ids, the generation prompt included. Text of any role can't become a control token.

        Raises:
            FormatError: the conversation can't be rendered; the message names the offending part.
        """

    def parser(self, conversation: Conversation) -> ChatParser:
        """A fresh parser for one choice that answers `conversation`."""

    def grammar(self, conversation: Conversation) -> str | None:
        """`Generate.grammar` for `required_tools`, `response_format` or strict tools; None if there is none of these.

        Raises:
            FormatError: the schema, expression or grammar is invalid or uses what can't be enforced.
        """


class FormatError(RoseError, ValueError):
    """A conversation that a format can't render; becomes a 400."""
