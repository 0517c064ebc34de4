"""Figures for Prometheus, by vLLM's names where it has them."""

from __future__ import annotations

import time
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from engine.runtime.request import Request, Watch

if TYPE_CHECKING:
    from .model import ServedModel

Families = Iterable[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]
_LABEL = ["model_name"]
_REASONS = ("stop", "length", "abort", "error")
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class Metrics:
    """Counters and histograms of finished and running requests, and the state of models as of each scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.models: Mapping[str, ServedModel] = {}
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that have begun.")
        self.queried = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = self._counter("prefix_cache_hits", "Prompt tokens that the prefix cache had.")
        self.finished = Counter(
            "vllm:request_success", "Sequences that have ended.", [*_LABEL, "finished_reason"], registry=self.registry
        )
        self.ttft = self._seconds("time_to_first_token", "Arrival to first token of a request.")
        self.queue = self._seconds("request_queue_time", "Arrival to the request's turn.")
        self.prefill = self._seconds("request_prefill_time", "The request's turn to its first token.")
        self.prompt_sizes = self._tokens("request_prompt_tokens", "Tokens of a prompt.")
        self.tokens: dict[str, TokenFigures] = {}
        self.tpot = self._seconds("request_time_per_output_token", "Mean of a sequence, first token left out.")
        self.decode = self._seconds("request_decode_time", "First to last token of a sequence.")
        self.e2e = self._seconds("e2e_request_latency", "Arrival to the end of a sequence.")
        self.output_sizes = self._tokens("request_generation_tokens", "Tokens generated for a sequence.")
        self.longest = self._tokens("request_max_num_generation_tokens", "Tokens of a request's longest sequence.")
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

    def of(self, model: str) -> Figures:
        """A model's figures, which are there from now on: a rate does not see what a counter appears with."""
        return Figures(self, model)


class TokenFigures:
    """What is noted of each token of a model, by the one thread that makes text of its tokens: Prometheus's own counters take
    a lock for each number, and longer than the text."""

    def __init__(self) -> None:
        self.generated = 0
        self._between = [0] * (len(_TOKEN_SECONDS) + 1)
        self._seconds = 0.0

    def observe(self, seconds: float) -> None:
        """The time between two tokens of a sequence."""
        self._between[bisect_left(_TOKEN_SECONDS, seconds)] += 1
        self._seconds += seconds

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Of a histogram: how many times were up to each bound, and their sum."""
        bounds = (*map(floatToGoString, _TOKEN_SECONDS), "+Inf")
        return [*zip(bounds, map(float, accumulate(self._between)), strict=True)], self._seconds


class Figures:
    """One model's counters and histograms."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.queried = metrics.queried.labels(model)
        self.hits = metrics.hits.labels(model)
        self.finished = {reason: metrics.finished.labels(model, reason) for reason in _REASONS}
        self.ttft = metrics.ttft.labels(model)
        self.queue = metrics.queue.labels(model)
        self.prefill = metrics.prefill.labels(model)
        self.prompt_sizes = metrics.prompt_sizes.labels(model)
        self.tokens = metrics.tokens.setdefault(model, TokenFigures())
        self.tpot = metrics.tpot.labels(model)
        self.decode = metrics.decode.labels(model)
        self.e2e = metrics.e2e.labels(model)
        self.output_sizes = metrics.output_sizes.labels(model)
        self.longest = metrics.longest.labels(model)

    def observed(self, request: Request, start: float) -> Observed:
        """What watches a request that came at ``start``."""
        watch = request.watch = Observed(self, request, start)
        return watch


