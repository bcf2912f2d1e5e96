"""What a Harmony turn must be where a call is required, the answer must match a format or a tool is strict.

Text of reasoning and preambles stays free; headers are canonical, so that a turn can't miss its answer or its call by
a garbled header, and what a client sends back renders to the ids that were sampled.
"""

from __future__ import annotations

from rose_dist.frontend.formats.base import Conversation, FormatError, ResponseFormat, Tool
from rose_dist.frontend.formats.harmony_header import offered_builtins
from rose_dist.frontend.formats.harmony_prompt import BROWSER_TOOLS
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
    parts: list[Part] = []
    if conversation.required_tools:
        endings = [_call(tool, vocabulary, parts) for tool in _required(conversation)]
    elif conversation.response_format is not None or any(tool.strict for tool in conversation.tools):
        endings = [_answer(conversation.response_format, vocabulary, parts)]
        endings += [_call(tool, vocabulary, parts if tool.strict else None) for tool in conversation.tools]
        endings += [_builtin_call(recipient, vocabulary) for recipient in _builtin_recipients(conversation)]
    else:
        return None
    rules = [f"start: message* ({' | '.join(endings)})", _message_rule(vocabulary), _TEXT]
    return compose("\n".join(rules), parts)


def _answer(response_format: ResponseFormat | None, vocabulary: HarmonyVocabulary, parts: list[Part]) -> str:
    """The ending with which the turn answers, and the part that its text must match."""
    text = "TEXT"
    if response_format is not None:
        parts.append(response_part("answer", response_format))
        text = "@answer"
    return f"{tokens([CHANNEL, *vocabulary.encode('final'), MESSAGE])} {text} {token(RETURN)}"


def _call(tool: Tool, vocabulary: HarmonyVocabulary, parts: list[Part] | None) -> str:
    """The ending with which the turn calls `tool`, and the part for its arguments; without `parts` they are free."""
    arguments = "TEXT"
    if parts is not None:
        name = f"arguments_{len(parts)}"
        parts.append(arguments_part(name, tool))
        arguments = f"@{name}"
    recipient = vocabulary.encode(f"commentary to=functions.{tool.name} ")
    header = tokens([CHANNEL, *recipient, CONSTRAIN, *vocabulary.encode("json"), MESSAGE])
    return f"{header} {arguments} {token(CALL)}"


def _builtin_recipients(conversation: Conversation) -> list[str]:
    offered = offered_builtins(conversation)
    searching = [f"browser.{tool.name}" for tool in BROWSER_TOOLS] if "browser" in offered else []
    return [*searching, *(["python"] if "python" in offered else [])]


def _builtin_call(recipient: str, vocabulary: HarmonyVocabulary) -> str:
    header = tokens([CHANNEL, *vocabulary.encode(f"analysis to={recipient}")])
    return f"{header} ({tokens(vocabulary.encode(' code'))})? {token(MESSAGE)} TEXT {token(CALL)}"


def _message_rule(vocabulary: HarmonyVocabulary) -> str:
    analysis, commentary = (tokens(vocabulary.encode(channel)) for channel in ("analysis", "commentary"))
    following = tokens([END, START, *vocabulary.encode("assistant")])
    return f"message: {token(CHANNEL)} ({analysis} | {commentary}) {token(MESSAGE)} TEXT {following}"


def _required(conversation: Conversation) -> list[Tool]:
    offered = {tool.name: tool for tool in conversation.tools}
    for name in conversation.required_tools:
        if name not in offered:
            raise FormatError(f"tool_choice names {name!r}, which is not among the tools {list(offered)}")
    return [offered[name] for name in conversation.required_tools]
