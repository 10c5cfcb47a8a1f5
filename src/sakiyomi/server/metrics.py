"""Metrics for Prometheus: vLLM's names where it has the figure, so that its dashboards work; our own otherwise.

Counted in the engine's thread, once per round and sample; read by ``/metrics``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from sakiyomi.core.drops import Tau, TauWatch
from sakiyomi.core.outputs import Step
from sakiyomi.engine.request import GIVEN
from sakiyomi.kernels import build
from sakiyomi.server.jobs import Job
from sakiyomi.server.kv_events import BLOCK

logger = logging.getLogger("sakiyomi")
CONTENT_TYPE = CONTENT_TYPE_LATEST
FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SLOW = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
POSITIONS = 16  # deeper ones are counted with the last


class Metrics:
    """All metrics of one server.

    Args:
        model: label of all of them, as vLLM has it.
        chosen: tau when the draft was chosen (`sakiyomi tune`); None: not known.
    """

    def __init__(self, model: str, chosen: Tau | None = None) -> None:
        self.registry = CollectorRegistry()

        def labelled(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, ("model_name", label), registry=self.registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("model_name",), registry=self.registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry).labels(model)

        self._model = model
        self.gauge("sakiyomi:compiling", "1 while the CPU kernels are compiled for this machine", build.building)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens prefilled")
        self.new_tokens = counter("vllm:generation_tokens", "New tokens")
        self._queried = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the cache")
        self._ended = labelled("vllm:request_success", "Finished samples, by reason", "finished_reason")
        self.refused = counter("sakiyomi:requests_refused", "Requests refused because the queue was full")
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token", FAST)
        self.between = histogram("vllm:inter_token_latency_seconds", "Time for a token after the first", FAST)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token", SLOW)
        self.queued = histogram("vllm:request_queue_time_seconds", "From arrival to a slot of the cache", FAST)
        self.prompt_sizes = histogram("vllm:request_prompt_tokens", "Prompt tokens of a sample", SIZES)
        self.new_sizes = histogram("vllm:request_generation_tokens", "New tokens of a sample", SIZES)
        self._drafts = counter("vllm:spec_decode_num_drafts", "Rounds with draft tokens")
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens proposed")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted")
        by_place = labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by depth", "position"
        )
        self._by_place = [by_place.labels(model, str(place)) for place in range(POSITIONS)]
        self._rounds = counter("sakiyomi:rounds", "Target passes after the prefill, times their samples")
        self._committed = counter("sakiyomi:committed_tokens", "Tokens committed by these passes")
        self.gauge("sakiyomi:tau", "Tokens per target pass and sample, since the start", self._tau)
        self._totals = [0, 0]
        self._watch = watch = None if chosen is None else TauWatch(chosen)
        if watch is not None:
            self.gauge("sakiyomi:tau_recent", "Tokens per target pass of the last rounds", lambda: watch.recent.value)
            self.gauge("sakiyomi:tau_chosen", "The same when the draft was chosen", lambda: watch.chosen.value)
            self.gauge(
                "sakiyomi:acceptance_fell", "1 where tau is lower than then by more than chance", lambda: watch.fell
            )

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a figure that is read when somebody asks for the page."""
        Gauge(name, text, ("model_name",), registry=self.registry).labels(self._model).set_function(value)

    def cache(self, used: Callable[[], float], size: Callable[[], float], blocks: int) -> None:
        """Add the figures of a KV cache.

        Args:
            used: share of its columns that are held.
            size: bytes that are allocated for it.
            blocks: of 16 tokens, that it has room for.
        """
        self.gauge("vllm:kv_cache_usage_perc", "Share of the cache's columns that are held, 1 is all", used)
        self.gauge("sakiyomi:kv_cache_bytes", "Bytes that are allocated for the cache", size)
        labels = ("model_name", "block_size", "num_gpu_blocks")
        config = Gauge("vllm:cache_config_info", "The cache, for routers: 1", labels, registry=self.registry)
        config.labels(self._model, str(BLOCK), str(blocks)).set(1)

    def _tau(self) -> float:
        rounds, committed = self._totals
        return committed / rounds if rounds else 0.0

    def step(self, job: Job, step: Step, now: float) -> None:
        """Count the tokens of a step."""
        request = job.request
        assert request is not None
        count = sum(entry.source != GIVEN for entry in step.trace)  # the others were written by another server
        if not job.first and count:
            self.queued.observe(max(0.0, request.began - job.arrived))
            self.first_token.observe(now - job.arrived)
            self._queried.inc(request.prompt_tokens)
            self._hits.inc(request.stats.reused)
            self.prompt_tokens.inc(request.prompt_tokens - request.stats.reused)
            count -= 1
            self.new_tokens.inc()
        if count:
            self.new_tokens.inc(count)
            self.between.observe((now - job.last) / count)
            self._totals[0] += 1
            self._totals[1] += count
            self._rounds.inc()
            self._committed.inc(count)
            if self._watch is not None and self._watch.add(count):
                self._tell(self._watch)
        kept = sum(entry.status == "accepted" for entry in step.trace)
        drafted = request.stats.drafted - job.drafted_before
        job.drafted_before += drafted
        if drafted:
            self._drafts.inc()
            self._drafted.inc(drafted)
        if kept:
            self._accepted.inc(kept)
            for place in range(kept):
                self._by_place[min(place, POSITIONS - 1)].inc()
        if step.finish_reason is not None:
            self.whole.observe(now - job.arrived)
            self.prompt_sizes.observe(request.prompt_tokens)
            self.new_sizes.observe(request.stats.tokens)

    @staticmethod
    def _tell(watch: TauWatch) -> None:
        """Log that acceptance has fallen, or has recovered."""
        numbers = watch.recent.value, watch.chosen.value
        if watch.fell:
            logger.warning(
                "acceptance has fallen: tau is %.2f, and was %.2f when the draft was chosen; run sakiyomi tune with "
                "prompts like those of today",
                *numbers,
            )
        else:
            logger.info("acceptance is as it was: tau is %.2f, and was %.2f when the draft was chosen", *numbers)

    def ended(self, reason: str) -> None:
        """Count the end of a sample: stop, length, abort (by the client or the time limit) or error."""
        self._ended.labels(self._model, reason).inc()

    def total(self, name: str) -> float:
        """Value of a metric, by its name on the page."""
        return self.registry.get_sample_value(name, {"model_name": self._model}) or 0.0

    def page(self) -> bytes:
        """The page ``/metrics``."""
        return generate_latest(self.registry)
