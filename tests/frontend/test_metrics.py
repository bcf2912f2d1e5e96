from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.metrics import Histogram
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.running import Frontend, running
from tests.frontend.stub_engine import StubConfig

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"


def test_counts_after_some_requests(frontend: Frontend) -> None:
    before = {name: frontend.metric(name) for name in ("prompt_tokens_total", "generation_tokens_total")}
    body = {"model": "tiny-chat", "prompt": [5, 6, 7], "max_tokens": 4, "n": 2}
    assert frontend.post("/v1/completions", body)[0] == 200
    assert frontend.metric("prompt_tokens_total") == before["prompt_tokens_total"] + 3
    assert frontend.metric("generation_tokens_total") == before["generation_tokens_total"] + 8
    families = {f.name: f for f in text_string_to_metric_families(frontend.get("/metrics")[1].decode())}
    assert families["rose:request_params_n"].type == "histogram"
    samples = {(s.name, *s.labels.values()): s.value for s in families["rose:request_success"].samples}
    assert samples["rose:request_success_total", "length", "tiny-chat"] >= 2


def test_times_in_the_engine_are_what_it_says(config: FrontendConfig, tokenizer: Tokenizer) -> None:
    stub = StubConfig(script=tokenizer.encode("yes"), queue_s=3.0, prefill_s=0.7, step_s=0.01)
    with running(config, [stub]) as frontend:
        body = {"model": "tiny-chat", "prompt": [5, 6, 7], "max_tokens": 4, "n": 2}
        assert frontend.post("/v1/completions", body)[0] == 200
        for name, total in {"queue": 6.0, "prefill": 1.4}.items():
            assert frontend.metric(f"request_{name}_time_seconds_count") == 2
            assert frontend.metric(f"request_{name}_time_seconds_sum") == pytest.approx(total)
        decode = frontend.metric("request_decode_time_seconds_sum")
        assert decode > 0
        assert frontend.metric("request_inference_time_seconds_sum") == pytest.approx(1.4 + decode)


def test_histogram_is_cumulative_and_bounds_are_inclusive() -> None:
    histogram = Histogram("x", "", (1, 2))
    for value in (0.5, 1, 1.5, 9):
        histogram.observe(value)
    histogram.observe(2, times=3)
    samples = {s.labels.get("le"): s.value for s in histogram.family("m", histogram.counts, histogram.total).samples}
    assert samples["1.0"] == 2
    assert samples["2.0"] == 6
    assert samples["+Inf"] == 7
    assert histogram.total == pytest.approx(18)


def test_every_metric_on_the_dashboard_is_there(frontend: Frontend) -> None:
    frontend.post("/v1/completions", {"model": "tiny-chat", "prompt": [5], "max_tokens": 1})
    served = set(re.findall(r"^rose:\w+", frontend.get("/metrics")[1].decode(), re.MULTILINE))
    panels = json.loads(DASHBOARD.read_text())["panels"]
    named = {name for panel in panels for t in panel["targets"] for name in re.findall(r"rose:\w+", t["expr"])}
    assert len(named) > 15
    assert named <= served
