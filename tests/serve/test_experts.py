"""Experts rearranged in a running server: clients see nothing of it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.serve.server import Server


@pytest.mark.mpi(2)
def test_text_is_the_same_while_experts_change_places(demo_model: Path, tmp_path: Path) -> None:
    prompts = ["One, two, three,", "The capital of France is Paris. The capital of Italy is"]
    with Server(demo_model, 2, "--redundant-experts", "2", "--no-prefix-cache", folder=tmp_path) as server:

        def ask(prompt: str) -> str:
            answer = server.client().completions.create(model="demo-model", prompt=prompt, max_tokens=12, temperature=0)
            return answer.choices[0].text

        before = [ask(prompt) for prompt in prompts]
        assert "four" in before[0]
        during: list[str] = []
        thread = threading.Thread(target=lambda: during.append(ask(prompts[0])))
        thread.start()
        assert server.post("/v1/experts/rebalance", b"")[0] == 202
        thread.join()
        server.wait_for("expert_rebalances_total", 2)  # one a leader
        assert server.metric("expert_bytes_moved_total") > 0
        assert during == before[:1]
        assert [ask(prompt) for prompt in prompts] == before
        assert server.metric("expert_load_total") > 0
        assert server.post("/v1/experts/rebalance", b"")[0] == 202  # to idle ranks
        server.wait_for("expert_rebalances_total", 4)
        assert ask(prompts[1]) == before[1]
