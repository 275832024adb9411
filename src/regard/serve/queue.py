"""The queue: which inputs of which requests make the next batch.

Inputs of concurrent requests share batches when they go to the same run with the same options. The request that got
least so far comes first, so that one line does not wait for the thousand of another; every few batches the oldest one
comes first, so that it is not forgotten. Batches are as large as a worker answers in a fraction of a second, and a
request of many inputs never has long ones with all workers; while small requests keep coming, one worker is theirs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SHORT = 4  # inputs in a short batch; a request of more is large
OLDEST = 4  # of so many batches, one begins with the oldest request
SHORTEST, SLICE = 0.02, 0.25  # seconds between which a batch takes at most, if that can be helped
SINGLES = 4.0  # and it takes as long as so many inputs do that are answered alone
FEWEST = 8  # inputs that share a batch even if they take longer: fewer would waste most of the processor
FIRST_COST, FIRST_SINGLE = 512, 0.025  # of batches of which nothing is known yet
SMOOTHING = 0.2
ROOM = 1 / 64  # of the capacity: with less, nothing is taken on, so that refusals need not look at what is asked
KEPT = 1.0  # seconds after a small request in which a worker is kept for others


@dataclass
class BatchSpeed:
    """What is known about the batches of a run and kind."""

    budget: float = FIRST_COST  # padded cost of a batch
    single: float = FIRST_SINGLE  # seconds of one input alone

    @property
    def slice(self) -> float:
        return min(SLICE, max(SHORTEST, SINGLES * self.single))


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
    pieces: deque[dict[str, Any]] = field(default_factory=deque)  # of a stream, that its client has not got yet
    news: asyncio.Future[None] | None = None  # is set when there are pieces, or all results
    cancelled: bool = False
    started: bool = False  # a stream of which the client has got something
    remaining: int = 0  # cost of what waits
    served: int = 0  # cost of what went to a worker

    def __post_init__(self) -> None:
        self.remaining = sum(self.costs)
        self.waiting = sorted(range(len(self.inputs)), key=self.costs.__getitem__, reverse=True)  # equal ones together

    @property
    def large(self) -> bool:
        return len(self.inputs) > SHORT

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.inputs)

    async def wait(self) -> None:
        """Wait for pieces, or for all results."""
        if not self.pieces and not self.done:
            self.news = asyncio.get_running_loop().create_future()
            await self.news

    def tell(self, piece: dict[str, Any]) -> None:
        """Take a piece of a stream."""
        self.started = True
        self.pieces.append(piece)
        self._wake()

    def give(self, index: int, result: dict[str, Any]) -> None:
        """Take the result of one input."""
        self.results[index] = result
        if self.done:
            self._wake()

    def _wake(self) -> None:
        if self.news is not None and not self.news.done():
            self.news.set_result(None)

    def fail(self, message: str, status: int) -> None:
        """End with an error for all inputs that have no result."""
        for index in range(len(self.inputs)):
            if index not in self.results:
                self.give(index, {"error": message, "status": status})


@dataclass
class InputBatch:
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
        self._small = -KEPT  # when the last small request came
        self._speeds: dict[tuple[str, str], BatchSpeed] = {}  # by run and kind
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return sum(len(job.waiting) for job in self._jobs.values())

    @property
    def full(self) -> bool:
        """Whether nothing more is taken on, however small it is."""
        return self.cost > 0 and self.capacity - self.cost < ROOM * self.capacity

    def add(self, job: Job, now: float) -> None:
        """Let a job wait, or refuse it. An empty queue takes any job: its own limits have been checked."""
        if self.cost and self.cost + job.remaining > self.capacity:
            raise QueueFull
        job.arrived = now
        if not job.large:
            self._small = now
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

    def take(self, now: float = 0.0, free: int = 2, workers: int = 2) -> InputBatch | None:
        """The next batch, or None if nothing waits; `free` of the `workers` have no long batch.

        The last of them gets few inputs of large requests, or none if it is kept for small ones.
        """
        short = free <= 1
        kept = short and workers > 1 and now - self._small < KEPT
        waiting = [job for job in self._jobs.values() if not (kept and job.large)]
        if not waiting:
            return None
        self._taken += 1
        oldest = self._taken % OLDEST == 0
        jobs = sorted(waiting, key=lambda job: (0 if oldest else job.served, job.arrived))
        first = jobs[0]
        batch = InputBatch(first.group)
        if first.waiting[-1] in first.retried or first.group.alone:
            self._move(batch, first)
            return batch
        longest, budget = 0, self._speed(first.group).budget
        for job in (job for job in jobs if job.group == first.group):
            most = SHORT if short and job.large else len(job.waiting)
            while job.waiting and most and job.waiting[-1] not in job.retried:
                longest = max(longest, job.costs[job.waiting[-1]])
                padded, count = longest * (len(batch.entries) + 1), len(batch.entries)
                if count and padded > (self.batch_cost if count < FEWEST else budget):
                    return batch
                self._move(batch, job)
                most -= 1
        return batch

    def measure(self, batch: InputBatch, seconds: float) -> None:
        """Learn from the time that a batch took how large the next ones of its kind should be."""
        speed, count = self._speed(batch.group), len(batch.entries)
        longest = max(job.costs[index] for job, index in batch.entries)
        if count == 1:
            speed.single += SMOOTHING * (seconds - speed.single)
        elif seconds > speed.slice:
            speed.budget = max(1.0, min(speed.budget, longest * count * speed.slice / seconds))
        elif longest * (count + 1) > speed.budget:  # it was full
            speed.budget = min(self.batch_cost, speed.budget * min(2.0, speed.slice / seconds))

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
