"""The queue selects the inputs of the next batch.

Concurrent requests with the same run and options share batches, which take a fraction of a second. The least served
request goes first, so that short requests do not wait for long ones. Every few batches, the oldest request goes first,
so that it cannot starve. While small requests keep arriving, one worker is reserved for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SHORT_BATCH = 4  # inputs; a request with more inputs is large
OLDEST_EVERY = 4  # batches: one of these starts with the oldest request
MIN_BATCH_SECONDS = 0.02  # limits of the target batch time
MAX_BATCH_SECONDS = 0.25
BATCH_LATENCIES = 4.0  # target batch time, in multiples of the latency of a single input
MIN_SHARED = 8  # inputs that share a batch even if it takes longer; smaller batches would waste most of the CPU
INITIAL_COST = 512  # of a batch, before any has been measured
INITIAL_LATENCY = 0.025  # seconds of a single input, before any has been measured
SMOOTHING = 0.2
MIN_ROOM = 1 / 64  # of the capacity; with less room every request is refused, without reading its body
RESERVE_SECONDS = 1.0  # after a small request, one worker is reserved for small requests


@dataclass
class BatchSpeed:
    """The measured speed of a kind of batch with one run."""

    budget: float = INITIAL_COST  # padded cost of a batch
    latency: float = INITIAL_LATENCY  # seconds of a batch of one input

    @property
    def target_seconds(self) -> float:
        return min(MAX_BATCH_SECONDS, max(MIN_BATCH_SECONDS, BATCH_LATENCIES * self.latency))


@dataclass(frozen=True)
class Group:
    """Inputs share a batch only if these values are equal."""

    run: str
    kind: str
    options: str  # as JSON
    alone: bool = False  # every input has its own batch, as streams do


class QueueFull(Exception):
    """The queue has no room for a job."""


@dataclass(eq=False)
class Job:
    """The inputs of one request, and the results so far."""

    group: Group
    inputs: list[dict[str, Any]]
    costs: list[int]  # of each input, in tokens times hypotheses
    arrived: float = 0.0
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)  # indices of inputs, the next one last
    retried: set[int] = field(default_factory=set)  # indices of inputs whose worker ended
    pieces: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)  # of a stream, by input, not sent yet
    news: asyncio.Future[None] | None = None  # done when there are pieces, or all results
    cancelled: bool = False
    started: bool = False  # a stream: at least one piece has arrived
    remaining: int = 0  # cost of the waiting inputs
    served: int = 0  # cost of the inputs that went to a worker

    def __post_init__(self) -> None:
        self.remaining = sum(self.costs)
        # Inputs of similar cost share a batch.
        self.waiting = sorted(range(len(self.inputs)), key=self.costs.__getitem__, reverse=True)

    @property
    def large(self) -> bool:
        return len(self.inputs) > SHORT_BATCH

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.inputs)

    async def wait(self) -> None:
        """Wait for pieces, or for all results."""
        if not self.pieces and not self.done:
            self.news = asyncio.get_running_loop().create_future()
            await self.news

    def add_piece(self, index: int, piece: dict[str, Any]) -> None:
        self.started = True
        self.pieces.append((index, piece))
        self._wake()

    def add_result(self, index: int, result: dict[str, Any]) -> None:
        self.results[index] = result
        if self.done:
            self._wake()

    def _wake(self) -> None:
        if self.news is not None and not self.news.done():
            self.news.set_result(None)

    def fail(self, message: str, status: int) -> None:
        """Give every input without a result this error."""
        for index in range(len(self.inputs)):
            if index not in self.results:
                self.add_result(index, {"error": message, "status": status})


@dataclass
class InputBatch:
    """Inputs that a worker answers together."""

    group: Group
    entries: list[tuple[Job, int]] = field(default_factory=list)

    @property
    def inputs(self) -> list[dict[str, Any]]:
        return [job.inputs[index] for job, index in self.entries]

    @property
    def cost(self) -> int:
        return sum(job.costs[index] for job, index in self.entries)

    @property
    def long(self) -> bool:
        """Whether a small request would have to wait long until this batch is done."""
        return len(self.entries) > SHORT_BATCH and any(job.large for job, _ in self.entries)

    @property
    def needed(self) -> bool:
        return any(not job.cancelled for job, _ in self.entries)


class Queue:
    """Jobs with inputs that wait for a worker."""

    def __init__(self, capacity: int, batch_cost: int) -> None:
        """`capacity` is the maximum cost of the waiting inputs, `batch_cost` of a batch."""
        self.capacity = capacity
        self.batch_cost = batch_cost
        self.cost = 0  # of the waiting inputs
        self._batches = 0
        self._last_small = -RESERVE_SECONDS  # arrival of the last small request
        self._speeds: dict[tuple[str, str], BatchSpeed] = {}  # by run and kind
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return sum(len(job.waiting) for job in self._jobs.values())

    @property
    def full(self) -> bool:
        """Whether every request is refused, however small it is."""
        return self.cost > 0 and self.capacity - self.cost < MIN_ROOM * self.capacity

    def add(self, job: Job, now: float) -> None:
        """Add a job, or raise QueueFull. An empty queue accepts any job: other limits bound its size."""
        if self.cost and self.cost + job.remaining > self.capacity:
            raise QueueFull
        job.arrived = now
        if not job.large:
            self._last_small = now
        self.cost += job.remaining
        self._jobs[id(job)] = job

    def put_back(self, entries: Iterable[tuple[Job, int]]) -> None:
        """Queue inputs for a retry, each in its own batch."""
        for job, index in entries:
            job.retried.add(index)
            job.waiting.append(index)
            job.remaining += job.costs[index]
            self.cost += job.costs[index]
            self._jobs[id(job)] = job

    def remove(self, job: Job) -> None:
        """Remove the waiting inputs of a job."""
        if self._jobs.pop(id(job), None):
            self.cost -= job.remaining
            job.remaining = 0
            job.waiting.clear()

    def take(self, now: float = 0.0, free: int = 2, workers: int = 2) -> InputBatch | None:
        """The next batch, or None if no input waits; `free` of the `workers` have no long batch.

        The last free worker gets only few inputs of large requests, and none while it is reserved for small requests.
        """
        short = free <= 1
        reserved = short and workers > 1 and now - self._last_small < RESERVE_SECONDS
        waiting = [job for job in self._jobs.values() if not (reserved and job.large)]
        if not waiting:
            return None
        self._batches += 1
        oldest = self._batches % OLDEST_EVERY == 0
        jobs = sorted(waiting, key=lambda job: (0 if oldest else job.served, job.arrived))
        first = jobs[0]
        batch = InputBatch(first.group)
        if first.waiting[-1] in first.retried or first.group.alone:
            self._move(batch, first)
            return batch
        longest = 0
        budget = self._speed(first.group).budget
        for job in (job for job in jobs if job.group == first.group):
            limit = SHORT_BATCH if short and job.large else len(job.waiting)
            while job.waiting and limit and job.waiting[-1] not in job.retried:
                longest = max(longest, job.costs[job.waiting[-1]])
                count = len(batch.entries)
                padded = longest * (count + 1)
                if count and padded > (self.batch_cost if count < MIN_SHARED else budget):
                    return batch
                self._move(batch, job)
                limit -= 1
        return batch

    def measure(self, batch: InputBatch, seconds: float) -> None:
        """Adapt the size of further batches to the measured time of a batch."""
        speed = self._speed(batch.group)
        count = len(batch.entries)
        longest = max(job.costs[index] for job, index in batch.entries)
        if count == 1:
            speed.latency += SMOOTHING * (seconds - speed.latency)
        elif seconds > speed.target_seconds:
            speed.budget = max(1.0, min(speed.budget, longest * count * speed.target_seconds / seconds))
        elif longest * (count + 1) > speed.budget:  # the batch was full
            speed.budget = min(self.batch_cost, speed.budget * min(2.0, speed.target_seconds / seconds))

    def _speed(self, group: Group) -> BatchSpeed:
        return self._speeds.setdefault((group.run, group.kind), BatchSpeed())

    def _move(self, batch: InputBatch, job: Job) -> None:
        index = job.waiting.pop()
        job.remaining -= job.costs[index]
        job.served += job.costs[index]
        self.cost -= job.costs[index]
        batch.entries.append((job, index))
        if not job.waiting:
            del self._jobs[id(job)]
