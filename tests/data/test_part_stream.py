"""Batches whose cut among ranks changes between two steps: the same samples in the same order, by other hands."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.data import ArraySource, Part, StepPlan, StepStream
from scaleray.data.blocks import LocalBlocks
from scaleray.data.local_start import start_locally

share_lists = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


@given(
    shares=share_lists,
    num_samples=st.integers(1, 200),
    first=st.integers(0, 20),
    shuffle=st.booleans(),
    groups=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
)
def test_ranks_with_any_shares_are_together_the_global_batch(shares, num_samples, first, shuffle, groups, seed):
    sizes = tuple(len(part) for part in np.array_split(np.arange(num_samples), 4)) if groups else None
    plan = StepPlan(num_samples, sum(shares), seed=seed, shuffle=shuffle, group_sizes=sizes, window_rows=13)
    for step in range(first, first + 2 * plan.steps_per_epoch):
        parts = [plan.rank_indices(step, rank, len(shares), shares) for rank in range(len(shares))]
        assert np.array_equal(np.concatenate(parts), plan.global_indices(step))
        if plan.num_rows(step) == sum(shares):
            assert [len(part) for part in parts] == list(shares)


def stream_of(source, part):
    return StepStream(lambda part, demand: LocalBlocks(source, part, chunk_bytes=100), part, timeout_s=20)


def steps_of(stream, count):
    return [
        (batch.step, batch.num_rows, batch.columns["n"].tolist())
        for batch, _ in zip(stream, range(count), strict=False)
    ]


@settings(max_examples=20, deadline=None)
@given(before=st.tuples(*[st.integers(1, 6)] * 3), after=st.tuples(*[st.integers(1, 6)] * 3), at=st.integers(0, 12))
def test_a_change_of_shares_loses_no_sample_and_repeats_none(before, after, at):
    size = sum(before)
    after = (*after[:2], size - sum(after[:2]))
    if after[2] < 1:
        after = before[::-1]
    plan, source = StepPlan(50, size, seed=2), ArraySource({"n": np.arange(50)})
    found = [[] for _ in range(12)]
    for rank in range(3):
        stream = stream_of(source, Part(plan, rank, 3, 0, 12, before))
        for step in range(12):
            if step == at:
                stream.cut(step, after)
            batch = next(stream)
            own = plan.rank_slice(step, rank, 3, before if step < at else after)
            assert batch.step == step and batch.num_rows == own.stop - own.start
            found[step] += batch.columns["n"][: batch.num_rows].tolist()
        assert next(stream, None) is None
        stream.close()
    assert found == [plan.global_indices(step).tolist() for step in range(12)]


class OneReader:
    """Rows that must not be read by two threads at once, as the files of a user's own dataset need not stand it."""

    row_bytes, group_sizes = 8, None

    def __init__(self):
        self.readers, self.most, self.lock = 0, 0, threading.Lock()

    def read(self, indices):
        with self.lock:
            self.readers += 1
            self.most = max(self.most, self.readers)
        time.sleep(0.002)
        with self.lock:
            self.readers -= 1
        return {"n": indices}


def test_the_old_reader_has_left_the_source_before_the_new_one_enters():
    source, opened, threads = OneReader(), [], []

    def open_blocks(part, demand):
        assert not any(thread.is_alive() for thread in threads)
        opened.append(LocalBlocks(source, part, chunk_bytes=1))
        return opened[-1]

    stream = StepStream(open_blocks, Part(StepPlan(4000, 4), 0, 2, 0, 1000), prefetch_bytes=1, timeout_s=20)
    for step in range(10):
        assert next(stream).step == step
        threads.append(stream._thread)
        stream.cut(step + 1, (1, 3) if step % 2 else (3, 1))
    stream.close()
    assert len(opened) == 11 and source.most == 1


def test_the_time_spent_waiting_runs_on_over_a_change():
    stream = stream_of(ArraySource({"n": np.arange(40)}), Part(StepPlan(40, 4), 0, 2, 0, 10))
    seen = []
    for step in range(10):
        next(stream)
        seen.append(stream.waited_s)
        if step == 4:
            stream.cut(5, (3, 1))
            seen.append(stream.waited_s)
    stream.close()
    assert seen == sorted(seen) and seen[5] > seen[4] > 0


# what a stream leaves behind


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_a_closed_stream_ends_the_tasks_that_filled_it(num_read):
    """Ray Data goes on producing until the iterator over it is closed."""
    has_ended, source = threading.Event(), ArraySource({"n": np.arange(4000)})
    part = Part(StepPlan(4000, 4), 0, 1, 0, 1000)

    def remote():
        try:
            yield from LocalBlocks(source, part, chunk_bytes=64)
        finally:
            has_ended.set()

    def open_blocks(part, demand):
        return start_locally(LocalBlocks(source, part, chunk_bytes=64), remote(), demand, patience_s=0.0)

    started = threading.active_count()
    stream = StepStream(open_blocks, part, row_bytes=8, prefetch_bytes=64, timeout_s=20)
    for _ in range(num_read):
        next(stream)
    stream.close(wait_s=20)
    assert not stream._thread.is_alive()
    if num_read:
        assert has_ended.wait(20)
    assert threading.active_count() <= started + 1  # its tasks' thread may be about to end


def test_a_stream_whose_tasks_hang_can_be_closed_all_the_same():
    never, has_hung = threading.Event(), threading.Event()
    part, source = Part(StepPlan(40, 4), 0, 1, 0, 10), ArraySource({"n": np.arange(40)})

    def hanging():
        yield next(LocalBlocks(source, part, chunk_bytes=1))
        has_hung.set()
        never.wait(60)

    def open_blocks(part, demand):
        return start_locally(LocalBlocks(source, part, chunk_bytes=1), hanging(), demand, patience_s=0.0)

    stream = StepStream(open_blocks, part, timeout_s=20)
    next(stream)
    assert has_hung.wait(20)
    time.sleep(0.3)  # the filling thread has taken the one block by then, and waits for the next
    stream.close(wait_s=20)
    assert not stream._thread.is_alive()
    never.set()
