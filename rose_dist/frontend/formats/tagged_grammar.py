"""What a turn in the tagged form must be where a call is required or the answer must match a format."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rose_dist.frontend.formats.base import Conversation, FormatError
from rose_dist.frontend.formats.call_form import CallForm
from rose_dist.frontend.formats.tagged import ReasoningTags
from rose_dist.frontend.grammar import Part, arguments_part, compose, response_part, token

_RULES = ["TEXT: /(.|\\n)*/", "GAP: /\\n{0,2}/"]


def tagged_grammar(
    conversation: Conversation,
    tags: ReasoningTags,
    *,
    form: CallForm,
    terminals: Callable[[str], str],
    stop_ids: Iterable[int],
    in_reasoning: bool,
) -> str | None:
    """`ChatFormat.grammar`: reasoning is free, then comes the required call or the answer.

    Args:
        terminals: writes a text as the grammar's terminals, with the tags in it as tokens where they are tokens.
        in_reasoning: the prompt has opened the reasoning.
    """
    parts: list[Part] = []
    if conversation.required_tools:
        body = _calls(conversation, form, terminals, parts)
    elif conversation.response_format is not None:
        parts.append(response_part("answer", conversation.response_format))
        body = "@answer"
    else:
        return None
    end = " | ".join(map(token, sorted(stop_ids)))
    start = f"start: {_reasoning(tags, in_reasoning)}({body}) {f'({end})' if end else ''}"
    return compose("\n".join([start, *_RULES]), parts)


def _reasoning(tags: ReasoningTags, in_reasoning: bool) -> str:
    if tags.opening is None or tags.closing is None:
        return ""
    if in_reasoning:
        return f"TEXT {token(tags.closing)} GAP "
    return f"({token(tags.opening)} TEXT {token(tags.closing)} GAP)? "


def _calls(conversation: Conversation, form: CallForm, terminals: Callable[[str], str], parts: list[Part]) -> str:
    """One call of a required tool; `parts` gets the rules of the arguments."""
    offered = {tool.name: tool for tool in conversation.tools}
    before, after = form.written
    calls = []
    for index, name in enumerate(conversation.required_tools):
        if name not in offered:
            raise FormatError(f"tool_choice names {name!r}, which is not among the tools {list(offered)}")
        parts.append(arguments_part(f"arguments_{index}", offered[name]))
        calls.append(f"{terminals(before % name)} @arguments_{index} {terminals(after)}")
    return " | ".join(calls)
