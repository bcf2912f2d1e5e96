"""The demo model's answer on every layout, and through the whole server."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from rose_dist.comm.layout import Layout
from rose_dist.comm.world import World
from rose_dist.engine.config import EngineConfig
from rose_dist.engine.doorbell import Doorbell
from rose_dist.engine.engine import Engine
from rose_dist.engine.loop import serve
from rose_dist.engine.offline import OfflineSession
from rose_dist.engine.protocol import Generate, SamplingParams
from rose_dist.frontend.formats.base import Conversation, Message
from rose_dist.frontend.formats.choose import choose_format
from rose_dist.frontend.tokenizer import Tokenizer
from tests.ranks import run_ranks
from tests.serve.server import Server

QUESTION = "What is the capital of France?"


def answer(world: World, model: Path, tp: int, dp: int, ep: int) -> str | None:
    """Rank 0's answer to the question; it asks, the others take part."""
    groups = world.groups(Layout.of(world.size, tp, dp, ep))
    bell = Doorbell(zmq.Context.instance(), "127.0.0.1", groups.lockstep)
    engine = Engine.load(EngineConfig(model, kv_tokens=1024), groups)
    text = None
    if world.rank == 0:
        tokenizer = Tokenizer(model)
        chat_format = choose_format("auto", tokenizer)
        prompt = chat_format.render(Conversation(messages=[Message(role="user", content=QUESTION)]))
        request = Generate(
            request_id="r",
            prompt=prompt,
            sampling=SamplingParams(temperature=0),
            max_tokens=16,
            stop_ids=list(chat_format.stop_ids),
        )
        with OfflineSession(engine, bell) as session:
            text = tokenizer.decode([token for output in session.run([request]) for token in output.token_ids])
    else:
        serve(engine, bell, None, lambda: None)
    groups.free()
    return text


@pytest.mark.parametrize(
    ("ranks", "tp", "dp", "ep"),
    [
        pytest.param(1, 1, 1, 1),
        *(pytest.param(2, *sizes, marks=pytest.mark.mpi(2)) for sizes in [(2, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2)]),
        *(
            pytest.param(4, tp, 4 // tp, ep, marks=pytest.mark.mpi(4))
            for tp, ep in [(4, 1), (4, 2), (4, 4), (2, 1), (2, 2), (2, 4), (1, 1), (1, 2), (1, 4)]
        ),
    ],
)
def test_the_answer_is_paris_on_every_layout(demo_model: Path, ranks: int, tp: int, dp: int, ep: int) -> None:
    results = (
        [answer(World.join(), demo_model, tp, dp, ep)]
        if ranks == 1
        else run_ranks(ranks, answer, demo_model, tp, dp, ep, timeout=180)
    )
    assert results[0] == "The capital of France is Paris."


@pytest.mark.mpi(2)
def test_a_client_gets_the_answer_streamed_and_whole(server: Server) -> None:
    client = server.client()
    ask = {"model": "demo-model", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    whole = client.chat.completions.create(**ask, max_tokens=40)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(text) == "The capital of France is Paris."
    assert len([piece for piece in text if piece]) > 4
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8
    # The second request finds the first one's prompt: 37 tokens are two whole blocks.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32
    server.wait_above("moe_rows_sent_total", 0)


@pytest.mark.mpi(2)
def test_concurrent_requests_on_both_replicas_get_their_own_answers(server: Server) -> None:
    client = server.client()
    ask = {"model": "demo-model", "prompt": ["One, two,", "A B C D", "Paris is"], "temperature": 0, "max_tokens": 12}
    together = client.completions.create(**ask)
    for prompt, choice in zip(ask["prompt"], together.choices, strict=True):
        alone = client.completions.create(**{**ask, "prompt": prompt})
        assert choice.text == alone.choices[0].text
