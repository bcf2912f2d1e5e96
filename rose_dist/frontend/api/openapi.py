"""The OpenAPI description of the API, made from the structs that requests are decoded into."""

from __future__ import annotations

from typing import Any

import msgspec

import rose_dist
from rose_dist.frontend.errors import ErrorResponse
from rose_dist.frontend.schema.chat import ChatChunk, ChatCompletion, ChatRequest
from rose_dist.frontend.schema.common import Model, ModelList
from rose_dist.frontend.schema.completions import Completion, CompletionRequest
from rose_dist.frontend.schema.responses import ResponsesRequest

_JSON = "application/json"
_EVENTS = "text/event-stream"
_REFERENCE = "#/components/schemas/{name}"
_REQUESTS = (ChatRequest, CompletionRequest, ResponsesRequest)
_STRUCTS = (*_REQUESTS, ChatCompletion, ChatChunk, Completion, Model, ModelList, ErrorResponse)

_TEXT_PARTS = ["text", "input_text", "output_text", "refusal"]
_FORMATS = ["text", "json_object", "json_schema"]
_ALLOWED = {
    ("RequestMessage", "role"): ["system", "developer", "user", "assistant", "tool"],
    ("ContentPart", "type"): _TEXT_PARTS,
    ("RequestTool", "type"): ["function"],
    ("RequestResponseFormat", "type"): _FORMATS,
    ("Item", "type"): ["message", "reasoning", "function_call", "function_call_output"],
    ("Item", "role"): ["system", "developer", "user", "assistant"],
    ("Part", "type"): [*_TEXT_PARTS, "reasoning_text", "summary_text"],
    ("ResponsesTool", "type"): ["function"],
    ("TextFormat", "type"): _FORMATS,
}
"""Words that a field takes which the structs leave to later checks, as those have the better error messages."""

Json = dict[str, Any]
_RESPONSE: Json = {"type": "object", "description": "A response object in OpenAI's shape."}
_RESPONSE_EVENT: Json = {"type": "object", "description": "An event of a response in OpenAI's shape."}


def description(model_names: list[str]) -> Json:
    """OpenAPI 3.1.

    Args:
        model_names: the names that requests may use for the model.
    """
    _, components = msgspec.json.schema_components(_STRUCTS, ref_template=_REFERENCE)
    models = {(request.__name__, "model"): model_names for request in _REQUESTS}
    for (struct, field), words in (_ALLOWED | models).items():
        components[struct]["properties"][field]["enum"] = words
    response_id = _path_parameter("response_id")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rose_dist",
            "version": rose_dist.__version__,
            "description": "OpenAI's API. Where the server was started with API keys, paths below /v1 need one.",
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": {"post": _create(ChatRequest, _of(ChatCompletion), _of(ChatChunk))},
            "/v1/completions": {"post": _create(CompletionRequest, _of(Completion), _of(Completion))},
            "/v1/responses": {"post": _create(ResponsesRequest, _RESPONSE, _RESPONSE_EVENT)},
            "/v1/responses/{response_id}": {
                "parameters": [response_id],
                "get": _operation("A stored response.", {_JSON: _RESPONSE}),
                "delete": _operation("Forget a stored response.", {_JSON: {"type": "object"}}),
            },
            "/v1/responses/{response_id}/cancel": {
                "parameters": [response_id],
                "post": _operation("Stop a response that was created with background=true.", {_JSON: _RESPONSE}),
            },
            "/v1/models": {"get": _operation("The model, under each of its names.", {_JSON: _of(ModelList)})},
            "/v1/models/{name}": {
                "parameters": [_path_parameter("name")],
                "get": _operation("The model, if it has this name.", {_JSON: _of(Model)}),
            },
            "/v1/experts/rebalance": {
                "post": _operation(
                    "Rearrange the experts over the ranks by the load seen.",
                    {_JSON: {}},
                    status="202",
                )
            },
            "/health": {
                "get": _operation("200 once the model is loaded, 503 before and while the server drains.", {_JSON: {}})
            },
            "/version": {"get": _operation("The server's version.", {_JSON: {}})},
            "/metrics": {"get": _operation("Metrics in Prometheus's text form.", {"text/plain": {}})},
        },
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _create(request: type[msgspec.Struct], answer: Json, data: Json) -> Json:
    json_data = {"contentMediaType": _JSON, "contentSchema": {"anyOf": [data, _of(ErrorResponse)]}}
    event = {
        "type": "object",
        "properties": {
            "event": {"type": "string"},
            "data": {"type": "string", "anyOf": [{"const": "[DONE]"}, json_data]},
        },
    }
    operation = _operation("Generate; as server-sent events where `stream` is true.", {_JSON: answer, _EVENTS: event})
    return operation | {"requestBody": {"required": True, "content": {_JSON: {"schema": _of(request)}}}}


def _operation(summary: str, answers: dict[str, Json], status: str = "200") -> Json:
    content = {media_type: {"schema": schema} for media_type, schema in answers.items()}
    return {
        "summary": summary,
        "responses": {
            status: {"description": "The answer.", "content": content},
            "default": {
                "description": "What was wrong, what is allowed, and how to mend it.",
                "content": {_JSON: {"schema": _of(ErrorResponse)}},
            },
        },
    }


def _of(struct: type[msgspec.Struct]) -> Json:
    return {"$ref": _REFERENCE.format(name=struct.__name__)}


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
