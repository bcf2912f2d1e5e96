"""Arbitrary JSON in arbitrary fields: never a 5xx, always OpenAI's error body."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose_dist.frontend.schema.chat import ChatRequest
from rose_dist.frontend.schema.completions import CompletionRequest
from rose_dist.frontend.schema.responses import ResponsesRequest
from tests.frontend.running import Frontend

ENDPOINTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hi"}),
    "/v1/responses": (ResponsesRequest, {"input": "Hi"}),
}
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, -1, 1, 2, 2**31, 2**63, 1e308])
WORDS = st.text(max_size=8) | st.sampled_from(
    [
        "role",
        "content",
        "type",
        "function",
        "name",
        "text",
        "user",
        "assistant",
        "tool",
        "auto",
        "required",
        "<|im_end|>",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"])},
        optional={
            "content": VALUES,
            "reasoning": VALUES,
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {"id": WORDS, "function": st.fixed_dictionaries({"name": WORDS, "arguments": WORDS | VALUES})}
                ),
                max_size=2,
            ),
            "tool_call_id": WORDS,
            "name": WORDS,
        },
    ),
    max_size=3,
)


@pytest.fixture
def connection(frontend: Frontend) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", frontend.port, timeout=20)
    yield connection
    connection.close()


@pytest.mark.parametrize("path", ENDPOINTS)
@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_body_breaks_the_server(connection: http.client.HTTPConnection, path: str, data: st.DataObject) -> None:
    request_type, good = ENDPOINTS[path]
    fields = st.sampled_from([*request_type.__struct_fields__, "unknown"])
    body = {"model": "tiny-chat", **good, "max_tokens": 3, **data.draw(st.dictionaries(fields, VALUES, max_size=3))}
    if "messages" in good and data.draw(st.booleans()):
        body["messages"] = data.draw(MESSAGES)
    for name in ("model", "n"):
        if data.draw(st.booleans()):
            body[name] = "tiny-chat" if name == "model" else 1
    connection.request("POST", path, json.dumps(body).encode("utf-8", "surrogatepass"))
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status < 500, (body, content)
    if answer.status != 200:
        assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}
