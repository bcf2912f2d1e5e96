"""Prometheus metrics under `rose:`, with the suffixes that dashboards for vLLM know.

The token path only adds to plain integers; they become metric families when /metrics is read. Several frontends of one
server each leave their counts in a shared directory, so that any of them can answer for all.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rose_dist.engine.protocol import EngineStats
from rose_dist.frontend.engine_client import EngineClient

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320)
_FAST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_SMALL = (1, 2, 5, 10, 20)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.documentation = documentation
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, model: str, counts: list[int], total: float) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"rose:{self.name}", self.documentation, labels=["model_name"])
        cumulative, seen = [], 0
        for bound, count in zip([*map(float, self.bounds), "+Inf"], counts, strict=True):
            seen += count
            cumulative.append((str(bound), float(seen)))
        family.add_metric([model], cumulative, total)
        return family


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What one frontend counted since its start."""

    prompt_tokens: int
    generation_tokens: int
    finished: dict[str, int]
    http: dict[str, int]
    histograms: list[tuple[list[int], float]]

    def __add__(self, other: Counts) -> Counts:
        histograms = zip(self.histograms, other.histograms, strict=True)
        return Counts(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            generation_tokens=self.generation_tokens + other.generation_tokens,
            finished=Counter(self.finished) + Counter(other.finished),
            http=Counter(self.http) + Counter(other.http),
            histograms=[
                ([a + b for a, b in zip(mine, theirs, strict=True)], my_total + their_total)
                for (mine, my_total), (theirs, their_total) in histograms
            ],
        )


class Metrics(Collector):
    """What one frontend process counted, and the gauges of its leaders."""

    def __init__(self, model: str, client: EngineClient, shared: Path | None = None) -> None:
        """
        Args:
            shared: directory in which the other frontends of the server leave their counts.
        """
        self._model = model
        self._client = client
        self._shared = shared
        self._own_file = shared and shared / f"metrics-{os.getpid()}"
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        """Choices by finish reason; `abort` where the client left, `error` where the engine failed, `lost` where the
        replica did; some of these were asked for again and count once more."""
        self.http: Counter[tuple[str, str, int]] = Counter()
        """HTTP requests by (method, route, status)."""
        self.time_to_first_token = Histogram("time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self.inter_token = Histogram("inter_token_latency_seconds", "Between tokens of one choice", _FAST_SECONDS)
        self.per_output_token = Histogram(
            "request_time_per_output_token_seconds", "Mean time between the tokens of a choice", _FAST_SECONDS
        )
        self.end_to_end = Histogram("e2e_request_latency_seconds", "Arrival to last token", _SECONDS)
        self.queue_time = Histogram("request_queue_time_seconds", "In the engine's queue", _SECONDS)
        self.prefill_time = Histogram("request_prefill_time_seconds", "From the queue to the first token", _SECONDS)
        self.decode_time = Histogram("request_decode_time_seconds", "First to last token", _SECONDS)
        self.inference_time = Histogram("request_inference_time_seconds", "From the queue to the last token", _SECONDS)
        self.request_prompt_tokens = Histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.request_generation_tokens = Histogram("request_generation_tokens", "Tokens of a choice", _TOKENS)
        self.request_max_tokens = Histogram("request_params_max_tokens", "max_tokens of a request", _TOKENS)
        self.request_n = Histogram("request_params_n", "Choices asked for", _SMALL)
        self._histograms = [value for value in vars(self).values() if isinstance(value, Histogram)]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def publish(self) -> None:
        """Leave the counts for the other frontends."""
        if self._own_file is not None:
            fresh = self._own_file.with_suffix(".new")
            fresh.write_bytes(msgspec.msgpack.encode(self._counts()))
            fresh.replace(self._own_file)

    def collect(self) -> Iterable[Metric]:
        yield from self._engine()
        counts = self._counts()
        for other in self._others():
            counts += other
        yield self._counter("prompt_tokens", "Prompt tokens of answered requests", counts.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", counts.generation_tokens)
        finished = CounterMetricFamily(
            "rose:request_success", "Choices ended, by reason", labels=["model_name", "finished_reason"]
        )
        for reason, count in counts.finished.items():
            finished.add_metric([self._model, reason], count)
        yield finished
        http = CounterMetricFamily("rose:http_requests", "HTTP requests", labels=["method", "handler", "status"])
        for labels, count in counts.http.items():
            http.add_metric(labels.split(" "), count)
        yield http
        for histogram, (bins, total) in zip(self._histograms, counts.histograms, strict=True):
            yield histogram.family(self._model, bins, total)

    def _counts(self) -> Counts:
        return Counts(
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            finished=self.finished,
            http={f"{method} {route} {status}": count for (method, route, status), count in self.http.items()},
            histograms=[(histogram.counts, histogram.total) for histogram in self._histograms],
        )

    def _others(self) -> Iterator[Counts]:
        for path in sorted(self._shared.glob("metrics-*[0-9]")) if self._shared is not None else ():
            if path != self._own_file:
                yield msgspec.msgpack.decode(path.read_bytes(), type=Counts)

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"rose:{name}", documentation, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _engine(self) -> Iterator[Metric]:
        labels = ["model_name", "leader"]
        for kind, name, documentation, read in _ENGINE:
            family = kind(f"rose:{name}", documentation, labels=labels)
            for number, _, leader in self._client.numbered():
                family.add_metric([self._model, str(number)], read(leader.stats))
            yield family
        info = GaugeMetricFamily("rose:engine_info", "Always 1; what the engine is", labels=[*labels, "layout"])
        for number, _, leader in self._client.numbered():
            if leader.ready is not None:
                info.add_metric([self._model, str(number), leader.ready.layout], 1)
        yield info
        up = GaugeMetricFamily("rose:replica_up", "1 for a replica that takes requests", labels=["replica"])
        for replica in self._client.replicas:
            up.add_metric([str(replica.number)], float(replica.ready))
        yield up


def _kv_usage(stats: EngineStats) -> float:
    return stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0


_ENGINE = (
    (GaugeMetricFamily, "num_requests_running", "Requests in the running batch", lambda s: s.running),
    (GaugeMetricFamily, "num_requests_waiting", "Requests in the waiting queue", lambda s: s.waiting),
    (GaugeMetricFamily, "kv_cache_usage_perc", "Share of KV blocks held by running requests, 0 to 1", _kv_usage),
    (GaugeMetricFamily, "kv_blocks_used", "KV blocks held by running requests", lambda s: s.kv_blocks_used),
    (GaugeMetricFamily, "kv_blocks_total", "KV blocks there are", lambda s: s.kv_blocks_total),
    (CounterMetricFamily, "num_preemptions", "Requests preempted", lambda s: s.preemptions),
    (CounterMetricFamily, "prefix_cache_queries", "Prompt tokens looked up", lambda s: s.prefix_queries),
    (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    (CounterMetricFamily, "engine_steps", "Steps of the engine", lambda s: s.steps),
    (CounterMetricFamily, "engine_step_tokens", "Tokens through the model", lambda s: s.step_tokens),
    (CounterMetricFamily, "moe_rows_sent", "Rows sent to experts of other ranks", lambda s: s.rows_sent),
)
