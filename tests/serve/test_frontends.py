"""Several HTTP processes on one port before one engine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.serve.server import Server


@pytest.mark.mpi(2)
def test_two_frontends_share_the_work_the_metrics_and_the_drain(demo_model: Path, tmp_path: Path) -> None:
    with Server(demo_model, 2, "--frontends", "2", folder=tmp_path) as server:
        frontends = [p for p in server.family() if b"rose_dist.frontend" in Path(f"/proc/{p}/cmdline").read_bytes()]
        assert len(frontends) == 2

        def ask() -> None:
            answer = server.client().completions.create(model="demo-model", prompt="Hi", max_tokens=2)
            assert answer.usage is not None

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.wait_for("request_success_total", 12)
        stored = server.client().responses.create(model="demo-model", input="Hi", max_output_tokens=2)
        for _ in range(4):
            assert server.client().responses.retrieve(stored.id).id == stored.id
        assert server.stop() == 0, server.log.read_text()
