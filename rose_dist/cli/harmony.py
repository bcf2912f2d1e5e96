"""`rose harmony render | parse`: what the model reads, and what becomes of what it writes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import date, datetime
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from rose_dist.frontend.formats.base import Conversation, Delta, FormatError, Message, TextDelta, Tool, ToolCall
from rose_dist.frontend.formats.harmony import HarmonyFormat
from rose_dist.frontend.formats.harmony_vocabulary import CALL, RETURN
from rose_dist.vocabulary import VocabularyError

_checkpoint = click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of a gpt-oss checkpoint, whose tokenizer.json can give the vocabulary.",
)


@click.group()
def harmony() -> None:
    """Render conversations to Harmony tokens and parse sampled ones."""


@harmony.command()
@_checkpoint
@click.option(
    "--date", "today", type=click.DateTime(["%Y-%m-%d"]), help="Date in the system message; today if omitted."
)
@click.option("--text", "text_only", is_flag=True, help="Print the prompt's text instead of JSON.")
def render(checkpoint: Path | None, today: datetime | None, text_only: bool) -> None:
    """Render a conversation, JSON on standard input, to the prompt's ids and text.

    The JSON is the body of a Chat Completions request; its messages, tools, reasoning_effort and chat_template_kwargs
    are read.
    """
    try:
        conversation = _read_conversation(sys.stdin.buffer.read())
        day = today.date() if today else date.today()
        harmony_format = _load(checkpoint, day)
        ids = harmony_format.render(conversation)
    except (msgspec.MsgspecError, FormatError) as error:
        raise click.ClickException(f"can't render the conversation: {error}") from error
    text = harmony_format.vocabulary.decode(ids)
    click.echo(text if text_only else msgspec.json.encode({"ids": ids, "text": text}))


@harmony.command()
@_checkpoint
@click.option(
    "--tools", default="", help="Names of the offered tools, separated by commas; they decide what is a call."
)
@click.option("--builtin-tools", default="", help="Those of browser and python that are offered, separated by commas.")
def parse(checkpoint: Path | None, tools: str, builtin_tools: str) -> None:
    """Parse what follows the generation prompt, on standard input: text with control tokens, or a JSON list of ids.

    Prints the parsed messages and the API's message that they become.
    """
    harmony_format = _load(checkpoint, date.today())
    ids = _read_ids(sys.stdin.read(), harmony_format)
    conversation = Conversation(
        messages=[],
        tools=[Tool(name=name) for name in _names(tools)],
        template_arguments={"builtin_tools": _names(builtin_tools)},
    )
    try:
        parser = harmony_format.parser(conversation)
    except FormatError as error:
        raise click.ClickException(str(error)) from error
    deltas = [delta for token_id in ids for delta in parser.feed(token_id)]
    deltas += parser.finish()
    message = _api_message(deltas)
    result = {"messages": parser.messages, "message": message, "finish_reason": _finish_reason(message, ids)}
    click.echo(msgspec.json.format(msgspec.json.encode(result)).decode())


def _load(checkpoint: Path | None, today: date) -> HarmonyFormat:
    try:
        return HarmonyFormat(checkpoint, today=lambda: today)
    except VocabularyError as error:
        raise click.ClickException(str(error)) from error


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: str = ""


class _Functional(msgspec.Struct):
    """A tool, or a call of one."""

    function: _Function
    id: str = ""


class _TextPart(msgspec.Struct):
    text: str


class _RequestMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Functional] | None = None
    tool_call_id: str = ""
    name: str = ""

    def message(self) -> Message:
        content = self.content or ""
        return Message(
            role=self.role,
            content=content if isinstance(content, str) else "".join(part.text for part in content),
            reasoning=self.reasoning or self.reasoning_content or "",
            tool_calls=[
                ToolCall(id=c.id, name=c.function.name, arguments=c.function.arguments) for c in self.tool_calls or []
            ],
            tool_call_id=self.tool_call_id,
            name=self.name,
        )


class _Request(msgspec.Struct):
    """The part of a Chat Completions request that the prompt depends on."""

    messages: list[_RequestMessage]
    tools: list[_Functional] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def _read_conversation(data: bytes) -> Conversation:
    request = msgspec.json.decode(data, type=_Request)
    functions = [tool.function for tool in request.tools or []]
    return Conversation(
        messages=[message.message() for message in request.messages],
        tools=[Tool(name=f.name, description=f.description or "", parameters=f.parameters) for f in functions],
        reasoning_effort=request.reasoning_effort,
        template_arguments=request.chat_template_kwargs or {},
    )


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
