"""The Responses API: requests, and how their input items become a conversation."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rose_dist.frontend.errors import BadRequestError
from rose_dist.frontend.formats.base import Conversation, Message, ResponseFormat, ToolCall
from rose_dist.frontend.schema.sampling import MAX_TOP_LOGPROBS, Count, GenerationFields, refuse_unsupported
from rose_dist.frontend.schema.tools import FunctionTool, checked_tool, required_tools

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """Any input item; `type` says which fields count."""

    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] | None = None


class ResponsesTool(FunctionTool, frozen=True, kw_only=True):
    name: str = ""
    type: str


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "text"
    name: str = "response"
    description: str | None = None
    schema: dict[str, Any] | None = None


class TextSettings(msgspec.Struct, frozen=True):
    format: TextFormat = TextFormat()


class ResponsesRequest(GenerationFields, frozen=True, kw_only=True):
    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continued_conversation: str | dict[str, Any] | None = msgspec.field(default=None, name="conversation")
    prompt: dict[str, Any] | None = None

    @property
    def choices(self) -> int:
        return 1

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def limit_field(self) -> str:
        return "max_output_tokens"

    def logprob_count(self) -> int | None:
        wanted = self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    def conversation(self, history: list[Message]) -> Conversation:
        """The request after `history`, the messages of the response that it continues.

        Raises:
            BadRequestError: an item, a tool or the text format is not of an allowed form, or an unsupported field is
                set.
        """
        refuse_unsupported(
            {
                "conversation": (self.continued_conversation, "give the response to continue as previous_response_id"),
                "prompt": (self.prompt, "give its text as instructions and input"),
            }
        )
        tools = [checked_tool(tool.type, tool, f"tools[{i}]") for i, tool in enumerate(self.tools or [])]
        named = None
        match self.tool_choice:
            case {"type": "function", "name": str(name)}:
                named = name
        required = required_tools(self.tool_choice, named, [tool.name for tool in tools])
        instructions = [Message(role="developer", content=self.instructions)] if self.instructions else []
        return Conversation(
            messages=[*instructions, *history, *self.input_messages()],
            tools=[] if self.tool_choice == "none" else tools,
            required_tools=required,
            response_format=None if required else self._response_format(),
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            template_arguments=self.chat_template_kwargs or {},
        )

    def input_messages(self) -> list[Message]:
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        turns = _Turns()
        for index, item in enumerate(self.input):
            turns.add(item, f"input[{index}]")
        return turns.finish()

    def _response_format(self) -> ResponseFormat | None:
        asked = self.text.format if self.text is not None else TextFormat()
        if asked.type == "text":
            return None
        if asked.type == "json_object":
            return ResponseFormat(kind="json_object")
        if asked.type == "json_schema" and asked.schema is not None:
            return ResponseFormat(
                kind="json_schema", schema=asked.schema, name=asked.name, description=asked.description or ""
            )
        raise BadRequestError(
            f"text.format: type `{asked.type}` does not fit; allowed: `text`, `json_object`, and `json_schema` with a "
            "field schema",
            param="text.format",
        )


class _Turns:
    """Joins an assistant's reasoning, text and calls, which are items of their own, into one message a turn."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._reasoning = ""
        self._content: str | None = None
        self._calls: list[ToolCall] = []

    def add(self, item: Item, place: str) -> None:
        match item.type:
            case "reasoning":
                if self._content is not None or self._calls:
                    self._end_turn()
                self._reasoning += _text(item.content, place)
            case "message" if item.role == "assistant":
                if self._content is not None or self._calls:
                    self._end_turn()
                self._content = _text(item.content, f"{place}.content")
            case "message" if item.role in _ROLES:
                self._end_turn()
                text = _text(item.content, f"{place}.content")
                self._messages.append(Message(role=item.role, content=text))  # type: ignore[arg-type]
            case "message":
                raise BadRequestError(
                    f"{place}.role: `{item.role}` is not a role; allowed: {', '.join(_ROLES)}", param=f"{place}.role"
                )
            case "function_call":
                self._calls.append(ToolCall(id=item.call_id, name=item.name, arguments=item.arguments))
            case "function_call_output":
                self._end_turn()
                output = _text(item.output, f"{place}.output")
                self._messages.append(Message(role="tool", content=output, tool_call_id=item.call_id))
            case _:
                raise BadRequestError(
                    f"{place}.type: `{item.type}` is not supported; allowed: message, reasoning, function_call, "
                    "function_call_output",
                    param=f"{place}.type",
                )

    def finish(self) -> list[Message]:
        self._end_turn()
        return self._messages

    def _end_turn(self) -> None:
        if self._content is not None or self._calls or self._reasoning:
            self._messages.append(
                Message(
                    role="assistant",
                    content=self._content or "",
                    reasoning=self._reasoning,
                    tool_calls=self._calls,
                )
            )
        self._reasoning, self._content, self._calls = "", None, []


def _text(content: str | list[Part] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXT_PARTS or text is None:
            raise BadRequestError(
                f"{place}[{index}]: a part of type `{part.type}` is not supported; allowed: input_text, output_text",
                param=f"{place}[{index}]",
            )
        texts.append(text)
    return "".join(texts)
