"""The service: jobs in, results out, by way of the queue and the worker pool. HTTP is the business of others."""

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
HANGING = 5.0  # seconds after its deadline until a batch that does not stop costs its worker the life
SMOOTHING = 0.1  # of the measured speed
WATCHED = 0.1  # seconds between two looks at the deadlines


@dataclass
class Numbers:
    """Counts for the metrics."""

    batches: int = 0
    inputs: int = 0
    restarts: int = 0
    seconds_per_cost: float = 0.0


@dataclass
class RunningBatch:
    """A batch that a worker has."""

    batch: InputBatch
    began: float


class Service:
    """Answers jobs with worker processes; the answers do not depend on what else is asked at the time."""

    def __init__(self, settings: PoolSettings, capacity: int, batch_cost: int, deadline: float) -> None:
        self.settings, self.deadline = settings, deadline
        self.queue = Queue(capacity, batch_cost)
        self.numbers = Numbers()
        self.on_batch: Callable[[InputBatch, float], None] = lambda batch, seconds: None
        self._pool = self._new_pool()
        self._jobs: set[Job] = set()  # that somebody waits for
        self._running: dict[WorkerConnection, RunningBatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # that start processes, or end those of an older state of the runs
        self._reloading = asyncio.Lock()

    def _new_pool(self) -> Pool:
        return Pool(self.settings, self._received, self._ended)

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """What clients can ask about each run."""
        return self._pool.runs

    @property
    def workers(self) -> int:
        """Workers that can answer."""
        return sum(worker.alive for worker in self._pool.workers)

    @property
    def ready(self) -> bool:
        """Whether there is a worker that can answer."""
        return any(worker.alive for worker in self._pool.workers)

    @property
    def idle(self) -> bool:
        return not len(self.queue) and not self._running

    async def start(self) -> None:
        """Load the runs; a UserError says why one cannot be loaded."""
        await self._pool.start()
        self._begin(self._watch())

    async def _watch(self) -> None:
        """End jobs whose time is over, and workers that do not stop then; a timer for each would cost more."""
        while True:
            await asyncio.sleep(WATCHED)
            now = time.monotonic()
            for job in [each for each in self._jobs if now - each.arrived > self.deadline]:
                self._cancel(job)
                job.fail(f"not finished within {plural(self.deadline, 'second', 'g')}", 504)
            limit = self.deadline + HANGING
            for worker in [each for each, running in self._running.items() if now - running.began > limit]:
                await asyncio.to_thread(worker.child.kill)

    async def close(self) -> None:
        """End all processes; what is still being answered fails."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()

    def submit(self, job: Job) -> None:
        """Take on a job, or raise QueueFull; `finish` ends it."""
        self.queue.add(job, time.monotonic())
        self._jobs.add(job)
        self._dispatch()

    def finish(self, job: Job) -> None:
        """Forget a job that nobody waits for any more, and stop its work if there is any left."""
        self._jobs.discard(job)
        if not job.done:
            self._cancel(job)

    def _cancel(self, job: Job) -> None:
        """Drop what waits of a job, and the batches that were wanted for it alone."""
        job.cancelled = True
        self.queue.remove(job)
        for worker, running in self._running.items():
            if not running.batch.wanted and worker.alive:
                worker.send({"cancel": True})

    def wait_seconds(self) -> float:
        """A guess of how long what waits will take."""
        return self.queue.cost * self.numbers.seconds_per_cost / max(1, self.settings.workers)

    async def reload(self) -> None:
        """Load the runs anew from their directories; requests go to the old processes until the new ones are ready."""
        async with self._reloading:
            pool = self._new_pool()
            await pool.start()
            old, self._pool = self._pool, pool
            self._begin(self._close_when_idle(old))
            self._dispatch()

    async def _close_when_idle(self, pool: Pool) -> None:
        try:
            while any(worker in self._running for worker in pool.workers):
                await asyncio.sleep(0.05)
        finally:
            await pool.close()

    def _dispatch(self) -> None:
        """Give batches to all workers that are free."""
        if not self.queue.cost:
            return
        for worker in self._pool.workers:
            if not worker.alive or worker in self._running:
                continue
            workers, now = self.settings.workers, time.monotonic()
            without = workers - sum(running.batch.long for running in self._running.values())
            batch = self.queue.take(now, without, workers)
            if batch is None:
                return
            self._running[worker] = RunningBatch(batch, now)
            group = batch.group
            worker.send({"run": group.run, "kind": group.kind, "options": group.options, "inputs": batch.inputs})

    def _received(self, worker: WorkerConnection, message: dict[str, Any]) -> None:
        """A piece of a stream, or the results of a batch, which are None if it was cancelled."""
        if "piece" in message:
            self._running[worker].batch.entries[0][0].tell(message["piece"])
            return
        batch, seconds = self._take_back(worker)
        results = message["results"]
        for (job, index), result in zip(batch.entries, results or (), strict=results is not None):
            if not job.cancelled:
                job.give(index, result)
        self._dispatch()
        asyncio.get_running_loop().call_soon(self._measure, batch, seconds)  # answers first

    def _ended(self, worker: WorkerConnection) -> None:
        """Try the inputs of a worker that has ended once more, each alone; those that have been are answered."""
        if worker in self._running:
            batch, _ = self._take_back(worker)
            for job, index in batch.entries:
                if job.cancelled:
                    continue
                if index in job.retried or job.started:
                    job.give(index, {"error": "the process that worked on this input has ended", "status": 503})
                else:
                    self.queue.put_back([(job, index)])
        if worker in self._pool.workers:
            self.numbers.restarts += 1
            log.warning("a worker process (%d) has ended; another one is started", worker.pid)
            self._begin(self._replace_until_done(self._pool))
        self._dispatch()

    def _take_back(self, worker: WorkerConnection) -> tuple[InputBatch, float]:
        """The batch of a worker that has finished or ended, and the seconds that it took."""
        running = self._running.pop(worker)
        return running.batch, time.monotonic() - running.began

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace_until_done(self, pool: Pool) -> None:
        delay = 0.1
        while pool is self._pool:
            try:
                await pool.replace()
            except (UserError, OSError) as error:
                log.error("a worker process could not be started: %s", error)
                await asyncio.sleep(delay)
                delay = min(5.0, 2 * delay)
            else:
                self._dispatch()
                return

    def _measure(self, batch: InputBatch, seconds: float) -> None:
        numbers = self.numbers
        self.queue.measure(batch, seconds)
        numbers.batches += 1
        numbers.inputs += len(batch.entries)
        rate = seconds / max(1, batch.cost)
        numbers.seconds_per_cost += SMOOTHING * (rate - numbers.seconds_per_cost) if numbers.batches > 1 else rate
        self.on_batch(batch, seconds)
