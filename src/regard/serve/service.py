"""The service answers jobs through the queue and the worker pool. It does not depend on HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from regard.errors import UserError, plural
from regard.serve.pool import Pool, PoolSettings, WorkerConnection
from regard.serve.queue import InputBatch, Job, Queue

log = logging.getLogger("regard.serve")
KILL_SECONDS = 5.0  # grace period before a worker stuck on an expired batch is killed
DEADLINE_CHECK_SECONDS = 0.1
SMOOTHING = 0.1  # of the measured speed
MAX_BATCH_COST = 16_384  # tokens times hypotheses


@dataclass
class Numbers:
    """Counts for the metrics."""

    batches: int = 0
    restarts: int = 0
    seconds_per_cost: float = 0.0


@dataclass
class RunningBatch:
    """The batch of a worker."""

    batch: InputBatch
    began: float


class Service:
    """Answers jobs with worker processes; concurrent jobs do not change the answers."""

    def __init__(self, settings: PoolSettings, capacity: int, deadline: float) -> None:
        self.settings = settings
        self.deadline = deadline
        self.queue = Queue(capacity, MAX_BATCH_COST)
        self.numbers = Numbers()
        self.on_batch: Callable[[InputBatch, float], None] = lambda batch, seconds: None
        self._pool = self._new_pool()
        self._jobs: set[Job] = set()  # unfinished
        self._running: dict[WorkerConnection, RunningBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # starting or ending processes
        self._reloading = asyncio.Lock()
        self._closing = asyncio.Event()

    def _new_pool(self) -> Pool:
        return Pool(self.settings, self._on_message, self._on_end)

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """Name -> description of a run, for clients."""
        return self._pool.runs

    @property
    def workers(self) -> int:
        """The number of running workers."""
        return sum(worker.alive for worker in self._pool.workers)

    @property
    def ready(self) -> bool:
        """Whether at least one worker is running."""
        return any(worker.alive for worker in self._pool.workers)

    @property
    def idle(self) -> bool:
        return not len(self.queue) and not self._running

    async def start(self) -> None:
        """Load the runs; raises a UserError if a run cannot be loaded."""
        await self._pool.start()
        self._begin(self._watch())

    async def _watch(self) -> None:
        """Fail expired jobs, and kill workers stuck on them; one timer per job would cost more."""
        while not self._closing.is_set():
            await self._pause(DEADLINE_CHECK_SECONDS)
            now = time.monotonic()
            for job in [each for each in self._jobs if now - each.arrived > self.deadline]:
                self._cancel(job)
                job.fail(f"not finished within {plural(self.deadline, 'second', 'g')}", 504)
            limit = self.deadline + KILL_SECONDS
            for worker in [each for each, running in self._running.items() if now - running.began > limit]:
                await asyncio.to_thread(worker.child.kill)

    async def close(self) -> None:
        """End all processes; unfinished jobs fail."""
        self._closing.set()
        # The tasks are not cancelled: a process that is being started or ended would be lost.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._pool.close()

    async def _pause(self, seconds: float) -> None:
        """Sleep; return early when the service closes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def submit(self, job: Job) -> None:
        """Accept a job, or raise QueueFull; the caller must call `finish` afterwards."""
        self.queue.add(job, time.monotonic())
        self._jobs.add(job)
        self._dispatch()

    def finish(self, job: Job) -> None:
        """Forget a job, and cancel the rest of its work."""
        self._jobs.discard(job)
        if not job.done:
            self._cancel(job)

    def _cancel(self, job: Job) -> None:
        """Drop the queued inputs of a job, and cancel batches that no other job needs."""
        job.cancelled = True
        self.queue.remove(job)
        for worker, running in self._running.items():
            if not running.batch.needed and worker.alive:
                worker.send({"cancel": True})

    def wait_seconds(self) -> float:
        """An estimate of the time until the queue is empty."""
        return self.queue.cost * self.numbers.seconds_per_cost / max(1, self.settings.workers)

    async def reload(self) -> None:
        """Reload the runs from their directories; the old processes answer until the new ones are ready."""
        async with self._reloading:
            pool = self._new_pool()
            await pool.start()
            old = self._pool
            self._pool = pool
            self._begin(self._close_when_idle(old))
            self._dispatch()

    async def _close_when_idle(self, pool: Pool) -> None:
        while not self._closing.is_set() and any(worker in self._running for worker in pool.workers):
            await self._pause(0.05)
        await pool.close()

    def _dispatch(self) -> None:
        """Give batches to all idle workers."""
        if not self.queue.cost:
            return
        for worker in self._pool.workers:
            if not worker.alive or worker in self._running:
                continue
            now = time.monotonic()
            workers = self.settings.workers
            free = workers - sum(running.batch.long for running in self._running.values())
            batch = self.queue.take(now, free, workers)
            if batch is None:
                return
            self._running[worker] = RunningBatch(batch, now)
            group = batch.group
            worker.send({"run": group.run, "kind": group.kind, "options": group.options, "inputs": batch.inputs})

    def _on_message(self, worker: WorkerConnection, message: dict[str, Any]) -> None:
        """Take a piece of a stream, or the results of a batch (None if it was cancelled)."""
        if "piece" in message:
            job, index = self._running[worker].batch.entries[0]
            job.add_piece(index, message["piece"])
            return
        batch, seconds = self._take_back(worker)
        results = message["results"]
        for (job, index), result in zip(batch.entries, results or (), strict=results is not None):
            if not job.cancelled:
                job.add_result(index, result)
        self._dispatch()
        asyncio.get_running_loop().call_soon(self._measure, batch, seconds)  # after the answers are sent

    def _on_end(self, worker: WorkerConnection) -> None:
        """Retry the inputs of a worker that has ended, each in its own batch; inputs that were retried before fail."""
        if worker in self._running:
            batch, _ = self._take_back(worker)
            for job, index in batch.entries:
                if job.cancelled:
                    continue
                if index in job.retried or job.started:
                    error = "the process that worked on this input has ended"
                    job.add_result(index, {"error": error, "status": 503})
                else:
                    self.queue.put_back([(job, index)])
        if worker in self._pool.workers:
            self.numbers.restarts += 1
            log.warning("a worker process (%d) has ended; starting a replacement", worker.pid)
            self._begin(self._replace_until_done(self._pool))
        self._dispatch()

    def _take_back(self, worker: WorkerConnection) -> tuple[InputBatch, float]:
        """The batch of a worker that has finished or ended, and its duration in seconds."""
        running = self._running.pop(worker)
        return running.batch, time.monotonic() - running.began

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace_until_done(self, pool: Pool) -> None:
        delay = 0.1
        while pool is self._pool and not self._closing.is_set():
            try:
                await pool.replace()
            except (UserError, OSError) as error:
                log.error("a worker process could not be started: %s", error)
                await self._pause(delay)
                delay = min(5.0, 2 * delay)
            else:
                self._dispatch()
                return

    def _measure(self, batch: InputBatch, seconds: float) -> None:
        numbers = self.numbers
        self.queue.measure(batch, seconds)
        numbers.batches += 1
        rate = seconds / max(1, batch.cost)
        numbers.seconds_per_cost += SMOOTHING * (rate - numbers.seconds_per_cost) if numbers.batches > 1 else rate
        self.on_batch(batch, seconds)
