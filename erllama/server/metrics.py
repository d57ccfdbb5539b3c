"""What `/metrics` tells, in Prometheus text."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, get_args

import trio
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from erllama import Completion
    from erllama.middleware import Call, Next
    from erllama.runtime.cache import Cache
    from erllama.types import Stats

    from .pool import Pool

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Op = Literal["infer", "continue"]  # the latter: its session holds a sequence that it goes on from
SHORT_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counters, gauges and histograms of one server. Gauges are read when somebody scrapes."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        of_request, of_model = ("surface", "path", "status"), ("model",)
        registry = self._registry
        self._requests = Counter("erllama_requests", "HTTP requests answered", of_request, registry=registry)
        self._duration = Histogram(
            "erllama_request_duration_seconds", "HTTP requests, to their last byte", ("surface", "path"),
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "erllama_tokens",
            "Tokens: of prompts, of these reused, generated, embedded",
            ("model", "kind"),
            registry=registry,
        )
        self._hits = Counter(
            "erllama_cache_hits", "Requests by how they were admitted", ("model", "kind"), registry=registry
        )
        self._cancelled = Counter(
            "erllama_cancelled", "Answers whose client left, or that failed", of_model, registry=registry
        )
        self._prefill = self._histogram("erllama_prefill_duration_seconds", "Computing the prompt")
        self._first = self._histogram("erllama_first_token_seconds", "Submission to the first token")
        self._decode = self._histogram("erllama_generation_duration_seconds", "First to last token")
        self._admit = Histogram(
            "erllama_engine_admit_duration_seconds", "Handing a request to the engine, rendering included",
            ("op",), buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._chat = {
            "chat_apply": self._histogram(
                "erllama_chat_apply_duration_seconds", "Rendering a chat", SHORT_SECONDS
            ),
            "chat_parse": self._histogram(
                "erllama_chat_parse_duration_seconds", "Reading a chat's whole answer", SHORT_SECONDS
            ),
        }
        for op in get_args(Op):
            self._admit.labels(op)
        self._streams = Gauge(
            "erllama_active_answers", "Answers being generated", of_model, registry=registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, text, ("model",), buckets=buckets, registry=self._registry)

    def watch(self, pool: Pool) -> None:
        """Report the pool's gauges too."""
        self._registry.register(_PoolCollector(pool))

    def watch_cache(self, cache: Cache) -> None:
        """Report the tiers of an engine's cache too."""
        self._registry.register(_TierCollector(cache))

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)

    # --- what happened ---

    def served(self, surface: str, path: str, status: int, seconds: float) -> None:
        """A request is over. `path`: the route's, so that labels stay few."""
        self._requests.labels(surface, path, str(status)).inc()
        self._duration.labels(surface, path).observe(seconds)

    async def watch_chat(self, call: Call, following: Next) -> Any:
        """Middleware of chats: how long they are rendered and read. Raises and cancels as they do."""
        histogram = self._chat.get(call.name)
        if histogram is None:
            return await following(call)
        started = time.monotonic()
        result = await following(call)
        # Read while it was generated: the call comes at the end, and says how long that took in all.
        seconds = call.arguments.get("seconds", time.monotonic() - started)
        histogram.labels(call.model_id).observe(seconds)
        return result

    def admitted(self, op: Op, seconds: float) -> None:
        """The engine has a request."""
        self._admit.labels(op).observe(seconds)

    def embedded(self, model: str, n_tokens: int) -> None:
        """Tokens were embedded."""
        self._tokens.labels(model, "embedded").inc(n_tokens)

    def begun(self, model: str) -> None:
        """An answer is being generated."""
        self._streams.labels(model).inc()

    def ended(self, model: str, stats: Stats, completion: Completion | None) -> None:
        """It is over; without a completion its client left, or it failed: what was computed still counts."""
        self._streams.labels(model).dec()
        for kind, n in (
            ("prompt", stats.n_prompt),
            ("cached", stats.n_cached),
            ("generated", stats.n_generated),
        ):
            self._tokens.labels(model, kind).inc(n)
        if completion is None:
            self._cancelled.labels(model).inc()
            return
        self._hits.labels(model, completion.cache_hit_kind).inc()
        self._prefill.labels(model).observe(stats.prefill_s)
        self._first.labels(model).observe(stats.first_token_s)
        self._decode.labels(model).observe(stats.decode_s)


