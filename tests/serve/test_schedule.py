"""The queue: every input goes to a worker once, requests share batches, and no request starves."""

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

GROUP, OTHER = Group("run", "generate", "{}"), Group("run", "generate", '{"beam":5}')


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
def test_every_input_is_taken_once_and_batches_have_one_group(rows, short, largest):
    queue = Queue(10**9, largest)
    given_jobs = [job(*costs, group=OTHER if other else GROUP) for costs, other in rows]
    for i, each in enumerate(given_jobs):
        queue.add(each, now=float(i))
    assert queue.cost == sum(sum(each.costs) for each in given_jobs) and len(queue) == sum(
        len(j.inputs) for j in given_jobs
    )
    batches = all_batches(queue, short)
    taken = [(id(j), i) for batch in batches for j, i in batch.entries]
    assert sorted(taken) == sorted((id(j), i) for j in given_jobs for i in range(len(j.inputs)))
    assert all(j.group == batch.group for batch in batches for j, _ in batch.entries)
    assert queue.cost == 0 and len(queue) == 0 and all(j.remaining == 0 for j in given_jobs)
    for batch in batches:  # the padded cost of a batch of several inputs is limited
        costs = [j.costs[i] for j, i in batch.entries]
        assert len(costs) == 1 or max(costs) * len(costs) <= (largest if len(costs) <= MIN_SHARED else 512)
        if short:
            assert all(sum(k is j for k, _ in batch.entries) <= SHORT_BATCH for j, _ in batch.entries if j.large)


def test_one_line_does_not_wait_for_the_thousand_of_another_request():
    queue, large = Queue(10**9, 10**6), job(*[10] * 1000)
    queue.add(large, 0.0)
    queue.take()
    queue.add(one := job(10, group=OTHER), 1.0)
    assert [j for j, _ in queue.take().entries] == [one]


def test_a_worker_is_kept_for_small_requests_while_they_come():
    queue, large = Queue(10**9, 10**6), job(*[10] * 1000)
    queue.add(large, 0.0)
    assert len(queue.take(0.0, free=1).entries) == SHORT_BATCH
    queue.add(small := job(10, group=OTHER), 5.0)
    assert [j for j, _ in queue.take(5.0, free=1).entries] == [small]
    assert queue.take(5.5, free=1) is None
    assert len(queue.take(5.5, free=2).entries) > SHORT_BATCH  # another worker continues with the large request
    assert len(queue.take(5.5, free=1, workers=1).entries) == SHORT_BATCH  # so does a single worker
    assert len(queue.take(5.0 + RESERVE_SECONDS, free=1).entries) == SHORT_BATCH


def test_the_oldest_request_is_not_forgotten_while_others_keep_coming():
    queue, large = Queue(10**9, 10**6), job(*[100] * 50)
    queue.add(large, 0.0)
    queue.take()  # from now on it has been served more than any new request
    for i in range(1000):
        queue.add(job(1, group=OTHER), 1.0 + i)
        queue.take()
        if not large.waiting:
            break
    assert i < OLDEST_EVERY * 50


def test_a_queue_is_bounded_but_takes_one_job_of_any_size():
    queue = Queue(100, 50)
    queue.add(job(1000), 0.0)
    with pytest.raises(QueueFull):
        queue.add(job(1), 0.0)
    queue.take()
    queue.add(job(60), 0.0)
    queue.add(job(40), 0.0)
    with pytest.raises(QueueFull):
        queue.add(job(1), 0.0)


def test_removed_jobs_leave_nothing_and_streams_are_alone():
    queue = Queue(10**6, 10**6)
    kept, gone = job(1, 2, 3), job(4, 5)
    streams = [job(1, group=Group("run", "stream", "{}", alone=True)) for _ in range(2)]
    for each in (kept, gone, *streams):
        queue.add(each, 0.0)
    queue.remove(gone)
    queue.remove(gone)
    assert queue.cost == 6 + 2
    batches = all_batches(queue)
    assert sorted(len(batch.entries) for batch in batches) == [1, 1, 3]
    assert all(j is not gone for batch in batches for j, _ in batch.entries)


def test_inputs_whose_worker_ended_come_back_each_alone():
    queue, first = Queue(10**6, 10**6), job(1, 2, 3)
    queue.add(first, 0.0)
    batch = queue.take()
    queue.put_back(batch.entries)
    assert queue.cost == 6
    assert [len(batch.entries) for batch in all_batches(queue)] == [1, 1, 1]


def test_batches_shrink_when_slow_and_grow_when_fast():
    queue = Queue(10**9, 4096)
    queue.add(job(*[8] * 5000), 0.0)
    slice, sizes = BATCH_LATENCIES * INITIAL_LATENCY, []
    for seconds in (slice / 4,) * 3 + (2 * slice,) * 3:
        batch = queue.take()
        sizes.append(len(batch.entries))
        queue.measure(batch, seconds)
    assert sizes == [64, 128, 256, 512, 256, 128]  # 4096 at most


def test_batches_are_as_long_as_a_few_inputs_that_are_answered_alone():
    queue = Queue(10**9, 10**6)
    for single in (0.001, 0.02, 0.1):
        for _ in range(40):
            queue.add(job(10), 0.0)
            queue.measure(queue.take(), single)
        queue.add(large := job(*[10] * 20_000), 0.0)
        for _ in range(40):
            batch = queue.take()
            queue.measure(batch, seconds := 0.001 * len(batch.entries))
        queue.remove(large)
        assert seconds == pytest.approx(
            min(MAX_BATCH_SECONDS, max(MIN_BATCH_SECONDS, BATCH_LATENCIES * single)), rel=0.2
        )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_results_may_come_in_any_order_and_the_job_is_done_with_the_last(order):
    each = job(*[1] * len(order))
    for rank, index in enumerate(sorted(range(len(order)), key=lambda i: order[i])):
        assert not each.done
        each.add_result(index, {"n": rank})
    assert each.done and len(each.results) == len(order)
    each.fail("too late", 503)
    assert all("error" not in result for result in each.results.values())
