"""`rose harmony render | parse`: what gpt-oss reads, and what becomes of what it writes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import date, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from rose_dist.errors import RoseError
from rose_dist.frontend.errors import BadRequestError
from rose_dist.frontend.formats.base import Conversation, Delta, TextDelta, Tool
from rose_dist.frontend.formats.harmony import HarmonyFormat
from rose_dist.frontend.formats.harmony_vocabulary import CALL, RETURN
from rose_dist.frontend.schema.chat import ChatRequest

_checkpoint = click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of a gpt-oss checkpoint, whose tokenizer.json can give the vocabulary.",
)


@click.group("harmony")
def command() -> None:
    """Render conversations to Harmony tokens and parse sampled ones."""


@command.command("render")
@_checkpoint
@click.option("--date", "today", type=click.DateTime(["%Y-%m-%d"]), help="Date in the system message; default: today.")
@click.option("--text", "text_only", is_flag=True, help="Print the prompt's text instead of JSON.")
def render(checkpoint: Path | None, today: datetime | None, text_only: bool) -> None:
    """Render a conversation, JSON on standard input, to the prompt's ids and text.

    The JSON is the body of a Chat Completions request; `model` may be missing.
    """
    conversation = _read_conversation(sys.stdin.buffer.read())
    day = today.date() if today else date.today()
    harmony_format = HarmonyFormat(checkpoint, today=lambda: day)
    ids = harmony_format.render(conversation)
    text = harmony_format.vocabulary.decode(ids)
    click.echo(text if text_only else msgspec.json.encode({"ids": ids, "text": text}))


@command.command("parse")
@_checkpoint
@click.option("--tools", default="", help="Names of the offered tools, separated by commas; others are not called.")
@click.option("--builtin-tools", default="", help="Those of browser and python that are offered, separated by commas.")
def parse(checkpoint: Path | None, tools: str, builtin_tools: str) -> None:
    """Parse what follows the generation prompt, on standard input: text with control tokens, or a JSON list of ids.

    Prints JSON: the parsed `messages`, and the API's `message` and `finish_reason` that they become.
    """
    harmony_format = HarmonyFormat(checkpoint)
    conversation = Conversation(
        messages=[],
        tools=[Tool(name=name) for name in _names(tools)],
        template_arguments={"builtin_tools": _names(builtin_tools)},
    )
    parser = harmony_format.parser(conversation)
    ids = _read_ids(sys.stdin.read(), harmony_format)
    deltas = [delta for token_id in ids for delta in parser.feed(token_id)]
    deltas += parser.finish()
    message = _api_message(deltas)
    result = {"messages": parser.messages, "message": message, "finish_reason": _finish_reason(message, ids)}
    click.echo(msgspec.json.format(msgspec.json.encode(result)))


def _read_conversation(data: bytes) -> Conversation:
    try:
        request = msgspec.convert({"model": "", **msgspec.json.decode(data, type=dict[str, Any])}, ChatRequest)
        return request.conversation()
    except (msgspec.MsgspecError, BadRequestError) as error:
        raise RoseError(f"standard input is not a Chat Completions request: {error}") from error


def _read_ids(text: str, harmony_format: HarmonyFormat) -> list[int]:
    if text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text, type=list[int])
        except msgspec.DecodeError:
            pass  # A reply may begin with a bracket too.
    return harmony_format.vocabulary.encode_with_control(text.removesuffix("\n"))


def _names(option: str) -> list[str]:
    return [name.strip() for name in option.split(",") if name.strip()]


def _api_message(deltas: Iterable[Delta]) -> dict[str, Any]:
    texts = {"reasoning": "", "content": ""}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, TextDelta):
            texts[delta.section] += delta.text
        elif delta.name is not None:
            function = {"name": delta.name, "arguments": delta.arguments}
            calls.append({"id": f"call_{delta.index}", "type": "function", "function": function})
        else:
            calls[delta.index]["function"]["arguments"] += delta.arguments
    message: dict[str, Any] = {"role": "assistant", "content": texts["content"]}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def _finish_reason(message: dict[str, Any], ids: list[int]) -> str:
    if not {RETURN, CALL} & set(ids):
        return "length"
    return "tool_calls" if "tool_calls" in message else "stop"
