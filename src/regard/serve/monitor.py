"""Metrics for Prometheus: counts, times and the length of the queue. Labels never contain texts or keys.

Requests are counted in plain numbers: updating a metric of prometheus_client takes as long as validating a request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from regard.serve.queue import InputBatch
from regard.serve.service import Service

SECONDS_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
INPUTS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Labels = tuple[str, ...]


class Tally:
    """A histogram: the number of values between bounds, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """The number of values up to each bound, in the form of Prometheus."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Monitor:
    """The metrics of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: defaultdict[Labels, Tally] = defaultdict(lambda: Tally(SECONDS_BOUNDS))
        self._batches: defaultdict[Labels, Tally] = defaultdict(lambda: Tally(INPUTS_BOUNDS))
        self._work: defaultdict[Labels, float] = defaultdict(float)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        service.on_batch = self._batch

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests[path, status] += 1
        self._seconds[path,].add(seconds)

    def _batch(self, batch: InputBatch, seconds: float) -> None:
        labels = batch.group.run, batch.group.kind
        self._batches[labels].add(len(batch.entries))
        self._work[labels] += seconds

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("regard_requests", "Requests answered.", labels=("path", "status"))
        for (path, status), count in self._requests.items():
            requests.add_metric((path, str(status)), count)
        work = CounterMetricFamily("regard_worker_seconds", "Time of workers.", labels=("run", "kind"))
        for labels, seconds in self._work.items():
            work.add_metric(labels, seconds)
        yield from (requests, work)
        for name, text, label_names, tallies in (
            ("regard_request_seconds", "Time to answer.", ("path",), self._seconds),
            ("regard_batch_inputs", "Inputs of a batch.", ("run", "kind"), self._batches),
        ):
            family = HistogramMetricFamily(name, text, labels=label_names)
            for labels, tally in tallies.items():
                family.add_metric(labels, tally.buckets(), tally.sum)
            yield family
        service = self._service
        queue = service.queue
        yield GaugeMetricFamily("regard_queue_inputs", "Inputs waiting for a worker.", len(queue))
        yield GaugeMetricFamily("regard_queue_tokens", "Tokens times hypotheses waiting for a worker.", queue.cost)
        yield GaugeMetricFamily("regard_workers", "Running workers.", service.workers)
        yield GaugeMetricFamily("regard_worker_restarts", "Workers that were replaced.", service.numbers.restarts)

    def text(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self._registry)
