"""The service: jobs in, results out, by way of the queue and the worker pool. HTTP is the business of others."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from regard.errors import UserError
from regard.serve.pool import Pool, PoolSettings, WorkerConnection, WorkerEnded
from regard.serve.schedule import Batch, Job, Queue

log = logging.getLogger("regard.serve")
HANGING = 5.0  # seconds after its deadline until a batch that does not stop costs its worker the life
SMOOTHING = 0.1  # of the measured speed


@dataclass
class Numbers:
    """Counts for the metrics."""

    batches: int = 0
    inputs: int = 0
    restarts: int = 0
    seconds_per_cost: float = 0.0


class Service:
    """Answers jobs with worker processes; the answers do not depend on what else is asked at the time."""

    def __init__(self, settings: PoolSettings, capacity: int, batch_cost: int, deadline: float) -> None:
        self.settings, self.deadline = settings, deadline
        self.queue = Queue(capacity, batch_cost)
        self.numbers = Numbers()
        self.on_batch: Callable[[Batch, float], None] = lambda batch, seconds: None
        self._pool = Pool(settings, self._replace)
        self._old: set[asyncio.Task[None]] = set()  # pools that finish what they have begun
        self._running: dict[int, tuple[Batch, WorkerConnection]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = itertools.count(1)
        self._reloading = asyncio.Lock()

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        """What clients are told about each run."""
        return self._pool.runs

    @property
    def workers(self) -> int:
        """Workers that can answer."""
        return sum(worker.alive for worker in self._pool.workers)

    @property
    def ready(self) -> bool:
        """Whether there is a worker that can answer."""
        return self.workers > 0

    @property
    def idle(self) -> bool:
        return not len(self.queue) and not self._running

    async def start(self) -> None:
        """Load the runs; a UserError says why one cannot be loaded."""
        await self._pool.start()

    async def close(self) -> None:
        """End all processes; what is still being answered fails."""
        pools, tasks = [self._pool], list(self._tasks)
        await asyncio.gather(*(pool.close() for pool in pools), *self._old)
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, job: Job) -> None:
        """Take on a job, or raise QueueFull."""
        self.queue.add(job, time.monotonic())
        self._dispatch()

    def cancel(self, job: Job) -> None:
        """Drop a job whose client has left or whose time is over."""
        job.cancelled = True
        self.queue.remove(job)
        for number, (batch, worker) in self._running.items():
            if not batch.wanted:
                worker.cancel(number)

    def wait_seconds(self) -> float:
        """A guess of how long what waits will take."""
        return self.queue.cost * self.numbers.seconds_per_cost / max(1, self.settings.workers)

    async def reload(self) -> None:
        """Load the runs anew from their directories; requests go to the old processes until the new ones are ready."""
        async with self._reloading:
            pool = Pool(self.settings, self._replace)
            await pool.start()
            old, self._pool = self._pool, pool
            task = asyncio.create_task(self._finish(old))
            self._old.add(task)
            task.add_done_callback(self._old.discard)
            self._dispatch()

    async def _finish(self, pool: Pool) -> None:
        while any(worker in pool.workers for _, worker in self._running.values()):
            await asyncio.sleep(0.05)
        await pool.close()

    def _dispatch(self) -> None:
        """Give batches to all workers that are free."""
        while True:
            worker = next((each for each in self._pool.workers if each.alive and each.free), None)
            if worker is None:
                return
            workers = self.settings.workers
            without = workers - sum(batch.long for batch, _ in self._running.values())
            batch = self.queue.take(time.monotonic(), without, workers)
            if batch is None:
                return
            number = next(self._ids)
            self._running[number] = (batch, worker)
            worker.free = False
            task = asyncio.create_task(self._answer(number, batch, worker))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, batch: Batch, worker: WorkerConnection) -> None:
        group, began = batch.group, time.monotonic()
        options = json.loads(group.options)
        message = {"id": number, "run": group.run, "kind": group.kind, "options": options, "inputs": batch.inputs}
        hanging = asyncio.get_running_loop().call_later(self.deadline + HANGING, worker.kill)
        try:
            results = await worker.answer(message, batch.entries[0][0].tell)
        except WorkerEnded:
            self._recover(batch)
        else:
            seconds = time.monotonic() - began
            self._measure(batch, seconds)
            for (job, index), result in zip(batch.entries, results or (), strict=results is not None):
                job.give(index, result)
        finally:
            hanging.cancel()
            worker.free = True
            del self._running[number]
            self._dispatch()

    def _recover(self, batch: Batch) -> None:
        """Try the inputs of a batch whose worker has ended once more, each alone; those that have been are answered."""
        for job, index in batch.entries:
            if job.cancelled:
                continue
            if index in job.retried or job.started:
                job.give(index, {"error": "the process that worked on this input has ended", "status": 503})
            else:
                self.queue.put_back([(job, index)])

    def _replace(self, worker: WorkerConnection) -> None:
        if worker not in self._pool.workers:
            return
        self.numbers.restarts += 1
        log.warning("a worker process (%d) has ended; another one is started", worker.pid)
        task = asyncio.create_task(self._replace_until_done(self._pool))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace_until_done(self, pool: Pool) -> None:
        delay = 0.1
        while pool is self._pool:
            try:
                await pool.replace()
            except (UserError, EOFError, OSError) as error:
                log.error("a worker process could not be started: %s", error)
                await asyncio.sleep(delay)
                delay = min(5.0, 2 * delay)
            else:
                self._dispatch()
                return

    def _measure(self, batch: Batch, seconds: float) -> None:
        numbers = self.numbers
        self.queue.measure(batch, seconds)
        numbers.batches += 1
        numbers.inputs += len(batch.entries)
        rate = seconds / max(1, batch.cost)
        numbers.seconds_per_cost += SMOOTHING * (rate - numbers.seconds_per_cost) if numbers.batches > 1 else rate
        self.on_batch(batch, seconds)
