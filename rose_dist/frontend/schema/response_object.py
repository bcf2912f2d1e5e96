"""The Responses API: the response, its output items, and the events of a stream, in OpenAI's shapes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rose_dist.frontend.schema.chat import TopLogprob
from rose_dist.frontend.schema.common import Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class TextLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, kw_only=True):
    type: str = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TextLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    type: str = "reasoning_text"
    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    status: ItemStatus = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, kw_only=True):
    id: str
    type: str = "reasoning"
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class FunctionCallItem(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function_call"
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        return cls(
            usage.prompt_tokens,
            InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
            usage.completion_tokens,
            OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
            usage.total_tokens,
        )


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Any = None
    store: bool = True
    temperature: float = 1.0
    text: Any = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[Any] = []
    top_p: float = 1.0
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class ItemEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event about an output item; fields that its type lacks are left out."""

    type: str
    sequence_number: int
    output_index: int
    item_id: str | None = None
    content_index: int | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    name: str | None = None
    logprobs: list[TextLogprob] | None = None


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event about the whole response."""

    type: str
    sequence_number: int
    response: ResponseObject
