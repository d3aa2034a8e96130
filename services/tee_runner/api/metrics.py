"""Prometheus metrics on a port of their own: counts and times, nothing of any request."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tee_runner.engine.scheduler import Scheduler


class EngineCollector(Collector):
    """Reads the engine's counters when scraped."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterable[Metric]:
        """The current values."""
        stats = self._scheduler.stats
        wire = self._scheduler.runtime.wire_stats()
        counters = (
            ("gelo_requests", "Requests accepted", stats.requests),
            ("gelo_request_failures", "Requests that ended in an error", stats.failures),
            ("gelo_prompt_tokens", "Prompt tokens processed", stats.prompt_tokens),
            ("gelo_generated_tokens", "Tokens generated", stats.generated_tokens),
            ("gelo_steps", "Forward passes", stats.steps),
            ("gelo_step_seconds", "Time in forward passes", stats.step_seconds),
            ("gelo_offloads", "Matrix products offloaded", wire.offloads),
            ("gelo_offload_seconds", "Time waiting for the worker", wire.exchange_ns / 1e9),
            ("gelo_worker_compute_seconds", "Engine time the worker reports", wire.worker_ns / 1e9),
            (
                "gelo_integrity_failures",
                "Results that were not the product asked for",
                self._scheduler.runtime.integrity_failures,
            ),
            ("gelo_bytes_sent", "Protected bytes sent to the worker", wire.bytes_sent),
            ("gelo_bytes_received", "Result bytes from the worker", wire.bytes_received),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(name, text, value=value)
        profile = CounterMetricFamily(
            "gelo_profile_seconds", "Where the time of forward passes and sampling goes", labels=["bucket"]
        )
        for bucket, nanoseconds in self._scheduler.runtime.profile.nanoseconds.items():
            profile.add_metric([bucket], nanoseconds / 1e9)
        yield profile
        gauges = (
            ("gelo_requests_running", "Requests being generated", stats.running),
            ("gelo_requests_waiting", "Requests queued", stats.waiting),
            ("gelo_worker_connected", "1 while a worker session is open",
             int(self._scheduler.runtime.connected)),
        )  # fmt: skip
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)


def serve_metrics(scheduler: Scheduler, *, host: str, port: int) -> int:
    """Serve ``/metrics`` in a background thread; returns the port it got.

    Raises:
        OSError: the port cannot be bound.
    """
    registry = CollectorRegistry()
    registry.register(EngineCollector(scheduler))
    server, _ = start_http_server(port, addr=host, registry=registry)
    return int(server.server_port)
