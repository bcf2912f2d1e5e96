"""Schemathesis on the published description: no request that it allows, or nearly allows, is answered with a 5xx."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import content_type_conformance, not_a_server_error, response_schema_conformance

from rose_dist.frontend.api.openapi import description
from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.running import Frontend, running
from tests.frontend.stub_engine import StubConfig

CASES = int(os.environ.get("ROSE_API_CASES", "250"))
"""At least so many requests; more find more."""
CREATING = 3
"""Endpoints that take a body, on which most cases go."""
MOST_TOKENS = 150
"""That an answer may be asked to have, of a context of 200."""


@pytest.fixture(scope="module")
def server(config: FrontendConfig, tokenizer: Tokenizer) -> Iterator[Frontend]:
    stub = StubConfig(script=tokenizer.encode("Paris, naïve 🙂."), max_context=200, tokens_per_step=8)
    with running(config, [stub]) as started:
        yield started


DESCRIPTION = description(["tiny-chat"])
api = schemathesis.openapi.from_dict(DESCRIPTION)


@api.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Nearly all chats without content, or of endless answers, are turned away at once: let the rest of the request be
    looked at too.
    """
    messages = body.get("messages") if isinstance(body, dict) else None
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("content") is None:
            message["content"] = "Hi"
    for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body, dict) and isinstance(limit := body.get(field), int) and limit > MOST_TOKENS:
            body[field] = limit % MOST_TOKENS + 1
    return body


def test_the_description_is_published(server: Frontend) -> None:
    assert json.loads(server.get("/openapi.json")[1]) == DESCRIPTION


@api.parametrize()
@hypothesis.settings(
    max_examples=-(-CASES // CREATING), deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
def test_no_request_fails_the_server(server: Frontend, case: schemathesis.Case) -> None:
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    case.call_and_validate(base_url=server.url, checks=checks)


def test_enough_cases_were_sent_and_got_through(server: Frontend) -> None:
    """Of the requests of the tests above."""
    assert server.metric("http_requests_total") >= CASES
    answered = [
        line for line in server.get("/metrics")[1].decode().splitlines() if "http_requests" in line and '"200"' in line
    ]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert any(f'"{path}"' in line for line in answered), path
    assert server.get("/health")[0] == 200
