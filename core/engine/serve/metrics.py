"""Figures for Prometheus, by vLLM's names where it has them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.runtime.outputs import RequestOutput

from .admission import Place

if TYPE_CHECKING:
    from .model import ServedModel

Families = Iterable[GaugeMetricFamily | CounterMetricFamily]
_LABEL = ["model_name"]
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Metrics:
    """Counters and histograms of finished and running requests, and the state of models as of each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.models: Mapping[str, ServedModel] = {}
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have begun.")
        self.generated = self._counter("generation_tokens", "Tokens generated.")
        self.queried = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = self._counter("prefix_cache_hits", "Prompt tokens that the prefix cache had.")
        self.finished = Counter(
            "vllm:request_success", "Sequences that have ended.", [*_LABEL, "finished_reason"], registry=self.registry
        )
        self.ttft = self._seconds("time_to_first_token", "Arrival to first token.")
        self.itl = self._seconds("inter_token_latency", "Between tokens of a sequence.", _TOKEN_SECONDS)
        self.tpot = self._seconds("request_time_per_output_token", "Mean of a request, first token left out.")
        self.e2e = self._seconds("e2e_request_latency", "Arrival to last token.")
        self.queue = self._seconds("request_queue_time", "Arrival to the request's turn.")
        self.prompt_sizes = self._tokens("request_prompt_tokens", "Tokens of a prompt.")
        self.output_sizes = self._tokens("request_generation_tokens", "Tokens generated for a request.")
        self.registry.register(_State(self))

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"vllm:{name}", what, _LABEL, registry=self.registry)

    def _seconds(self, name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"vllm:{name}_seconds", what, _LABEL, buckets=buckets, registry=self.registry)

    def _tokens(self, name: str, what: str) -> Histogram:
        return Histogram(f"vllm:{name}", what, _LABEL, buckets=_TOKENS, registry=self.registry)

    def text(self) -> bytes:
        """In Prometheus's format."""
        return generate_latest(self.registry)

    def request(self, model: str, start: float, place: Place) -> Observed:
        """What watches one request; ``start`` is when it came."""
        return Observed(self, model, start, place)


class Observed:
    """The figures of one request with its prompts, while its outputs go by."""

    def __init__(self, metrics: Metrics, model: str, start: float, place: Place) -> None:
        self._metrics, self._model, self._start, self._place = metrics, model, start, place
        self._last: dict[int, RequestOutput] = {}
        self._times: dict[int, float] = {}

    def take(self, index: int, output: RequestOutput) -> None:
        metrics, model, now = self._metrics, self._model, time.monotonic()
        before = self._last.get(index)
        if before is None:
            prompt = len(output.prompt_token_ids)
            metrics.prompt_tokens.labels(model).inc(prompt)
            metrics.prompt_sizes.labels(model).observe(prompt)
            metrics.queried.labels(model).inc(prompt)
            metrics.hits.labels(model).inc(output.num_cached_tokens)
            metrics.ttft.labels(model).observe((output.metrics.first_token or now) - self._start)
            if self._place.begun is not None:
                metrics.queue.labels(model).observe(self._place.begun - self._start)
        new = output.num_generated_tokens - (before.num_generated_tokens if before else 0)
        metrics.generated.labels(model).inc(new)
        if before is not None and new:
            gap = now - self._times[index]
            metrics.itl.labels(model).observe(gap * len(output.outputs) / max(new, len(output.outputs)))
        self._last[index], self._times[index] = output, now

    def close(self) -> None:
        """At the end of the request, however it came."""
        metrics, model = self._metrics, self._model
        for output in self._last.values():
            times, most = output.metrics, max(len(c.token_ids) for c in output.outputs)
            metrics.output_sizes.labels(model).observe(output.num_generated_tokens)
            for completion in output.outputs:
                metrics.finished.labels(model, completion.finish_reason or "abort").inc()
            if times.first_token is None or times.last_token is None or not output.finished:
                continue
            metrics.e2e.labels(model).observe(times.last_token - self._start)
            if most > 1:
                metrics.tpot.labels(model).observe((times.last_token - times.first_token) / (most - 1))


class _State(Collector):
    """Gauges, read from the models when they are asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Families:
        gauges = {
            name: GaugeMetricFamily(f"vllm:{name}", what, labels=_LABEL)
            for name, what in (
                ("num_requests_running", "Sequences that hold a place in the batch."),
                ("num_requests_waiting", "Sequences that wait."),
                ("kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1."),
            )
        }
        preempted = CounterMetricFamily("vllm:num_preemptions", "Sequences that had to make room.", labels=_LABEL)
        refused = CounterMetricFamily("engine:requests_refused", "Requests answered with 429.", labels=_LABEL)
        guessed = CounterMetricFamily("vllm:spec_decode_num_draft_tokens", "Tokens guessed.", labels=_LABEL)
        held = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens", "Guessed tokens that held.", labels=_LABEL)
        restarted = CounterMetricFamily("engine:restarts", "Step loops begun anew after a failure.", labels=_LABEL)
        for name, model in self._metrics.models.items():
            state = snapshot(model)
            gauges["num_requests_running"].add_metric([name], state["running"])
            gauges["num_requests_waiting"].add_metric([name], state["waiting"])
            gauges["kv_cache_usage_perc"].add_metric([name], state["kv_usage"])
            preempted.add_metric([name], state["preemptions"])
            refused.add_metric([name], model.admission.refused)
            guessed.add_metric([name], state["guessed"])
            held.add_metric([name], state["held"])
            restarted.add_metric([name], state["restarts"])
        return [*gauges.values(), preempted, refused, guessed, held, restarted]


def snapshot(model: ServedModel) -> dict[str, float]:
    """The state of a model as of now; zeros as long as it is not loaded."""
    if not model.loaded:
        names = (
            "running",
            "waiting",
            "kv_blocks",
            "kv_used",
            "kv_cached",
            "kv_usage",
            "preemptions",
            "guessed",
            "held",
            "steps",
            "restarts",
        )
        return dict.fromkeys(names, 0.0)
    stats, health = model.llm.engine.scheduler_stats(), model.llm.health()
    guesses = model.llm.engine.speculation()
    total, used = sum(pool.total for pool in stats.pools), sum(pool.used for pool in stats.pools)
    return {
        "running": stats.running,
        "waiting": stats.waiting + model.admission.waiting,
        "kv_blocks": total,
        "kv_used": used,
        "kv_cached": sum(pool.cached for pool in stats.pools),
        "kv_usage": used / total if total else 0.0,
        "preemptions": stats.preemptions,
        "guessed": guesses.guessed,
        "held": guesses.held,
        "steps": health.steps,
        "restarts": health.restarts,
    }
