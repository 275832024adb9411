"""Metrics for Prometheus: counts, times and what waits. Labels name endpoints and statuses, never texts or keys."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from regard.serve.schedule import Batch
from regard.serve.service import Service

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Monitor:
    """The metrics of one server."""

    def __init__(self, service: Service) -> None:
        self.registry = registry = CollectorRegistry()
        names = ("path", "status")
        self._requests = Counter("regard_requests", "Requests answered.", names, registry=registry)
        self._seconds = Histogram(
            "regard_request_seconds", "Time to answer.", ("path",), buckets=SECONDS, registry=registry
        )
        self._batches = Histogram(
            "regard_batch_inputs", "Inputs of a batch.", ("run", "kind"), buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=registry,
        )  # fmt: skip
        self._work = Counter("regard_worker_seconds", "Time of workers.", ("run", "kind"), registry=registry)
        for name, text, value in (
            ("regard_queue_inputs", "Inputs that wait for a worker.", lambda: len(service.queue)),
            ("regard_queue_tokens", "Tokens times hypotheses that wait.", lambda: service.queue.cost),
            ("regard_workers", "Workers that can answer.", lambda: service.workers),
            ("regard_worker_restarts", "Workers that had to be replaced.", lambda: service.numbers.restarts),
        ):
            Gauge(name, text, registry=registry).set_function(value)
        service.on_batch = self._batch
        self._labelled = cache(_labelled)  # to look labels up takes longer than to count

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._labelled(self._requests, path, str(status)).inc()
        self._labelled(self._seconds, path).observe(seconds)

    def _batch(self, batch: Batch, seconds: float) -> None:
        self._labelled(self._batches, batch.group.run, batch.group.kind).observe(len(batch.entries))
        self._labelled(self._work, batch.group.run, batch.group.kind).inc(seconds)

    def text(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self.registry)


def _labelled(metric: Counter | Histogram, *labels: str) -> Any:
    return metric.labels(*labels)
