"""What stands between `<|start|>` and `<|message|>`, read with the tolerance that sampled headers need.

A well-formed header is `{role}[ to=recipient]<|channel|>{channel}[ to=recipient][ <|constrain|>{content type}]`. Models
also glue, repeat, reorder and garble these parts; about one turn in 25 does so at temperature 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from rose_dist.frontend.formats.base import Conversation, FormatError

CHANNELS = ("analysis", "commentary", "final")
ROLES = ("assistant", "user", "system", "developer", "tool")
BUILTIN_NAMESPACES = ("browser", "python", "container")
"""Tools that gpt-oss was trained with, called without the `functions.` in front."""

_MARKER = re.compile(r"<\|(\w*)\|>")
_RECIPIENT = re.compile(r"to=\s*([^\s<]*)")
_RECIPIENT_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_CONTENT_TYPE = re.compile(r"[\w./+-]*")
_PLAIN_CONTENT_TYPES = ("json", "code", "text")
_PEOPLE = ("user", "assistant", "all")


class Header(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    channel: str | None = None
    """One of `CHANNELS`, else the word that the model wrote; None if it named none."""
    recipient: str | None = None
    content_type: str | None = None
    call: str | None = None
    """API name of the offered tool that is called."""
    leftover: str = ""
    """Words that are none of these: the content itself where `<|message|>` was forgotten."""

    @property
    def to_a_tool(self) -> bool:
        """Addressed to a tool, offered or not; the content is no text for people."""
        return self.recipient is not None and self.recipient not in _PEOPLE


@dataclass(frozen=True)
class OfferedTools:
    """The tools that a conversation offers; a recipient that names none of them calls nothing."""

    functions: frozenset[str] = frozenset()
    namespaces: frozenset[str] = frozenset()
    """Those of `BUILTIN_NAMESPACES` that are offered."""

    @classmethod
    def of(cls, conversation: Conversation) -> OfferedTools:
        return cls(frozenset(tool.name for tool in conversation.tools), frozenset(offered_builtins(conversation)))

    def resolve(self, recipient: str) -> str | None:
        """API name of the tool that a cleaned recipient names, with or without `functions.`; None if not offered."""
        name = recipient.removeprefix("functions.")
        if name in self.functions or name.split(".")[0] in self.namespaces:
            return name
        unglued = name.removesuffix("json")
        return unglued if unglued in self.functions else None


def offered_builtins(conversation: Conversation) -> list[str]:
    """The template argument `builtin_tools`.

    Raises:
        FormatError: it is not a list of `browser` and `python`.
    """
    names = conversation.template_arguments.get("builtin_tools") or []
    if not isinstance(names, list) or any(name not in ("browser", "python") for name in names):
        raise FormatError(f'builtin_tools must be a list of "browser" and "python", not {names!r}')
    return names


def parse_header(text: str, tools: OfferedTools, *, role_first: bool) -> Header:
    """Read a header; any text gives one.

    Args:
        text: what was sampled, with `<|channel|>` and `<|constrain|>` written out.
        tools: what a recipient may name.
        role_first: the first word is a role, as after `<|start|>`; else the prompt has given the role, assistant.
    """
    recipients = [clean for match in _RECIPIENT.finditer(text) if (clean := _clean_recipient(match[1]))]
    offered = [recipient for recipient in recipients if tools.resolve(recipient)]
    recipient = _last(offered) or _last(recipients)

    pieces = _MARKER.split(_RECIPIENT.sub(" ", text))
    role, words = _read_role(pieces[0].split(), tools) if role_first else _skip_repeated_role(pieces[0].split())
    named: list[str] = []
    if words and words[0] in CHANNELS:
        named.append(words.pop(0))
    content_type = ""
    for marker, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        following = piece.split()
        if following and marker == "channel":
            channel, *following = _peel(following, CHANNELS)
            named.append(channel)
        elif following and marker == "constrain":
            content_type = _leading(_CONTENT_TYPE, following[0])
            following[0] = following[0].removeprefix(content_type)
        words += filter(None, following)
    if not content_type and words and words[0] in _PLAIN_CONTENT_TYPES:
        content_type = words.pop(0)
    call = tools.resolve(recipient) if recipient and role == "assistant" else None
    if call:
        recipient = f"functions.{call}" if call in tools.functions else call
    return Header(
        role=role,
        channel=_last([name for name in named if name in CHANNELS]) or _last(named),
        recipient=recipient,
        content_type=content_type or None,
        call=call,
        leftover=" ".join(words),
    )


def _last(names: list[str]) -> str | None:
    return names[-1] if names else None


def _clean_recipient(word: str) -> str:
    """`functions.f––commentary` and `functions.f?` mean `functions.f`."""
    return _leading(_RECIPIENT_NAME, word).rstrip(".")


def _leading(pattern: re.Pattern[str], word: str) -> str:
    match = pattern.match(word)
    return match[0] if match else ""


def _read_role(words: list[str], tools: OfferedTools) -> tuple[str, list[str]]:
    """An unknown role is a tool's name if it names one, else a name that the assistant gave itself."""
    if not words:
        return "assistant", words
    first = words[0].split(":")[0]
    if tools.resolve(first) or first.split(".")[0] in ("functions", *BUILTIN_NAMESPACES):
        return "tool", words[1:]
    head, *rest = _peel([first, *words[1:]], (*ROLES, *CHANNELS))
    if head in ROLES:
        return head, rest
    return "assistant", [head, *rest] if head in CHANNELS else rest


def _skip_repeated_role(words: list[str]) -> tuple[str, list[str]]:
    peeled = _peel(words, ("assistant",)) if words else words
    return "assistant", peeled[1:] if peeled[:1] == ["assistant"] else words


def _peel(words: list[str], names: Iterable[str]) -> list[str]:
    """Separate a known name from what is glued to it: `commentary?` is `commentary`, `analysisWe` is two words."""
    first, *rest = words
    for name in names:
        if first.startswith(name):
            glued = first[len(name) :]
            return [name, *([glued] if glued.isalnum() else []), *rest]
    return words
