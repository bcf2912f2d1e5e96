"""What a Harmony turn must be where a call is required or the answer must match a format.

Text of reasoning and preambles stays free; headers are canonical, so that a turn can't miss its answer or its call by
a garbled header, and what a client sends back renders to the ids that were sampled.
"""

from __future__ import annotations

from rose_dist.frontend.formats.base import Conversation, FormatError, Tool
from rose_dist.frontend.formats.harmony_vocabulary import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    MESSAGE,
    RETURN,
    START,
    HarmonyVocabulary,
)
from rose_dist.frontend.grammar import Part, arguments_part, compose, response_part, token, tokens

_TEXT = r"TEXT: /(.|\n)*/"


def harmony_grammar(conversation: Conversation, vocabulary: HarmonyVocabulary) -> str | None:
    """`ChatFormat.grammar` for Harmony."""
    rules, parts = ["", _message_rule(vocabulary), _TEXT], list[Part]()
    if conversation.required_tools:
        endings = []
        for index, tool in enumerate(_required(conversation)):
            parts.append(arguments_part(f"arguments_{index}", tool))
            endings.append(f"{_call_header(tool.name, vocabulary)} @arguments_{index} {token(CALL)}")
    elif conversation.response_format is not None:
        parts.append(response_part("answer", conversation.response_format))
        endings = [f"{tokens([CHANNEL, *vocabulary.encode('final'), MESSAGE])} @answer {token(RETURN)}"]
        endings += [f"{_call_header(tool.name, vocabulary)} TEXT {token(CALL)}" for tool in conversation.tools]
    else:
        return None
    rules[0] = f"start: message* ({' | '.join(endings)})"
    return compose("\n".join(rules), parts)


def _message_rule(vocabulary: HarmonyVocabulary) -> str:
    analysis, commentary = (tokens(vocabulary.encode(channel)) for channel in ("analysis", "commentary"))
    following = tokens([END, START, *vocabulary.encode("assistant")])
    return f"message: {token(CHANNEL)} ({analysis} | {commentary}) {token(MESSAGE)} TEXT {following}"


def _call_header(name: str, vocabulary: HarmonyVocabulary) -> str:
    recipient = vocabulary.encode(f"commentary to=functions.{name} ")
    return tokens([CHANNEL, *recipient, CONSTRAIN, *vocabulary.encode("json"), MESSAGE])


def _required(conversation: Conversation) -> list[Tool]:
    offered = {tool.name: tool for tool in conversation.tools}
    for name in conversation.required_tools:
        if name not in offered:
            raise FormatError(f"tool_choice names {name!r}, which is not among the tools {list(offered)}")
    return [offered[name] for name in conversation.required_tools]
