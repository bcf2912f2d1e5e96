"""More requests than the engine's queue holds: each gets an answer, at once where it is refused."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.conftest import REPLY
from tests.frontend.running import running
from tests.frontend.stub_engine import StubConfig


async def post(port: int, stream: bool) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "tiny-chat", "messages": [{"role": "user", "content": "Hi"}], "stream": stream})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer


async def post_all(port: int, count: int) -> list[tuple[int, bytes]]:
    return await asyncio.wait_for(asyncio.gather(*(post(port, i % 2 == 0) for i in range(count))), 20)


def test_500_requests_on_a_queue_of_100(config: FrontendConfig, tokenizer: Tokenizer) -> None:
    stub = StubConfig(script=tokenizer.encode(REPLY), step_s=0.01, max_running=16, max_waiting=100)
    with running(config, [stub]) as frontend:
        answers = asyncio.run(post_all(frontend.port, 500))
        counts = Counter(status for status, _ in answers)
        assert set(counts) == {200, 429}
        assert counts[200] >= 116
        for status, answer in answers:
            if status == 429:
                assert b"retry-after: 1" in answer
                assert b'"code":"overloaded"' in answer
            else:
                assert b"[DONE]" in answer or b'"finish_reason":"stop"' in answer
        assert frontend.metric("num_requests_running") == frontend.metric("num_requests_waiting") == 0
        assert asyncio.run(post(frontend.port, False))[0] == 200
