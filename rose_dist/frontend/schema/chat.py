"""Chat Completions: requests, answers and streamed chunks in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from rose_dist.frontend.errors import BadRequestError
from rose_dist.frontend.formats.base import Conversation, Message, ResponseFormat, ToolCall
from rose_dist.frontend.schema.common import Usage
from rose_dist.frontend.schema.sampling import MAX_TOP_LOGPROBS, Count, GenerationFields, refuse_unsupported
from rose_dist.frontend.schema.tools import FunctionTool, checked_tool, required_tools

_ROLES = ("system", "developer", "user", "assistant", "tool")


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


class RequestTool(msgspec.Struct, frozen=True):
    function: FunctionTool | None = None
    type: str = "function"


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    name: str = "response"
    description: str | None = None
    schema: dict[str, Any] = {}


class RequestResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's field for what `response_format` can't say."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[RequestMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[RequestTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: RequestResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    functions: list[Any] | None = None
    audio: dict[str, Any] | None = None
    modalities: list[str] | None = None

    @property
    def limit_field(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens"

    def logprob_count(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> Conversation:
        """The request as a chat format takes it.

        Raises:
            BadRequestError: a message or tool is not of an allowed form, or an unsupported field is set; the message
                names the place.
        """
        refuse_unsupported(
            {
                "functions": (self.functions, "give them as tools"),
                "audio": (self.audio, "answers are text"),
                "modalities": (self.modalities not in (None, [], ["text"]), 'allowed: ["text"]'),
            }
        )
        tools = [
            checked_tool(tool.type, tool.function, f"tools[{i}]", ".function")
            for i, tool in enumerate(self.tools or [])
        ]
        required = self._required_tools([tool.name for tool in tools])
        return Conversation(
            messages=[_message(message, f"messages[{i}]") for i, message in enumerate(self.messages)],
            tools=[] if self.tool_choice == "none" else tools,
            required_tools=required,
            response_format=None if required else self._response_format(),
            reasoning_effort=self.reasoning_effort,
            template_arguments=self.chat_template_kwargs or {},
        )

    def _required_tools(self, offered: list[str]) -> list[str]:
        match self.tool_choice:
            case {"type": "function", "function": {"name": str(name)}}:
                return required_tools(self.tool_choice, name, offered)
        return required_tools(self.tool_choice, None, offered)

    def _response_format(self) -> ResponseFormat | None:
        if (other := self.structured_outputs) is not None:
            if other.json is not None:
                return ResponseFormat(kind="json_schema", schema=other.json)
            if other.regex is not None:
                return ResponseFormat(kind="regex", text=other.regex)
            if other.grammar is not None:
                return ResponseFormat(kind="lark", text=other.grammar)
        asked = self.response_format
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return ResponseFormat(kind="json_object")
        if asked.type == "json_schema" and (named := asked.json_schema) is not None:
            return ResponseFormat(
                kind="json_schema", schema=named.schema, name=named.name, description=named.description or ""
            )
        raise BadRequestError(
            f"response_format: type `{asked.type}` does not fit; allowed: `text`, `json_object`, and `json_schema` "
            "with a field json_schema",
            param="response_format",
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
