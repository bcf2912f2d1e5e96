"""Parsing helpers of the Harmony tests: a reply as text, and what a client would have got of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rose_dist.frontend.formats.base import Delta, TextDelta
from rose_dist.frontend.formats.harmony_header import OfferedTools
from rose_dist.frontend.formats.harmony_parser import HarmonyMessage, HarmonyParser
from rose_dist.frontend.formats.harmony_vocabulary import HarmonyVocabulary

TOOLS = OfferedTools(frozenset({"get_weather", "f", "shell", "web-browsing", "grep", "create_event"}))
BUILTIN_TOOLS = OfferedTools(namespaces=frozenset({"browser", "python"}))


@dataclass
class Reply:
    """Deltas joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    messages: list[HarmonyMessage] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[Delta], messages: list[HarmonyMessage]) -> Reply:
        reply = cls(messages=messages)
        for delta in deltas:
            if isinstance(delta, TextDelta):
                assert delta.text, "an empty delta is never sent"
                setattr(reply, delta.section, getattr(reply, delta.section) + delta.text)
            elif delta.name is not None:
                assert delta.index == len(reply.calls), "calls are numbered in order"
                reply.calls.append((delta.name, delta.arguments))
            else:
                name, arguments = reply.calls[delta.index]
                assert delta.index == len(reply.calls) - 1, "arguments belong to the call that was opened last"
                reply.calls[delta.index] = (name, arguments + delta.arguments)
        return reply


def parse_ids(ids: Iterable[int], vocabulary: HarmonyVocabulary, tools: OfferedTools = TOOLS) -> Reply:
    parser = HarmonyParser(vocabulary, tools)
    deltas: list[Delta] = []
    for token_id in ids:
        deltas += parser.feed(token_id)
    deltas += parser.finish()
    return Reply.of(deltas, parser.messages)


def parse(text: str, vocabulary: HarmonyVocabulary, tools: OfferedTools = TOOLS) -> Reply:
    return parse_ids(vocabulary.encode_with_control(text), vocabulary, tools)
