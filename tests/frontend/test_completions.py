"""Completions through the real openai client."""

from __future__ import annotations

from typing import Any

import pytest

from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.conftest import REPLY
from tests.frontend.running import Frontend


def create(frontend: Frontend, **fields: Any) -> Any:
    with frontend.client() as client:
        answer = client.completions.create(**{"model": "tiny-chat", "prompt": "Hello", "max_tokens": 200, **fields})
        return list(answer) if fields.get("stream") else answer


def test_whole_answer(frontend: Frontend, tokenizer: Tokenizer) -> None:
    answer = create(frontend)
    assert answer.object == "text_completion"
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [(0, REPLY, "stop")]
    assert answer.usage.prompt_tokens == len(tokenizer.encode("Hello"))


def test_stream(frontend: Frontend) -> None:
    chunks = create(frontend, stream=True, stream_options={"include_usage": True})
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == REPLY
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 10
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("Hello", 1), (["Hello", "World"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
)
def test_forms_of_the_prompt(frontend: Frontend, prompt: Any, prompts: int) -> None:
    answer = create(frontend, prompt=prompt, n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(i, REPLY) for i in range(2 * prompts)]
    if isinstance(prompt[0], int):
        assert answer.usage.prompt_tokens == 3


def test_default_length_is_openais(frontend: Frontend) -> None:
    answer = create(frontend, max_tokens=None, stop=None, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 16)


def test_echo(frontend: Frontend, tokenizer: Tokenizer) -> None:
    assert create(frontend, echo=True).choices[0].text == "Hello" + REPLY
    assert create(frontend, echo=True, prompt=tokenizer.encode("Grüße")).choices[0].text == "Grüße" + REPLY
    chunks = create(frontend, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello" + REPLY


def test_stop(frontend: Frontend) -> None:
    answer = create(frontend, stop=["Paris"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (REPLY[: REPLY.index("Paris")], "stop")


def test_logprobs(frontend: Frontend, tokenizer: Tokenizer) -> None:
    logprobs = create(frontend, logprobs=2).choices[0].logprobs
    tokens = [tokenizer.token_text(i) for i in tokenizer.encode(REPLY)]
    assert logprobs.tokens[: len(tokens)] == tokens
    assert logprobs.token_logprobs[0] == -0.5
    assert logprobs.top_logprobs[0][tokens[0]] == -0.5
    assert logprobs.text_offset[:3] == [0, len(tokens[0]), len(tokens[0]) + len(tokens[1])]
    chunks = create(frontend, logprobs=2, stream=True)
    assert [t for chunk in chunks for t in chunk.choices[0].logprobs.tokens] == logprobs.tokens
    assert [o for chunk in chunks for o in chunk.choices[0].logprobs.text_offset] == logprobs.text_offset


def test_control_tokens_in_the_prompt_are_text(frontend: Frontend, tokenizer: Tokenizer) -> None:
    answer = create(frontend, prompt="<|im_end|>")
    assert answer.usage.prompt_tokens == len(tokenizer.encode("<|im_end|>")) > 1
