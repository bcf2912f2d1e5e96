"""Grammars for llguidance: the text that an answer or a call's arguments must match, and the frame around it.

A grammar is a main rule in llguidance's Lark dialect, where `<[200002]>` is a token by id and `@answer` a named part,
and those parts. The main rule covers the whole output, stop id included, so that the engine needs nothing but the
grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from rose_dist.frontend.formats.base import FormatError, ResponseFormat, Tool

_OPTIONS = '%llguidance {"no_forcing": true}'
"""The model chooses how forced text is split into tokens; llguidance's own choice would need the tokenizer."""

Part = dict[str, Any]

_SCHEMA_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}", "coerce_one_of": True}
"""White space is bounded, as a model that may write it for ever sometimes does. `oneOf` is enforced as `anyOf`:
llguidance can't tell that variants exclude each other where they are references, as in every discriminated union."""


def response_part(name: str, response_format: ResponseFormat) -> Part:
    """The part that an answer's text must match.

    Raises:
        FormatError: it is invalid, or uses what can't be enforced.
    """
    match response_format.kind:
        case "json_object":
            part = _schema_part(name, {"type": "object"})
        case "json_schema":
            part = _schema_part(name, response_format.schema)
        case "regex":
            grammar = json.loads(LLMatcher.grammar_from_regex(response_format.text))
            part = {"name": name, "lark_grammar": grammar["grammars"][0]["lark_grammar"]}
        case "lark":
            part = {"name": name, "lark_grammar": response_format.text}
    return _checked(part, f"response_format {response_format.kind}")


def arguments_part(name: str, tool: Tool) -> Part:
    """The part that the arguments of a call of `tool` must match; raises as `response_part` does."""
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    return _checked(_schema_part(name, tool.parameters or nothing), f"parameters of tool {tool.name}")


def token(token_id: int) -> str:
    return f"<[{token_id}]>"


def tokens(token_ids: Iterable[int]) -> str:
    return " ".join(map(token, token_ids))


def compose(main: str, parts: Iterable[Part]) -> str:
    """`Generate.grammar`: the rule `start` of `main` over the named parts."""
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": f"{_OPTIONS}\n{main}"}, *parts]})


def _schema_part(name: str, schema: dict[str, Any]) -> Part:
    return {"name": name, "json_schema": {**schema, "x-guidance": _SCHEMA_OPTIONS}}


def _checked(part: Part, what: str) -> Part:
    # Compiled, not given to `LLMatcher.validate_grammar`, which panics on some schemas that are not ASCII.
    matcher = LLMatcher(_byte_tokenizer(), json.dumps({"grammars": [part]}), log_level=0)
    if matcher.is_error():
        raise FormatError(f"{what} can't be enforced: {matcher.get_error().splitlines()[0]}")
    return part


@lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    """A vocabulary of single bytes: enough to see whether a grammar is valid."""
    return LLTokenizer("byte")
