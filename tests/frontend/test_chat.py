"""Chat Completions through the real openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.conftest import REPLY
from tests.frontend.running import Frontend, running, wait_for
from tests.frontend.stub_engine import StubConfig

MODEL = "tiny-chat"
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


def create(frontend: Frontend, **fields: Any) -> Any:
    with frontend.client() as client:
        return client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields})


def stream(frontend: Frontend, **fields: Any) -> list[Any]:
    with frontend.client() as client:
        return list(client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "stream": True, **fields}))


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_whole_answer(frontend: Frontend, tokenizer: Tokenizer) -> None:
    answer = create(frontend)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    output = len(tokenizer.encode(REPLY)) + 1
    assert answer.usage.completion_tokens == output
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + output
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_stream(frontend: Frontend) -> None:
    chunks = stream(frontend, stream_options={"include_usage": True})
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert text_of(chunks) == REPLY
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_on_the_wire(frontend: Frontend) -> None:
    """What the client library doesn't show: `usage` is absent or null, events are well-formed, [DONE] is last."""
    for include_usage in (False, True):
        body = {
            "model": MODEL,
            "messages": MESSAGES,
            "stream": True,
            "stream_options": {"include_usage": include_usage},
        }
        status, raw, headers = frontend.request("POST", "/v1/chat/completions", json.dumps(body).encode())
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        events = raw.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        if include_usage:
            assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        else:
            assert all("usage" not in chunk for chunk in chunks)


def test_choices(frontend: Frontend) -> None:
    answer = create(frontend, n=3)
    assert [(c.index, c.message.content) for c in answer.choices] == [(i, REPLY) for i in range(3)]
    assert answer.usage.prompt_tokens == create(frontend).usage.prompt_tokens
    chunks = stream(frontend, n=3)
    assert [text_of(chunks, i) for i in range(3)] == [REPLY] * 3


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_length(frontend: Frontend, field: str) -> None:
    answer = create(frontend, **{field: 3})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


@pytest.mark.parametrize("stop", [" Paris", ["nothing", " is P", " Paris"]])
def test_stop_strings(frontend: Frontend, stop: Any) -> None:
    expected = REPLY[: REPLY.index(" Paris" if isinstance(stop, str) else " is P")]
    answer = create(frontend, stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "stop")
    chunks = stream(frontend, stop=stop)
    assert text_of(chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs(frontend: Frontend, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(REPLY)
    content = create(frontend, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.token for entry in content] == [tokenizer.token_text(i) for i in ids]
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == REPLY
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].top_logprobs[0].token == content[0].token
    chunks = stream(frontend, logprobs=True)
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [(e.token, e.bytes) for e in streamed] == [(e.token, e.bytes) for e in content]
    assert all(e.top_logprobs == [] for e in streamed)


def test_logprobs_end_at_a_stop_string(frontend: Frontend) -> None:
    content = create(frontend, logprobs=True, stop=" Paris").choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode().startswith("The capital of France is")
    assert "Paris" not in "".join(entry.token for entry in content)


@pytest.fixture(scope="module")
def thinker(config: FrontendConfig, tokenizer: Tokenizer) -> Iterator[Frontend]:
    script = tokenizer.encode_template("<think>\nParis? Paris.\n</think>\n\nIt is Paris.")
    with running(config, [StubConfig(script=script)]) as started:
        yield started


def test_reasoning(thinker: Frontend, tokenizer: Tokenizer) -> None:
    answer = create(thinker)
    message = answer.choices[0].message
    assert message.content == "It is Paris."
    assert message.reasoning_content == message.reasoning == "Paris? Paris.\n"
    expected = len(tokenizer.encode("\nParis? Paris.\n"))
    assert answer.usage.completion_tokens_details.reasoning_tokens == expected
    chunks = stream(thinker)
    for name in ("reasoning_content", "reasoning"):
        assert "".join(getattr(c.choices[0].delta, name, None) or "" for c in chunks) == "Paris? Paris.\n"
    assert text_of(chunks) == "It is Paris."


def test_stop_strings_and_logprobs_leave_reasoning_alone(thinker: Frontend) -> None:
    answer = create(thinker, stop=" Paris.", logprobs=True)
    assert answer.choices[0].message.content == "It is"
    assert answer.choices[0].message.reasoning == "Paris? Paris.\n"
    assert "".join(entry.token for entry in answer.choices[0].logprobs.content).endswith("It is")


def test_reasoning_can_be_left_out(thinker: Frontend) -> None:
    answer = create(thinker, extra_body={"include_reasoning": False})
    assert "reasoning" not in answer.choices[0].message.model_dump(exclude_unset=True)
    assert text_of(stream(thinker, extra_body={"include_reasoning": False})) == "It is Paris."


def test_what_the_engine_is_told(config: FrontendConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    report = tmp_path / "report"
    with running(config, [StubConfig(script=tokenizer.encode(REPLY), report=str(report))]) as frontend:
        create(
            frontend,
            n=2,
            max_tokens=9,
            temperature=0.5,
            top_p=0.9,
            seed=7,
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            logit_bias={"5": -3},
            user="somebody",
            metadata={"a": "b"},
            extra_body={
                "top_k": 40,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
                "min_tokens": 2,
                "stop_token_ids": [11],
                "unknown": {"x": 1},
            },
        )
        create(frontend, max_tokens=4, extra_body={"ignore_eos": True})
    messages = [json.loads(line) for line in report.read_text().splitlines()]
    first, second, third = (message for message in messages if message["type"] == "generate")
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -3.0},
    }
    assert first["sampling"] == {**sampling, "seed": 7}
    assert second["sampling"] == {**sampling, "seed": 8}
    assert first["prompt"] == second["prompt"]
    assert tokenizer.decode(first["prompt"], special=True) == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (first["max_tokens"], first["min_tokens"]) == (9, 2)
    assert set(first["stop_ids"]) == {11, tokenizer.added["<|im_end|>"]}
    assert third.get("stop_ids", []) == []


def test_engine_error(config: FrontendConfig, tokenizer: Tokenizer) -> None:
    with running(config, [StubConfig(script=tokenizer.encode(REPLY), error_after=5, step_s=0.002)]) as frontend:
        with pytest.raises(openai.InternalServerError, match="told to fail"):
            create(frontend)
        with pytest.raises(openai.APIError, match="told to fail"):
            stream(frontend)
        assert frontend.metric("request_success_total") == 2


def test_a_request_id_goes_round(frontend: Frontend) -> None:
    body = {"model": MODEL, "messages": MESSAGES}
    assert frontend.post("/v1/chat/completions", body, {"x-request-id": "abc-1"})[2]["x-request-id"] == "abc-1"
    assert len(frontend.post("/v1/chat/completions", body, {"x-request-id": "a b"})[2]["x-request-id"]) == 32


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_the_request_in_the_engine(
    config: FrontendConfig, tokenizer: Tokenizer, tmp_path: Path, stream: bool
) -> None:
    report = tmp_path / "report"
    stub = StubConfig(script=tokenizer.encode(REPLY), report=str(report), step_s=0.002)
    with running(config, [stub]) as frontend, frontend.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            stop="Paris",
            max_tokens=4000,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
        if not isinstance(answer, openai.Stream):
            assert answer.usage is not None
            assert answer.usage.completion_tokens <= len(tokenizer.encode(REPLY))
        else:
            assert list(answer)[-1].choices[0].finish_reason == "stop"
        wait_for(lambda: frontend.metric("num_requests_running") == 0)
    messages = [json.loads(line)["type"] for line in report.read_text().splitlines()]
    assert messages == ["hello", "generate", "cancel"]
