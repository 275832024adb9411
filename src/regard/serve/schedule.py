"""The queue: which inputs of which requests make the next batch.

Inputs of concurrent requests share batches when they go to the same run with the same options. The request that got
least so far comes first, so that one line does not wait for the thousand of another; every few batches the oldest one
comes first, so that it is not forgotten. Batches are as large as a worker answers in a fraction of a second, and a
request of many inputs never has long ones with all workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SHORT = 4  # inputs in a short batch; a request of more is large
OLDEST = 4  # of so many batches, one begins with the oldest request
SLICE = 0.25  # seconds that a batch should take at most
FIRST_COST = 512  # of a batch of which nothing is known yet


@dataclass(frozen=True)
class Group:
    """What inputs have in common that may share a batch."""

    run: str
    kind: str
    options: str  # as JSON
    alone: bool = False  # streams: every input is a batch of its own


class QueueFull(Exception):
    """More work than the server takes on."""


@dataclass(eq=False)
class Job:
    """The inputs of one request, and their results as they come."""

    group: Group
    inputs: list[dict[str, Any]]
    costs: list[int]  # of each input, in tokens times hypotheses
    arrived: float = 0.0
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)  # indices of inputs, the next one last
    retried: set[int] = field(default_factory=set)  # those whose worker ended, to be tried once more, each alone
    done: asyncio.Event = field(default_factory=asyncio.Event)
    pieces: asyncio.Queue[dict[str, Any] | None] = field(default_factory=asyncio.Queue)  # of a stream
    cancelled: bool = False
    remaining: int = 0  # cost of what waits
    served: int = 0  # cost of what went to a worker

    def __post_init__(self) -> None:
        self.remaining = sum(self.costs)
        self.waiting = sorted(range(len(self.inputs)), key=lambda i: -self.costs[i])  # equal lengths side by side

    @property
    def large(self) -> bool:
        return len(self.inputs) > SHORT

    def give(self, index: int, result: dict[str, Any]) -> None:
        """Take the result of one input."""
        self.results[index] = result
        if len(self.results) == len(self.inputs):
            self.done.set()
            self.pieces.put_nowait(None)

    def fail(self, message: str, status: int) -> None:
        """End with an error for all inputs that have no result."""
        for index in range(len(self.inputs)):
            if index not in self.results:
                self.give(index, {"error": message, "status": status})


@dataclass
class Batch:
    """Inputs that are answered together."""

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
        """Whether requests of one line would have to wait long for its end."""
        return len(self.entries) > SHORT and any(job.large for job, _ in self.entries)

    @property
    def wanted(self) -> bool:
        return any(not job.cancelled for job, _ in self.entries)


class Queue:
    """Jobs with inputs that no worker has yet."""

    def __init__(self, capacity: int, batch_cost: int) -> None:
        """`capacity` is the most cost that may wait, `batch_cost` that of a batch."""
        self.capacity, self.batch_cost = capacity, batch_cost
        self.cost = 0  # of what waits
        self._taken = 0
        self._budgets: dict[tuple[str, str], float] = {}  # padded cost of a batch by run and kind
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return sum(len(job.waiting) for job in self._jobs.values())

    def add(self, job: Job, now: float) -> None:
        """Let a job wait, or refuse it. An empty queue takes any job: its own limits have been checked."""
        if self.cost and self.cost + job.remaining > self.capacity:
            raise QueueFull
        job.arrived = now
        self.cost += job.remaining
        self._jobs[id(job)] = job

    def put_back(self, entries: Iterable[tuple[Job, int]]) -> None:
        """Let inputs wait once more, each for a batch of its own."""
        for job, index in entries:
            job.retried.add(index)
            job.waiting.append(index)
            job.remaining += job.costs[index]
            self.cost += job.costs[index]
            self._jobs[id(job)] = job

    def remove(self, job: Job) -> None:
        """Forget what waits of a job."""
        if self._jobs.pop(id(job), None):
            self.cost -= job.remaining
            job.remaining = 0
            job.waiting.clear()

    def take(self, short: bool = False) -> Batch | None:
        """The next batch, or None if nothing waits; if `short`, with few inputs of large requests."""
        if not self._jobs:
            return None
        self._taken += 1
        oldest = self._taken % OLDEST == 0
        jobs = sorted(self._jobs.values(), key=lambda job: (0 if oldest else job.served, job.arrived))
        first = jobs[0]
        batch = Batch(first.group)
        if first.waiting[-1] in first.retried or first.group.alone:
            self._move(batch, first)
            return batch
        longest, budget = 0, self._budgets.get((first.group.run, first.group.kind), FIRST_COST)
        for job in (job for job in jobs if job.group == first.group):
            most = SHORT if short and job.large else len(job.waiting)
            while job.waiting and most and job.waiting[-1] not in job.retried:
                longest = max(longest, job.costs[job.waiting[-1]])
                if batch.entries and longest * (len(batch.entries) + 1) > budget:
                    return batch
                self._move(batch, job)
                most -= 1
        return batch

    def measure(self, batch: Batch, seconds: float) -> None:
        """Learn from the time that a batch took how large the next ones of its kind should be."""
        kind = (batch.group.run, batch.group.kind)
        budget = self._budgets.get(kind, FIRST_COST)
        longest = max(job.costs[index] for job, index in batch.entries)
        if seconds > SLICE:
            self._budgets[kind] = max(1.0, min(budget, longest * len(batch.entries) * SLICE / seconds))
        elif longest * (len(batch.entries) + 1) > budget:  # it was full
            self._budgets[kind] = min(self.batch_cost, budget * min(2.0, SLICE / seconds))

    def _move(self, batch: Batch, job: Job) -> None:
        index = job.waiting.pop()
        job.remaining -= job.costs[index]
        job.served += job.costs[index]
        self.cost -= job.costs[index]
        batch.entries.append((job, index))
        if not job.waiting:
            del self._jobs[id(job)]