class _PoolCollector(Collector):
    """Gauges of the pool and its models, read at each scrape."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._busy = BusyRatio()

    def collect(self) -> Iterator[Metric]:
        """See prometheus-client."""
        yield from self._of_models()
        statistics = self._pool.statistics()
        for name, text, value in (
            ("erllama_model_loads", "Models loaded", statistics.n_loads),
            ("erllama_model_load_failures", "Loads that failed", statistics.n_failed_loads),
            ("erllama_model_unloads", "Models unloaded", statistics.n_unloads),
        ):
            yield CounterMetricFamily(name, text, value=value)
        busy = GaugeMetricFamily("erllama_busy_ratio", "Share of time since the last scrape", labels=["kind"])
        for kind, ratio in self._busy.sample().items():
            busy.add_metric([kind], ratio)
        yield busy

    def _of_models(self) -> Iterator[Metric]:
        names = ["model"]
        loaded = GaugeMetricFamily("erllama_model_loaded", "1 if it is loaded", labels=names)
        running = GaugeMetricFamily("erllama_requests_running", "Requests that hold a place", labels=names)
        queued = GaugeMetricFamily("erllama_queue_depth", "Requests that wait for a place", labels=names)
        idle = GaugeMetricFamily("erllama_model_idle_seconds", "Since a request last had it", labels=names)
        steps = CounterMetricFamily("erllama_steps", "Calls of llama_decode", labels=names)
        for entry in self._pool.all_entries():
            label = [entry.spec.name]
            loaded.add_metric(label, float(entry.is_loaded))
            running.add_metric(label, entry.n_running)
            queued.add_metric(label, entry.n_waiting)
            if entry.model is None or not entry.is_loaded:
                continue
            idle.add_metric(label, 0.0 if entry.n_inside else trio.current_time() - entry.last_active)
            steps.add_metric(label, entry.model.statistics().n_steps)
        yield from (loaded, running, queued, idle, steps)


class _TierCollector(Collector):
    """Gauges of the tiers, and what was not saved, read at each scrape."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        """See prometheus-client."""
        names = ["tier"]
        on = GaugeMetricFamily("erllama_cache_tier_on", "0 while an error has it off", labels=names)
        used = GaugeMetricFamily("erllama_cache_used_bytes", "What the tier holds", labels=names)
        most = GaugeMetricFamily("erllama_cache_max_bytes", "What it may hold", labels=names)
        evicted = CounterMetricFamily("erllama_cache_evictions", "Parts that made room", labels=names)
        for tier in self._cache.list_tiers():
            label = [tier.name]
            on.add_metric(label, float(tier.on))
            used.add_metric(label, tier.used_bytes)
            most.add_metric(label, tier.max_bytes)
            evicted.add_metric(label, tier.evictions)
        yield from (on, used, most, evicted)
        counters = self._cache.counters()
        refused = CounterMetricFamily("erllama_cache_refusals", "Saves not taken", labels=["reason"])
        for reason, n in counters.refusals.items():
            refused.add_metric([reason], n)
        yield refused
        yield CounterMetricFamily(
            "erllama_cache_tier_failures",
            "Times that an error switched a tier off",
            value=counters.tier_failures,
        )


class BusyRatio:
    """How busy the event loop's thread and the worker threads were since the last sample, 0 to 1."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), time.thread_time()

    def sample(self) -> dict[str, float]:
        """Thread: the event loop's."""
        wall, cpu = time.monotonic(), time.thread_time()
        passed = max(wall - self._wall, 1e-9)
        loop = min(max((cpu - self._cpu) / passed, 0.0), 1.0)
        self._wall, self._cpu = wall, cpu
        limiter = trio.to_thread.current_default_thread_limiter()
        return {"event_loop": loop, "threads": limiter.borrowed_tokens / max(limiter.total_tokens, 1)}
