"""From a source and a plan to one rank's batches: cut exactly, in order, read ahead, and with every error passed on."""

import itertools
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaleray.data import ArraySource, Part, StepPlan, StepStream
from scaleray.data.blocks import LocalBlocks, chunks, read_chunk, rebatch
from scaleray.data.ray_blocks import stream_blocks
from scaleray.errors import DataError, InputStarvedError


def numbers(count):
    return ArraySource({"n": np.arange(count), "pair": np.arange(2 * count).reshape(count, 2)})


def open_stream(source, part, *, chunk_bytes=1000.0, **options):
    return StepStream(lambda part, demand: LocalBlocks(source, part, chunk_bytes=chunk_bytes), part, **options)


@pytest.fixture
def opened():
    """Opens streams and closes them at the end of the test."""
    streams = []

    def open_and_keep(*args, **kwargs):
        streams.append(open_stream(*args, **kwargs))
        return streams[-1]

    yield open_and_keep
    for stream in streams:
        stream.close()


# cutting


@given(blocks=st.lists(st.integers(0, 9), max_size=20), sizes=st.lists(st.integers(1, 12), max_size=20))
def test_rebatch_cuts_any_blocks_into_exactly_the_sizes_in_order(blocks, sizes):
    total = sum(blocks)
    whole = {"a": np.arange(total), "b": np.arange(total * 2).reshape(total, 2)}
    edges = np.cumsum([0, *blocks])
    pieces = [{k: v[a:b] for k, v in whole.items()} for a, b in itertools.pairwise(edges)]
    found, waiting = [], []
    for piece, num_waiting in rebatch(iter(pieces), sizes):
        found.append(piece)
        waiting.append(num_waiting)
    reached = np.cumsum([0, *sizes])
    complete = [size for size, end in zip(sizes, reached[1:], strict=True) if end <= total]
    assert [len(piece["a"]) for piece in found] == complete  # what does not fill a batch is not given out
    assert all(n + end in np.cumsum([0, *blocks]) for n, end in zip(waiting, reached[1:], strict=False))
    for start, piece in zip(reached, found, strict=False):
        for name, values in whole.items():
            assert np.array_equal(piece[name], values[start : start + len(piece[name])])


def test_pieces_can_be_written_without_touching_the_block_they_came_from():
    """Ray's blocks are read-only memory that other processes share."""
    block = {"a": np.arange(6)}
    block["a"].setflags(write=False)
    for piece, _ in rebatch([block], [6]):
        piece["a"] += 1
    for piece, _ in rebatch([block, block], [4, 4]):
        piece["a"] += 1
    assert np.array_equal(block["a"], np.arange(6))


# order


@settings(max_examples=60)
@given(
    world_size=st.integers(1, 5),
    per_rank=st.integers(1, 4),
    num_samples=st.integers(1, 50),
    chunk_bytes=st.floats(1, 3000),
    first=st.integers(0, 7),
    length=st.integers(0, 12),
    shuffle=st.booleans(),
    groups=st.booleans(),
)
def test_every_rank_gets_exactly_the_rows_of_the_plan(
    world_size, per_rank, num_samples, chunk_bytes, first, length, shuffle, groups
):
    source = numbers(num_samples)
    sizes = tuple(len(part) for part in np.array_split(np.arange(num_samples), 4)) if groups else None
    plan = StepPlan(num_samples, world_size * per_rank, seed=3, shuffle=shuffle, group_sizes=sizes, window_rows=9)
    for rank in range(world_size):
        part = Part(plan, rank, world_size, first, first + length)
        stream = open_stream(source, part, chunk_bytes=chunk_bytes)
        batches = list(stream)
        stream.close()
        assert [batch.step for batch in batches] == list(range(first, first + length))
        for batch in batches:
            own = plan.rank_indices(batch.step, rank, world_size)
            assert batch.num_rows == len(own)
            expected = own if len(own) else plan.global_indices(batch.step)[:1]
            assert np.array_equal(batch.columns["n"], expected)
            assert np.array_equal(batch.columns["pair"][:, 0], 2 * expected)


def test_a_rank_without_rows_gets_one_placeholder_row_and_the_count_0(opened):
    plan = StepPlan(10, 8, seed=1)  # the second step has 2 rows
    for rank in range(4):
        last = list(opened(numbers(10), Part(plan, rank, 4, 0, 2)))[-1]
        assert last.num_rows == (1 if rank < 2 else 0)
        assert len(last.columns["n"]) == 1
        assert last.columns["n"][0] in plan.global_indices(1)