class Observed(Watch):
    """The figures of a request, as its tokens are made: whether they are streamed, or taken at all, is not seen here."""

    def __init__(self, figures: Figures, request: Request, start: float) -> None:
        self._figures, self._start = figures, start
        self._request = weakref.ref(request)  # which has this: it is let go at once when it has ended, with its text
        self._begun = False
        self._open = set(range(len(request.continuations)))
        self._counts = [0] * len(request.continuations)
        self._first = [0.0] * len(request.continuations)
        self._last = [0.0] * len(request.continuations)

    def token(self, index: int, at: float) -> None:
        if self._counts[index]:
            self._figures.tokens.observe(at - self._last[index])
        else:
            self._begin(at)
            self._first[index] = at
        self._last[index] = at
        self._counts[index] += 1
        self._figures.tokens.generated += 1

    def ended(self, index: int, at: float, reason: str) -> None:
        try:
            self._open.remove(index)
        except KeyError:  # by ``end``, on another thread
            return
        figures, count = self._figures, self._counts[index]
        if reason == "stop":
            self._begin(at)  # an embedding's only output
        figures.finished[reason].inc()
        figures.e2e.observe(at - self._start)
        figures.output_sizes.observe(count)
        if count:
            took = self._last[index] - self._first[index]
            figures.decode.observe(took)
            if count > 1:
                figures.tpot.observe(took / (count - 1))
        if not self._open:
            figures.longest.observe(max(self._counts))

    def _begin(self, at: float) -> None:
        """At the first output of all."""
        if self._begun:
            return
        self._begun = True
        figures, request = self._figures, self._request()
        assert request is not None and request.admitted is not None
        turn = request.admitted
        figures.prompt_tokens.inc(len(request.prompt_ids))
        figures.prompt_sizes.observe(len(request.prompt_ids))
        figures.queried.inc(len(request.prompt_ids))
        figures.hits.inc(request.num_cached)
        figures.ttft.observe(at - self._start)
        figures.queue.observe(turn - self._start)
        figures.prefill.observe(at - turn)

    def end(self, reason: str) -> None:
        """Ends what stage 3 will tell no end of."""
        now = time.monotonic()
        for index in tuple(self._open):
            self.ended(index, now, reason)

    def left(self) -> None:
        """Nobody wants the request any more; one that was not admitted is known to stage 3 by nothing."""
        request = self._request()
        if request is None or request.admitted is None:
            self.end("abort")


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
        generated = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=_LABEL)
        between = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between tokens of a sequence.", labels=_LABEL
        )
        for name, tokens in self._metrics.tokens.items():
            generated.add_metric([name], tokens.generated)
            between.add_metric([name], *tokens.buckets())
        for name, model in self._metrics.models.items():
            state = snapshot(model)
            gauges["num_requests_running"].add_metric([name], state["running"])
            gauges["num_requests_waiting"].add_metric([name], state["waiting"])
            gauges["kv_cache_usage_perc"].add_metric([name], state["kv_usage"])
            preempted.add_metric([name], state["preemptions"])
            refused.add_metric([name], model.refused)
            guessed.add_metric([name], state["guessed"])
            held.add_metric([name], state["held"])
            restarted.add_metric([name], state["restarts"])
        return [*gauges.values(), preempted, refused, guessed, held, restarted, generated, between]


def snapshot(model: ServedModel) -> dict[str, float]:
    """The state of a model as of now, zeros as long as it is not loaded, and what was counted since the server began."""
    counted = model.counts
    counts = {name: float(counted[name]) for name in ("preemptions", "guessed", "held", "restarts")}
    if not model.loaded:
        names = ("running", "waiting", "kv_blocks", "kv_used", "kv_cached", "kv_usage", "steps")
        return dict.fromkeys(names, 0.0) | counts
    stats, health = model.llm.engine.scheduler_stats(), model.llm.health()
    total, used = sum(pool.total for pool in stats.pools), sum(pool.used for pool in stats.pools)
    return {
        "running": stats.running,
        "waiting": stats.waiting + model.admission.waiting,
        "kv_blocks": total,
        "kv_used": used,
        "kv_cached": sum(pool.cached for pool in stats.pools),
        "kv_usage": used / total if total else 0.0,
        "steps": health.steps,
        **counts,
    }
