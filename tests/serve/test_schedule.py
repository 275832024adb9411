"""The queue: every input is scheduled once, requests share batches, and no request starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from regard.serve.queue import (
    BATCH_LATENCIES,
    INITIAL_LATENCY,
    MAX_BATCH_SECONDS,
    MIN_BATCH_SECONDS,
    MIN_SHARED,
    OLDEST_EVERY,
    RESERVE_SECONDS,
    SHORT_BATCH,
    Group,
    Job,
    Queue,
    QueueFull,
)

GROUP = Group("run", "generate", "{}")
OTHER_GROUP = Group("run", "generate", '{"beam":5}')


def job(*costs: int, group: Group = GROUP) -> Job:
    return Job(group, [{"source": str(i)} for i in range(len(costs))], list(costs))


def all_batches(queue: Queue, short: bool = False) -> list:
    batches = []
    while (batch := queue.take(1e9, 1 if short else 2)) is not None:
        batches.append(batch)
    return batches


jobs = st.lists(st.tuples(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.booleans()), max_size=12)


@given(jobs, st.booleans(), st.integers(1, 2000))
@settings(max_examples=200, deadline=None)
def test_every_input_is_scheduled_once_and_batches_have_one_group(rows, short, largest):
    queue = Queue(10**9, largest)
    all_jobs = [job(*costs, group=OTHER_GROUP if other else GROUP) for costs, other in rows]
    for i, each in enumerate(all_jobs):
        queue.add(each, now=float(i))
    assert queue.cost == sum(sum(each.costs) for each in all_jobs) and len(queue) == sum(
        len(j.inputs) for j in all_jobs
    )
    batches = all_batches(queue, short)
    entries = [(id(j), i) for batch in batches for j, i in batch.entries]
    assert sorted(entries) == sorted((id(j), i) for j in all_jobs for i in range(len(j.inputs)))
    assert all(j.group == batch.group for batch in batches for j, _ in batch.entries)
    assert queue.cost == 0 and len(queue) == 0 and all(j.remaining == 0 for j in all_jobs)
    for batch in batches:  # the padded cost of a batch of several inputs is limited
        costs = [j.costs[i] for j, i in batch.entries]
        assert len(costs) == 1 or max(costs) * len(costs) <= (largest if len(costs) <= MIN_SHARED else 512)
        if short:
            assert all(sum(k is j for k, _ in batch.entries) <= SHORT_BATCH for j, _ in batch.entries if j.large)


def test_single_input_is_served_before_the_rest_of_a_large_request():
    queue = Queue(10**9, 10**6)
    large = job(*[10] * 1000)
    queue.add(large, 0.0)
    queue.take()
    queue.add(single := job(10, group=OTHER_GROUP), 1.0)
    assert [j for j, _ in queue.take().entries] == [single]


def test_one_worker_is_reserved_while_small_requests_arrive():
    queue = Queue(10**9, 10**6)
    large = job(*[10] * 1000)
    queue.add(large, 0.0)
    assert len(queue.take(0.0, free=1).entries) == SHORT_BATCH
    queue.add(small := job(10, group=OTHER_GROUP), 5.0)
    assert [j for j, _ in queue.take(5.0, free=1).entries] == [small]
    assert queue.take(5.5, free=1) is None
    assert len(queue.take(5.5, free=2).entries) > SHORT_BATCH  # a second free worker continues with the large request
    assert len(queue.take(5.5, free=1, workers=1).entries) == SHORT_BATCH  # so does a single worker
    assert len(queue.take(5.0 + RESERVE_SECONDS, free=1).entries) == SHORT_BATCH


def test_oldest_request_is_not_starved_by_new_requests():
    queue = Queue(10**9, 10**6)
    large = job(*[100] * 50)
    queue.add(large, 0.0)
    queue.take()  # from now on it has been served more than any new request
    for i in range(1000):
        queue.add(job(1, group=OTHER_GROUP), 1.0 + i)
        queue.take()
        if not large.waiting:
            break
    assert i < OLDEST_EVERY * 50


def test_queue_is_bounded_but_accepts_one_job_of_any_size():
    queue = Queue(100, 50)
    queue.add(job(1000), 0.0)
    with pytest.raises(QueueFull):
        queue.add(job(1), 0.0)
    queue.take()
    queue.add(job(60), 0.0)
    queue.add(job(40), 0.0)
    with pytest.raises(QueueFull):
        queue.add(job(1), 0.0)


def test_removed_jobs_are_not_scheduled_and_streams_share_no_batch():
    queue = Queue(10**6, 10**6)
    remaining_job = job(1, 2, 3)
    removed_job = job(4, 5)
    streams = [job(1, group=Group("run", "stream", "{}", alone=True)) for _ in range(2)]
    for each in (remaining_job, removed_job, *streams):
        queue.add(each, 0.0)
    queue.remove(removed_job)
    queue.remove(removed_job)
    assert queue.cost == 6 + 2
    batches = all_batches(queue)
    assert sorted(len(batch.entries) for batch in batches) == [1, 1, 3]
    assert all(j is not removed_job for batch in batches for j, _ in batch.entries)


def test_inputs_of_an_ended_worker_are_retried_in_separate_batches():
    queue = Queue(10**6, 10**6)
    queue.add(job(1, 2, 3), 0.0)
    batch = queue.take()
    queue.put_back(batch.entries)
    assert queue.cost == 6
    assert [len(batch.entries) for batch in all_batches(queue)] == [1, 1, 1]


def test_batches_shrink_when_slow_and_grow_when_fast():
    queue = Queue(10**9, 4096)
    queue.add(job(*[8] * 5000), 0.0)
    target_seconds = BATCH_LATENCIES * INITIAL_LATENCY
    sizes = []
    for seconds in (target_seconds / 4,) * 3 + (2 * target_seconds,) * 3:
        batch = queue.take()
        sizes.append(len(batch.entries))
        queue.measure(batch, seconds)
    assert sizes == [64, 128, 256, 512, 256, 128]  # 4096 at most


def test_batch_time_is_a_multiple_of_the_latency_of_a_single_input():
    queue = Queue(10**9, 10**6)
    for latency in (0.001, 0.02, 0.1):
        for _ in range(40):
            queue.add(job(10), 0.0)
            queue.measure(queue.take(), latency)
        queue.add(large := job(*[10] * 20_000), 0.0)
        for _ in range(40):
            batch = queue.take()
            queue.measure(batch, seconds := 0.001 * len(batch.entries))
        queue.remove(large)
        assert seconds == pytest.approx(
            min(MAX_BATCH_SECONDS, max(MIN_BATCH_SECONDS, BATCH_LATENCIES * latency)), rel=0.2
        )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_job_is_done_with_its_last_result_in_any_order(order):
    pending_job = job(*[1] * len(order))
    for rank, index in enumerate(sorted(range(len(order)), key=lambda i: order[i])):
        assert not pending_job.done
        pending_job.add_result(index, {"n": rank})
    assert pending_job.done and len(pending_job.results) == len(order)
    pending_job.fail("too late", 503)
    assert all("error" not in result for result in pending_job.results.values())