@given(
    row_bytes=st.integers(1, 100),
    chunk_bytes=st.floats(1, 1e5),
    first=st.integers(0, 50),
    length=st.integers(0, 300),
    shuffle=st.booleans(),
    groups=st.one_of(st.none(), st.just((40, 60))),
)
def test_chunks_cover_the_steps_once_and_grow_from_small_ones(row_bytes, chunk_bytes, first, length, shuffle, groups):
    plan = StepPlan(100, 10, shuffle=shuffle, group_sizes=groups, window_rows=50)
    ranges = list(chunks(Part(plan, 0, 2, first, first + length), row_bytes=row_bytes, chunk_bytes=chunk_bytes))
    assert [step for steps in ranges for step in steps] == list(range(first, first + length))
    lengths = [len(steps) for steps in ranges]
    assert all(b <= 4 * a for a, b in itertools.pairwise(lengths))
    largest = max(1, chunk_bytes // (5 * row_bytes))
    if groups is None or not shuffle:
        assert all(1 <= n <= largest for n in lengths) and (not lengths or lengths[0] == 1)
    elif len(lengths) > 1:
        assert lengths[0] >= 5  # a whole window of 50 rows, whose row groups would be read again otherwise


def test_a_chunk_is_the_rows_of_its_steps_one_after_another():
    plan = StepPlan(20, 6, seed=2)
    part = Part(plan, 1, 2, 0, 8)
    expected = np.concatenate([plan.rank_indices(step, 1, 2) for step in range(2, 6)])
    assert np.array_equal(read_chunk(numbers(20), part, range(2, 6))["n"], expected)


# a stream that has an order of its own


class Shard:
    """What Ray Data gives a worker: its rows in batches of some size, again for each epoch."""

    def __init__(self, num_rows):
        self.num_rows, self.asked = num_rows, []

    def iter_batches(self, **options):
        self.asked.append(options)
        for start in range(0, self.num_rows, 7):
            yield {"n": np.arange(start, min(start + 7, self.num_rows))}


def rows_of(shard, part, **options):
    return (rows for _, rows in stream_blocks(shard, part, **options))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_streamed_shard_gives_each_epoch_its_share_of_rows_and_no_more(shuffle):
    plan = StepPlan(20, 4, seed=5, is_streamed=True)  # 21 rows, of which two workers use 10 each
    shard, part = Shard(11), Part(plan, 0, 2, 0, 15)
    stream = StepStream(lambda part, demand: rows_of(shard, part, shuffle=shuffle, window_rows=50), part)
    batches = list(stream)
    assert [batch.num_rows for batch in batches] == [2] * 15
    epochs = np.concatenate([batch.columns["n"] for batch in batches]).reshape(3, 10)
    assert np.array_equal(epochs, [range(10)] * 3)
    seeds = [options.get("local_shuffle_seed") for options in shard.asked]
    assert len(set(seeds)) == (3 if shuffle else 1)  # another order each epoch


def test_a_streamed_shard_starts_in_the_epoch_of_its_first_step():
    plan = StepPlan(20, 4, is_streamed=True)
    shard, part = Shard(10), Part(plan, 1, 2, 10, 15)
    stream = StepStream(lambda part, demand: rows_of(shard, part, shuffle=False, window_rows=1), part)
    assert len(list(stream)) == 5
    assert len(shard.asked) == 1


# errors, ends and waiting


class Broken:
    """A source that fails from a certain row on, in a thread that the trainer does not see."""

    row_bytes, tokens_per_row, group_sizes = 8, None, None

    def __init__(self, error, at=12):
        self.error, self.at, self.num_rows = error, at, 20

    def read(self, indices):
        if indices.max() >= self.at:
            raise self.error
        return {"n": indices}


PLAN = StepPlan(20, 4, shuffle=False)
WHOLE = Part(PLAN, 0, 1, 0, 5)


def test_an_error_of_the_source_arrives_as_itself_after_the_good_batches(opened):
    error = DataError("row 12", "damaged", "it must be readable")
    stream = opened(Broken(error), WHOLE, chunk_bytes=1)
    assert [next(stream).step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError) as caught:
        next(stream)
    assert caught.value is error
    with pytest.raises(StopIteration):  # and after it there is nothing to wait for
        next(stream)


def test_an_error_that_others_wrapped_is_unwrapped(opened):
    error = DataError("row 12", "damaged", "it must be readable")

    class Wrapped(Broken):
        def read(self, indices):
            try:
                try:
                    return super().read(indices)
                except DataError as inner:
                    raise RuntimeError("a task failed") from inner
            except RuntimeError as middle:
                outer = OSError("a block could not be made")
                outer.cause = middle  # as Ray's task errors carry it
                raise outer from None

    with pytest.raises(DataError) as caught:
        list(opened(Wrapped(error), WHOLE, chunk_bytes=1))
    assert caught.value is error


def test_any_other_error_arrives_as_it_was_raised(opened):
    with pytest.raises(ZeroDivisionError):
        list(opened(Broken(ZeroDivisionError()), WHOLE, chunk_bytes=1))


def test_a_stream_that_is_read_to_its_end_stays_at_its_end(opened):
    stream = opened(numbers(20), WHOLE)
    assert len(list(stream)) == 5
    assert list(stream) == []


def test_too_few_blocks_are_an_error_and_no_early_end():
    stream = StepStream(lambda part, demand: [{"n": np.arange(10)}], WHOLE)
    with pytest.raises(RuntimeError, match="ended after step 2 of 5"):
        list(stream)


class Stuck:
    """Blocks that never come, until they are let go."""

    def __init__(self):
        self.let_go = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        self.let_go.wait(60)
        raise StopIteration


def test_an_input_that_does_not_come_is_explained_and_then_an_error():
    stuck, warnings = Stuck(), []
    stream = StepStream(
        lambda part, demand: stuck,
        WHOLE,
        timeout_s=0.01,
        explain_wait=lambda: "all CPUs are taken",
        warn=warnings.append,
    )
    with pytest.raises(InputStarvedError) as caught:
        next(stream)
    assert "data.timeout_s is 0.01" in str(caught.value) and "all CPUs are taken" in str(caught.value)
    assert len(warnings) == 1 and "all CPUs are taken" in warnings[0]
    stuck.let_go.set()
    stream.close()


def test_a_worker_without_input_says_so_before_the_others_give_up_on_it():
    stuck = Stuck()
    stream = StepStream(lambda part, demand: stuck, WHOLE, timeout_s=300, others_wait_s=lambda: 0.01)
    with pytest.raises(InputStarvedError) as caught:
        next(stream)
    assert "data.timeout_s is 300; the other workers wait only 0.01 s, by scale.coll" in str(caught.value)
    stuck.let_go.set()
    stream.close()


def test_without_an_explanation_the_source_is_blamed():
    stuck = Stuck()
    stream = StepStream(lambda part, demand: stuck, WHOLE, timeout_s=0.01)
    with pytest.raises(InputStarvedError, match="its source is slow"):
        next(stream)
    stuck.let_go.set()
    stream.close()


def test_the_stream_reads_ahead_only_as_far_as_it_may():
    read, enough = [], threading.Event()

    def blocks(part, demand):
        for step in range(1000):
            read.append(step)
            if step >= 4:
                enough.set()
            yield {"n": np.full(4, step)}

    plan = StepPlan(4000, 4, shuffle=False)
    stream = StepStream(blocks, Part(plan, 0, 1, 0, 1000), row_bytes=8, prefetch_bytes=4 * 4 * 8)
    assert enough.wait(30)  # the queue holds 4 batches, and the thread has the next in its hands
    assert len(read) <= 6
    assert next(stream).columns["n"].tolist() == [0] * 4
    stream.close()


def test_close_ends_the_thread_whether_or_not_anything_was_read():
    for to_read in (0, 3):
        stream = open_stream(numbers(4000), Part(StepPlan(4000, 4), 0, 1, 0, 1000), row_bytes=8, prefetch_bytes=64)
        for _ in range(to_read):
            next(stream)
        stream.close()
        stream.close()
        stream._thread.join(timeout=30)
        assert not stream._thread.is_alive()


def test_the_time_spent_waiting_is_counted(opened, monkeypatch):
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)  # a second later each time it is asked
    monkeypatch.setattr("scaleray.data.stream.time", clock)
    stream = opened(numbers(20), WHOLE)
    assert stream.waited_s == 0
    assert len(list(stream)) == 5
    assert stream.waited_s >= 3  # the first batch, the four that were read and handed over together, and the end


