"""Metrics for Prometheus, in vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moesaic.serve.engine import EngineStats
from moesaic.serve.loading import ExpertStats

MEDIA_TYPE = CONTENT_TYPE_LATEST
_LABEL = "model_name"
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Metrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(
        self,
        model_name: str,
        stats: Callable[[], EngineStats],
        experts: Callable[[], ExpertStats] | None = None,
    ) -> None:
        """Make the metrics of a model.

        Args:
            model_name: label of all metrics.
            stats: function that returns the engine's counts.
            experts: function that returns the use of experts; None: all are in memory.
        """
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, stats))
        if experts is not None:
            self._registry.register(_ExpertCollector(model_name, experts))
        ProcessCollector(registry=self._registry)

        def histogram(name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
            whole = Histogram(
                f"vllm:{name}", meaning, [_LABEL], buckets=buckets, registry=self._registry
            )
            return whole.labels(model_name)

        self._first_token_s = histogram(
            "time_to_first_token_seconds", "Time to the first token.", _FIRST_TOKEN_S
        )
        self._next_token_s = histogram(
            "inter_token_latency_seconds", "Time between two tokens.", _TOKEN_S
        )
        self._request_s = histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end.", _REQUEST_S
        )
        self._prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self._generation_tokens = histogram(
            "request_generation_tokens", "New tokens of a request.", _TOKENS
        )
        self._ends = Counter(
            "vllm:request_success", "Requests that ended, by reason.",
            [_LABEL, "finished_reason"], registry=self._registry,
        )  # fmt: skip
        self._model_name = model_name
        for reason in ("stop", "length", "abort", "error"):
            self._ends.labels(model_name, reason)

    def observe_first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival to its first token."""
        self._first_token_s.observe(seconds)

    def observe_next_token(self, seconds: float) -> None:
        """Record the time between two tokens of a request."""
        self._next_token_s.observe(seconds)

    def observe_end(self, reason: str, seconds: float, prompt_tokens: int, new_tokens: int) -> None:
        """Record the end of a request: stop, length, abort or error."""
        self._ends.labels(self._model_name, reason).inc()
        self._request_s.observe(seconds)
        self._prompt_tokens.observe(prompt_tokens)
        self._generation_tokens.observe(new_tokens)

    def render(self) -> bytes:
        """Return all metrics as text."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Metrics that the engine counts, read when they are wanted."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._labels = [model_name]
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's present counts."""
        stats = self._stats()
        gauges = (
            ("num_requests_running", "Requests that run.", stats.num_running),
            ("num_requests_waiting", "Requests that wait.", stats.num_waiting),
            (
                "kv_cache_usage_perc", "Part of the key-value cache in use, 0 to 1.",
                stats.pages_used / max(stats.pages_total, 1),
            ),
        )  # fmt: skip
        counters = (
            ("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            ("num_preemptions", "Requests computed again for lack of pages.", stats.preemptions),
        )
        for name, meaning, value in gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", meaning, labels=[_LABEL])
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, meaning, value in counters:
            yield _counter(f"vllm:{name}", meaning, self._labels, value)


class _ExpertCollector(Collector):
    """Metrics of experts that are read from the model's files, read when they are wanted."""

    def __init__(self, model_name: str, stats: Callable[[], ExpertStats]) -> None:
        self._labels = [model_name]
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield the present counts."""
        stats = self._stats()
        for name, meaning, value in (
            ("hits", "Experts that passes used without a read.", stats.hits),
            ("misses", "Experts that were read, for a pass or ahead.", stats.misses),
            ("read_bytes", "Bytes of experts read.", stats.read_bytes),
            ("stall_seconds", "Seconds that passes waited for experts.", stats.stall_s),
        ):
            yield _counter(f"moesaic:expert_{name}", meaning, self._labels, value)


def _counter(name: str, meaning: str, labels: list[str], value: float) -> Metric:
    counter = CounterMetricFamily(name, meaning, labels=[_LABEL])
    counter.add_metric(labels, value)
    return counter
