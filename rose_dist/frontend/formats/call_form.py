"""How families of models write tool calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from rose_dist.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class CallForm:
    opening: str
    """The tag before each call."""
    closing: str
    """The tag after it."""
    head: re.Pattern[str]
    """What stands between the opening tag and the arguments; its one group that matches is the name, in JSON if it has
    quotes."""
    tail: re.Pattern[str]
    """What may stand between the arguments and the closing tag."""
    written: tuple[str, str]
    """All of a turn before and after the arguments, where it has one call; `%s` is the name."""
    hidden: tuple[str, ...] = ()
    """Tags that say nothing."""


HERMES = CallForm(
    opening="<tool_call>",
    closing="</tool_call>",
    head=re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[{\[])'),
    tail=re.compile(r"\s*\}?\s*"),
    written=('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>"),
)
"""Hermes, Qwen 2.5 and 3, and others: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

_DEEPSEEK_HIDDEN = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_HEAD = re.compile(
    r"\s*(?:function<｜tool▁sep｜>\s*([^\s<]+)\s*```json\s*|([^\s<]+)\s*<｜tool▁sep｜>\s*)(?=[{\[])"
)
_DEEPSEEK_TAIL = re.compile(r"\s*(?:```)?\s*")

DEEPSEEK_V3 = CallForm(
    opening="<｜tool▁call▁begin｜>",
    closing="<｜tool▁call▁end｜>",
    head=_DEEPSEEK_HEAD,
    tail=_DEEPSEEK_TAIL,
    written=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    hidden=_DEEPSEEK_HIDDEN,
)
DEEPSEEK_V31 = CallForm(
    opening="<｜tool▁call▁begin｜>",
    closing="<｜tool▁call▁end｜>",
    head=_DEEPSEEK_HEAD,
    tail=_DEEPSEEK_TAIL,
    written=(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    hidden=_DEEPSEEK_HIDDEN,
)
"""Both DeepSeek forms are read as either; they differ in what a grammar makes the model write."""


def form_of(tokenizer: Tokenizer, template: str) -> CallForm:
    if DEEPSEEK_V3.opening not in tokenizer.added:
        return HERMES
    return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31


def name_of(head: re.Match[str]) -> str | None:
    """None where the name is not a JSON string after all."""
    name = next(group for group in head.groups() if group is not None)
    if not name.startswith('"'):
        return name
    try:
        return str(json.loads(name))
    except ValueError:
        return None
