"""Chat Completions: requests, answers and streamed chunks in OpenAI's shapes."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from rose_dist.frontend.errors import BadRequestError
from rose_dist.frontend.formats.base import Conversation, Message, Tool, ToolCall
from rose_dist.frontend.schema.common import Usage
from rose_dist.frontend.schema.sampling import MAX_TOP_LOGPROBS, Count, GenerationFields

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str = ""


class RequestToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall
    type: str = "function"


class RequestMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[RequestToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class FunctionTool(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class RequestTool(msgspec.Struct, frozen=True):
    function: FunctionTool
    type: str = "function"


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[RequestMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[RequestTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True

    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def logprob_count(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> Conversation:
        """The request as a chat format takes it.

        Raises:
            BadRequestError: a message or tool is not of an allowed form; the message names the place.
        """
        if self.response_format is not None and self.response_format.type != "text":
            raise BadRequestError(
                f"response_format: `{self.response_format.type}` is not supported yet; allowed: `text`",
                param="response_format",
            )
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or [])]
        return Conversation(
            messages=[_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)],
            tools=tools if self._offers_tools() else [],
            reasoning_effort=self.reasoning_effort,
            template_arguments=self.chat_template_kwargs or {},
        )

    def _offers_tools(self) -> bool:
        if self.tool_choice in (None, "auto"):
            return True
        if self.tool_choice == "none":
            return False
        raise BadRequestError(
            f"tool_choice: {msgspec.json.encode(self.tool_choice).decode()} is not supported yet; "
            "allowed: `auto` and `none`",
            param="tool_choice",
        )


def _message(message: RequestMessage, place: str) -> Message:
    if message.role not in _ROLES:
        raise BadRequestError(
            f"{place}.role: `{message.role}` is not a role; allowed: {', '.join(_ROLES)}", param=f"{place}.role"
        )
    calls = [ToolCall(id=c.id, name=c.function.name, arguments=c.function.arguments) for c in message.tool_calls or []]
    content = _text(message.content, f"{place}.content")
    if message.content is None and message.role != "assistant":
        raise BadRequestError(f"{place}.content: a {message.role} message needs content", param=f"{place}.content")
    if message.role == "tool" and not message.tool_call_id:
        raise BadRequestError(
            f"{place}.tool_call_id: a tool message needs the id of the call that it answers",
            param=f"{place}.tool_call_id",
        )
    return Message(
        role=message.role,  # type: ignore[arg-type]
        content=content,
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=calls,
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _text(content: str | list[ContentPart] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal") or text is None:
            raise BadRequestError(
                f'{place}[{i}]: a part of type `{part.type}` is not supported; allowed: {{"type": "text", "text": …}}',
                param=f"{place}[{i}]",
            )
        texts.append(text)
    return "".join(texts)


def _tool(tool: RequestTool, place: str) -> Tool:
    if tool.type != "function":
        raise BadRequestError(
            f"{place}.type: `{tool.type}` is not supported; allowed: `function`", param=f"{place}.type"
        )
    if not _TOOL_NAME.fullmatch(tool.function.name):
        raise BadRequestError(
            f"{place}.function.name: `{tool.function.name}` is not allowed: 1 to 64 letters, digits, `_` or `-`",
            param=f"{place}.function.name",
        )
    return Tool(
        name=tool.function.name, description=tool.function.description or "", parameters=tool.function.parameters
    )


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class ResponseFunction(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | UnsetType = UNSET


class ResponseToolCall(msgspec.Struct):
    id: str
    function: ResponseFunction
    type: str = "function"


class ResponseMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET


class Choice(msgspec.Struct, kw_only=True):
    index: int
    message: ResponseMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage


class ChunkToolCall(msgspec.Struct, omit_defaults=True):
    index: int
    function: ResponseFunction
    id: str | None = None
    type: str | None = None


class ChunkDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ChunkToolCall] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChunkDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