def test_the_last_wait_for_a_slow_source_ends_when_its_time_is_over(monkeypatch):
    clock, asked = [0.0], []

    class Empty:
        def get(self, timeout):
            asked.append(timeout)
            clock[0] += timeout
            raise queue.Empty

    stream = open_stream(numbers(20), WHOLE, timeout_s=2.5)
    stream.close(wait_s=30)
    monkeypatch.setattr("scaleray.data.stream.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(stream, "_queue", Empty())
    with pytest.raises(InputStarvedError, match=r"data\.timeout_s is 2\.5"):
        stream._get(0.0)
    assert asked == pytest.approx([1.0, 1.0, 0.51])


def test_a_batch_that_training_changes_changes_nothing_else(opened):
    rows = np.arange(24.0).reshape(12, 2)
    source = ArraySource({"x": rows.copy()})
    part = Part(StepPlan(12, 4, seed=0, shuffle=False), 0, 1, 0, 6)
    arrived = []
    for batch in opened(source, part, chunk_bytes=10**6):
        arrived.append(batch.columns["x"].copy())
        batch.columns["x"][:] = -1.0
    np.testing.assert_array_equal(np.concatenate(arrived), np.concatenate([rows, rows]))
    np.testing.assert_array_equal(source.arrays["x"], rows)
