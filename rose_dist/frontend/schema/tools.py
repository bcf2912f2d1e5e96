"""Checks on tools that Chat Completions and Responses share."""

from __future__ import annotations

from typing import Any

import msgspec

from rose_dist.frontend.errors import BadRequestError
from rose_dist.frontend.formats.base import TOOL_NAME, Tool


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def checked_tool(kind: str, function: FunctionTool | None, place: str, inside: str = "") -> Tool:
    """
    Args:
        place: of the tool, for messages.
        inside: from there to the function, as `.function`.

    Raises:
        BadRequestError: not a function, or its name is not allowed.
    """
    if kind != "function":
        raise BadRequestError(f"{place}.type: `{kind}` is not supported; allowed: `function`", param=f"{place}.type")
    if function is None:
        raise BadRequestError(f"{place}: a tool of type `function` needs a field function", param=place)
    if not TOOL_NAME.fullmatch(function.name):
        raise BadRequestError(
            f"{place}{inside}.name: `{function.name}` is not allowed: 1 to 64 letters, digits, `_` or `-`",
            param=f"{place}{inside}.name",
        )
    return Tool(
        name=function.name,
        description=function.description or "",
        parameters=function.parameters,
        strict=bool(function.strict),
    )


def required_tools(choice: str | dict[str, Any] | None, named: str | None, offered: list[str]) -> list[str]:
    """Names of which the answer must call one; empty where it need not.

    Args:
        choice: the request's `tool_choice`.
        named: the function's name, where `choice` has the endpoint's form of naming one.

    Raises:
        BadRequestError: `choice` is of no known form, or asks for a call of a tool that is not offered.
    """
    if choice in (None, "auto", "none"):
        return []
    if choice == "required" and offered:
        return offered
    if named is not None and named in offered:
        return [named]
    raise BadRequestError(
        f"tool_choice: {msgspec.json.encode(choice).decode()} does not fit; allowed: `none`, `auto`, `required`, and "
        f"an object that names a function; functions on offer: {', '.join(offered) or 'none'}",
        param="tool_choice",
    )
