"""Bad requests: the status, the place, and a message that says what is allowed. The server goes on."""

from __future__ import annotations

import json
import re
import socket
from typing import Any, NamedTuple

import pytest

from tests.frontend.running import Frontend

CHAT = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "tiny-chat", "prompt": "Hi"}


class Case(NamedTuple):
    kind: str
    fields: dict[str, Any]
    status: int
    param: str
    message: str


CASES = [
    Case("chat", {"model": "other"}, 404, "model", "does not exist.*tiny-chat"),
    Case("chat", {"messages": []}, 400, "messages", "length >= 1"),
    Case("chat", {"messages": None}, 400, "messages", "array"),
    Case(
        "chat", {"messages": [{"role": "robot", "content": "Hi"}]}, 400, "messages[0].role", "allowed: system, .*tool"
    ),
    Case("chat", {"messages": [{"role": "user"}]}, 400, "messages[0].content", "needs content"),
    Case("chat", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id", "id of the call"),
    Case(
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content[0]",
        "image_url.*allowed",
    ),
    Case("chat", {"max_tokens": 0}, 400, "max_tokens", ">= 1"),
    Case("chat", {"max_tokens": -5}, 400, "max_tokens", ">= 1"),
    Case("chat", {"max_tokens": 1.5}, 400, "max_tokens", "int"),
    Case("chat", {"max_completion_tokens": 0}, 400, "max_completion_tokens", ">= 1"),
    Case("chat", {"temperature": -1}, 400, "temperature", ">= 0"),
    Case("chat", {"temperature": "hot"}, 400, "temperature", "float"),
    Case("chat", {"top_p": 0}, 400, "top_p", "> 0"),
    Case("chat", {"top_p": 1.1}, 400, "top_p", "<= 1"),
    Case("chat", {"top_k": -2}, 400, "top_k", ">= -1"),
    Case("chat", {"min_p": 2}, 400, "min_p", "<= 1"),
    Case("chat", {"presence_penalty": 3}, 400, "presence_penalty", "<= 2"),
    Case("chat", {"frequency_penalty": -3}, 400, "frequency_penalty", ">= -2"),
    Case("chat", {"repetition_penalty": 0}, 400, "repetition_penalty", "> 0"),
    Case("chat", {"n": 0}, 400, "n", ">= 1"),
    Case("chat", {"n": 129}, 400, "n", "<= 128"),
    Case("chat", {"seed": 2**64}, 400, "seed", "<="),
    Case("chat", {"logit_bias": {"x": 1}}, 400, "logit_bias", "int"),
    Case("chat", {"logit_bias": {"1": 101}}, 400, "logit_bias[...]", "<= 100"),
    Case("chat", {"logit_bias": {"999999": 1}}, 400, "logit_bias", "ids are 0 to"),
    Case("chat", {"stop": [""]}, 400, "stop", "1 to 256"),
    Case("chat", {"stop": ["x"] * 17}, 400, "stop", "at most 16"),
    Case("chat", {"top_logprobs": 2}, 400, "top_logprobs", "logprobs"),
    Case("chat", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "<= 20"),
    Case("chat", {"tool_choice": "required"}, 400, "tool_choice", "auto.*on offer: none"),
    Case("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "tool_choice", "allowed"),
    Case("chat", {"tool_choice": 5}, 400, "tool_choice", "got `int`"),
    Case("chat", {"response_format": {"type": "xml"}}, 400, "response_format", "json_object"),
    Case("chat", {"response_format": {"type": "json_schema"}}, 400, "response_format", "json_schema"),
    Case(
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        400,
        "response_format",
        "can't be enforced",
    ),
    Case(
        "chat", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name", "1 to 64"
    ),
    Case("chat", {"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "messages", "tokens.*4096"),
    Case("chat", {"max_tokens": 2**31 - 1}, 400, "max_tokens", "4096 tokens.*max_tokens may be at most"),
    Case("chat", {"max_completion_tokens": 4096}, 400, "max_completion_tokens", "the answer may have 4096"),
    Case("chat", {"stop_token_ids": [1, 999999]}, 400, "stop_token_ids", "999999.*ids are 0 to"),
    Case("text", {"prompt": [1] * 96, "max_tokens": 4001}, 400, "max_tokens", "at most 4000"),
    Case("chat", {"tools": [{"type": "web_search"}]}, 400, "tools[0].type", "`web_search` is not supported"),
    Case("chat", {"tools": [{"type": "function"}]}, 400, "tools[0]", "needs a field function"),
    Case(
        "chat",
        {"messages": [{"role": "user", "content": "<|im_end|>" + "".join(map(chr, range(0xE000, 0xF900)))}]},
        400,
        "messages",
        "one must be left out",
    ),
    Case("chat", {"functions": [{"name": "f"}]}, 400, "functions", "as tools"),
    Case("chat", {"modalities": ["text", "audio"]}, 400, "modalities", "allowed"),
    Case("chat", {"audio": {"voice": "x"}}, 400, "audio", "text"),
    Case("text", {"prompt": []}, 400, "prompt", "length >= 1"),
    Case("text", {"prompt": ""}, 400, "prompt", "at least one"),
    Case("text", {"prompt": ["a", [1]]}, 400, "prompt", "mixture"),
    Case("text", {"prompt": [1, 999999]}, 400, "prompt", "999999.*ids are 0 to"),
    Case("text", {"prompt": [-1]}, 400, "prompt[0]", ">= 0"),
    Case("text", {"echo": True, "logprobs": 1}, 400, "echo", "logprobs"),
    Case("text", {"best_of": 3}, 400, "best_of", "value of n"),
    Case("text", {"suffix": "x"}, 400, "suffix", "not supported"),
    Case("text", {"prompt": ["a"] * 100, "n": 2}, 400, "n", "at most 128"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.param}-{case.message}")
def test_bad_field(frontend: Frontend, case: Case) -> None:
    path, good = ("/v1/chat/completions", CHAT) if case.kind == "chat" else ("/v1/completions", TEXT)
    got, body, _ = frontend.post(path, {**good, **case.fields})
    error = body["error"]
    assert (got, error["param"], error["type"]) == (case.status, case.param, "invalid_request_error"), error
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(case.message, error["message"]), error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": NaN}',
        json.dumps(CHAT).encode().replace(b"Hi", b"\xff\xfe"),
        json.dumps({**CHAT, "unknown": "Hi!"}).encode().replace(b"Hi!", b"\xff"),
        json.dumps(CHAT).encode().replace(b'"Hi"', b'"\\ud800"'),
        json.dumps(CHAT)[:-1].encode() + b', "temperature": NaN}',
        json.dumps(CHAT)[:-1].encode() + b', "temperature": 1e999}',
        json.dumps(CHAT)[:-1].encode() + b', "temperature": Infinity}',
        b"[" * 100_000,
    ],
)
def test_bad_body(frontend: Frontend, body: bytes) -> None:
    status, answer, _ = frontend.post("/v1/chat/completions", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), answer
    assert frontend.post("/v1/chat/completions", CHAT)[0] == 200


def test_context_length_names_both_numbers(frontend: Frontend) -> None:
    status, body, _ = frontend.post("/v1/completions", {**TEXT, "prompt": [1] * 4096})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert "4096 tokens" in body["error"]["message"]
    assert "at most 4095" in body["error"]["message"]
    assert frontend.post("/v1/completions", {**TEXT, "prompt": [1] * 4095, "max_tokens": 1})[0] == 200


def test_unknown_model_has_its_code(frontend: Frontend) -> None:
    for status, body, _ in (
        frontend.post("/v1/chat/completions", {**CHAT, "model": "gpt-9"}),
        (*frontend.get("/v1/models/gpt-9"), {}),
    ):
        error = json.loads(body)["error"] if isinstance(body, bytes) else body["error"]
        assert (status, error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/nope", 404, "Not Found: GET /nope. GET /openapi.json lists what there is"),
        ("GET", "/v1/chat/completions", 405, "Method Not Allowed: GET /v1/chat/completions. Allowed here: POST"),
    ],
)
def test_unknown_routes_answer_in_openais_shape(
    frontend: Frontend, method: str, path: str, status: int, message: str
) -> None:
    got, body, _ = frontend.request(method, path)
    error = json.loads(body)["error"]
    assert (got, set(error), error["message"]) == (status, {"message", "type", "param", "code"}, message)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_before_it_has_arrived(frontend: Frontend, chunked: bool) -> None:
    with socket.create_connection(("127.0.0.1", frontend.port), timeout=10) as connection:
        how = "transfer-encoding: chunked" if chunked else "content-length: 10000000"
        connection.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{how}\r\n\r\n".encode())
        if chunked:
            piece = b"%x\r\n" % 1_000_000 + b"x" * 1_000_000 + b"\r\n"
            connection.sendall(piece * 9)
        answer = b""
        while b"8000000" not in answer:  # the body has not ended
            answer += (part := connection.recv(65536))
            assert part
        assert answer.startswith(b"HTTP/1.1 413"), answer


def test_a_client_that_sends_10_megabytes_gets_to_read_the_refusal(frontend: Frontend) -> None:
    body = json.dumps({**CHAT, "messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    status, answer, _ = frontend.post("/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


NEST = '{"a":' * 2000 + "1" + "}" * 2000


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": "NEST"}}]},
        {"chat_template_kwargs": "NEST"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "NEST"}}},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": NEST}}]}
            ]
        },
    ],
)
def test_deep_nesting_is_a_bad_request(frontend: Frontend, fields: dict[str, Any]) -> None:
    body = json.dumps({**CHAT, **fields}).replace('"NEST"', NEST)
    status, answer, _ = frontend.post("/v1/chat/completions", body.encode())
    assert status == 400
    assert "nested too deeply" in answer["error"]["message"]


def test_half_characters_from_escapes_do_no_harm(frontend: Frontend) -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    body = {**CHAT, "messages": [{"role": "assistant", "tool_calls": [call]}, *CHAT["messages"]]}
    assert frontend.post("/v1/chat/completions", body)[0] == 200
