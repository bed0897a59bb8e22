"""Rows that can only be iterated: the same steps on any number of workers and after a resume, with what that costs."""

from __future__ import annotations

import copy
import functools
import itertools
import time

import numpy as np
import pytest
import torch
from small_runs import DEFAULTS, Classify, make_job, relative_differences, rows, train, train_alone
from verified import judge

from scaleray.data import IterableSource, Part, Split, StepPlan, as_source, iterable, load_sources
from scaleray.data.blocks import LocalBlocks
from scaleray.errors import ConfigError, DataError, WorkloadError
from scaleray.verification.verification_plan import make_plan
from scaleray.verification.verify_options import VerifyOptions

NUM = 26


class Endless(torch.utils.data.IterableDataset):
    """Labelled rows, one after another, of which nobody knows the number."""

    def __init__(self, num_rows=NUM):
        self.rows, self.begun = rows(num_rows), 0

    def __iter__(self):
        self.begun += 1
        for x, y in zip(self.rows["x"], self.rows["y"], strict=True):
            yield {"x": self.change(x), "y": int(y)}

    def change(self, x):
        return x


class Stream(Endless):
    def __len__(self):
        return len(self.rows["y"])


class Noisy(Stream):
    def change(self, x):
        return x + torch.rand(len(x)).numpy() + np.random.random(len(x)).astype(np.float32)


class Unrepeatable(Stream):
    def change(self, x):
        return x + self.begun


class Streamed(Classify):
    def __init__(self, stream, **more):
        super().__init__()
        self.stream = stream

    def datasets(self):
        return {"train": self.stream}


def bits(source, *, world_size=1, first_step=0, shuffle=True, steps=9):
    plan = StepPlan(source.num_rows, 8, seed=3, shuffle=shuffle, window_rows=7)
    found = {}
    for rank in range(world_size):
        for step in range(first_step, steps):
            found.setdefault(step, [])
        part = Part(plan, rank, world_size, first_step, steps)
        sizes = [(step, part.num_rows(step)) for step in range(first_step, steps)]
        blocks = iter([row for block in LocalBlocks(source, part, chunk_bytes=99) for row in block["x"]])
        for step, size in sizes:
            rows_of_step = [next(blocks) for _ in range(max(1, size))]
            found[step] += [row.tobytes() for row in rows_of_step[:size]]
    return found


@pytest.mark.parametrize("kind", [Stream, Noisy])
@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_are_the_same_to_the_bit_on_any_number_of_workers_from_any_step(kind, shuffle):
    source = as_source(kind(), split="train")
    whole = bits(source, shuffle=shuffle)
    for world_size, first_step in ((2, 0), (3, 5), (1, 6), (8, 3)):
        found = bits(source, world_size=world_size, first_step=first_step, shuffle=shuffle)
        assert found == {step: whole[step] for step in range(first_step, 9)}


def test_every_row_comes_once_an_epoch_in_another_order_each_time():
    source = as_source(Stream(), split="train")
    given = sorted(row.tobytes() for row in rows(NUM)["x"])
    steps = bits(source, steps=8)
    epochs = [[row for step in range(first, first + 4) for row in steps[step]] for first in (0, 4)]
    assert all(sorted(epoch) == given for epoch in epochs) and epochs[0] != epochs[1]
    assert [row for step in bits(source, shuffle=False, steps=4).values() for row in step] == [
        row.tobytes() for row in rows(NUM)["x"]
    ]


def test_an_epoch_is_told_to_a_dataset_that_wants_to_know():
    class Epochs(Stream):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

    stream = Epochs()
    source = as_source(stream, split="train")
    bits(source, first_step=2)
    assert stream.epochs == (0, 1, 2)


def test_a_dataset_without_a_length_is_counted_once_and_a_long_one_asks_for_it(monkeypatch):
    assert as_source(Endless(), split="train").num_rows == NUM
    monkeypatch.setattr(iterable, "COUNT_S", -1.0)
    with pytest.raises(DataError, match="define __len__ as the number of rows in an epoch"):
        as_source(Endless(), split="train")


def test_an_iterator_and_a_stream_that_ends_early_are_refused():
    with pytest.raises(DataError, match="it can be read only once, while every epoch and worker"):
        as_source(({"x": n} for n in range(4)), split="train")
    stream = Stream()
    source = as_source(stream, split="train")
    stream.rows = rows(20)
    with pytest.raises(DataError, match="with 20 rows in epoch 1: it had 26 at the start"):
        bits(source, shuffle=False)


def test_workers_read_it_themselves_and_the_promise_says_what_that_means():
    job, sources = make_job(Streamed(Stream()), {"data.readers": "ray", "data.window_rows": 9})
    split = Split.of("train", sources["train"])
    assert split.read_by("ray") == "worker" and isinstance(sources["train"], IterableSource)
    assert job.sample_order.startswith(
        "as yielded by the IterableDataset, shuffled in a buffer of 9 rows, the same for"
    )
    assert "every worker reads all rows and keeps its own" in job.sample_order
    assert sources["train"].describe()["kind"] == "IterableDataset Stream"


def test_rows_that_differ_when_they_are_iterated_again_are_named_and_not_verified():
    job, sources = make_job(Streamed(Unrepeatable()))
    assert "row 0 differs in column x when the rows are iterated again" in job.sample_order
    with pytest.raises(DataError, match="the train data is not repeatable"):
        make_job(Streamed(Unrepeatable()), {"deterministic": True})
    with pytest.raises(DataError, match="Runs can be compared only on the same values"):
        make_plan(job.config, VerifyOptions(strategies=("ddp",)), job.workload, sources)


@pytest.mark.combination
def test_trainings_are_equal_on_two_workers_and_after_a_resume(gloo, tmp_path):
    flags = {"stop.after": "8 steps", "checkpoint.every": "1 steps", "data.window_rows": 10}
    whole = train_alone(Streamed(Noisy()), {**flags, "deterministic": True})
    spread = gloo.run(2, train, Streamed(Noisy()), flags)[0]
    assert max(relative_differences(spread.losses, whole.losses)) < 1e-9
    train_alone(Streamed(Noisy()), {**flags, "deterministic": True}, folder=tmp_path, kill_at=5)
    assert train_alone(Streamed(Noisy()), {**flags, "deterministic": True}, folder=tmp_path).losses == whole.losses[5:]
    assert gloo.run(2, judge, Streamed(Stream()), {})[0].verdict == "equal"


# rows that are dealt out


class ByShard(Stream):
    """Deals its rows out one by one; counts those that it has given."""

    part, num_given = (0, 1), 0

    def shard(self, rank, world_size):
        one = copy.copy(self)
        one.part = (rank, world_size)
        return one

    def __iter__(self):
        for row in itertools.islice(super().__iter__(), self.part[0], None, self.part[1]):
            type(self).num_given += 1
            yield row


class ByWorkerInfo(Stream):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from itertools.islice(super().__iter__(), info.id if info else 0, None, info.num_workers if info else 1)


class OfAnotherLibrary(ByShard):
    def shard(self, num_shards, index, contiguous=False):
        return ByShard.shard(self, index, num_shards)


class InHalves(ByShard):
    """Deals out a third and two thirds."""

    def __iter__(self):
        rank, world_size = self.part
        cut = len(self) // 3 if world_size > 1 else 0
        return itertools.islice(Stream.__iter__(self), cut if rank else 0, None if rank or world_size == 1 else cut)


def dealt(source, *, world_size=2, shuffle=False, first_step=0, steps=7, size=8):
    """Rows by step, then by rank."""
    usable = source.num_rows // world_size * world_size
    plan = StepPlan(usable, size, seed=3, shuffle=shuffle, window_rows=7, given_order="any", is_dealt=True)
    found = []
    for rank in range(world_size):
        part = Part(plan, rank, world_size, first_step, steps)
        given = iter([row.tobytes() for block in LocalBlocks(source, part, chunk_bytes=99) for row in block["x"]])
        found.append([list(itertools.islice(given, part.num_rows(step))) for step in range(first_step, steps)])
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("kind", [ByShard, ByWorkerInfo, OfAnotherLibrary])
def test_each_worker_reads_its_own_part_of_a_dataset_that_deals_its_rows_out(kind):
    source = as_source(kind(28), split="train")
    assert source.deals_by == ("get_worker_info()" if kind is ByWorkerInfo else "shard()")
    given = [row.tobytes() for row in rows(28)["x"]]
    epoch = dealt(source, world_size=2, steps=4)  # of 8, 8, 8 and 4 rows
    assert [len(own) for step in epoch for own in step] == [4, 4, 4, 4, 4, 4, 2, 2]
    for rank in range(2):
        assert [row for step in epoch for row in step[rank]] == given[rank::2]
    assert torch.utils.data.get_worker_info() is None


def test_what_a_worker_does_not_train_on_is_not_read_by_it():
    source = as_source(ByShard(28), split="train")
    ByShard.num_given = 0
    dealt(source, world_size=4, steps=4)
    assert ByShard.num_given == 28  # 112 where every worker reads all


@pytest.mark.parametrize("shuffle", [True, False])
def test_parts_go_on_from_any_step_to_the_bit_and_every_epoch_has_all_rows(shuffle):
    source = as_source(ByShard(28), split="train")
    whole = dealt(source, shuffle=shuffle, steps=8)
    assert dealt(source, shuffle=shuffle, first_step=5, steps=8) == whole[5:]
    epochs = [sorted(row for step in whole[first : first + 4] for own in step for row in own) for first in (0, 4)]
    assert epochs[0] == epochs[1] == sorted(row.tobytes() for row in rows(28)["x"])
    assert (whole[:4] == whole[4:]) is not shuffle


def test_a_dataset_that_deals_nothing_out_is_read_whole_as_before():
    assert as_source(Stream(), split="train").deals_by == as_source(Noisy(), split="train").deals_by == ""
    job, _ = make_job(Streamed(ByShard(28)))  # one worker has all rows
    assert not job.train_plan().is_dealt and "the same for every number of workers" in job.sample_order


def test_what_dealing_promises_and_refuses_is_said_by_name():
    job, _ = make_job(Streamed(ByShard(27)), world_size=2)
    assert job.sample_order.startswith("weak: as divided by shard() of the IterableDataset, shuffled in a buffer")
    assert "the rows of a step depend on the number of workers" in job.sample_order
    assert job.train_plan().num_samples == 26
    for flags in ({"shares.by": "speed"}, {"scale.workers": {"min": 1, "max": 2}}):
        with pytest.raises(ConfigError, match="this IterableDataset deals its rows out"):
            make_job(Streamed(ByShard(28)), flags, world_size=2)


def test_parts_of_unequal_size_end_in_one_clear_error():
    with pytest.raises(
        DataError,
        match=r"InHalves.shard for worker 0 of 2 with 9 rows in epoch 1: each of the 2 workers trains on 14 of 28 rows",
    ):
        dealt(as_source(InHalves(28), split="train"))


def test_workers_train_on_dealt_rows_and_verify_on_whole_ones(gloo):
    flags = {"stop.after": "8 steps", "data.shuffle": False, "batch.global_size": 4}
    alone = train_alone(Streamed(ByWorkerInfo(28)), flags)
    spread = gloo.run(2, train, Streamed(ByWorkerInfo(28)), flags)[0]
    # dealt out one by one and not shuffled, the rows of a step are the same, on other workers
    assert max(relative_differences(spread.losses, alone.losses)) < 1e-9
    job, sources = make_job(Streamed(ByShard(28)), flags)
    plan = make_plan(job.config, VerifyOptions(strategies=("ddp",)), job.workload, sources)
    assert not any(variant.job.splits["train"].dealt_by for group in plan.groups.values() for variant in group)


def test_rows_are_transformed_and_may_be_tuples_of_unequal_length():
    class Pairs(torch.utils.data.IterableDataset):
        def __len__(self):
            return 12

        def __iter__(self):
            return ((np.arange(n % 3 + 1.0), n) for n in range(12))

    class Summed(Streamed):
        def transform(self, rows, rng):
            return {"0": np.array([row.sum() for row in rows["0"]]), "1": rows["1"]}

    source = load_sources(Summed(Pairs()))["train"]
    assert source.gives_tuples and source.read(np.array([2, 0]))["0"].tolist() == [3, 0]
    with pytest.raises(DataError, match="column 0 of the train data has rows of unequal length"):
        load_sources(Streamed(Pairs()))
    assert DEFAULTS["batch.global_size"] < 12


class Corpus(torch.utils.data.IterableDataset):
    """Rows without an end and without a length, as of a corpus for pre-training."""

    def __init__(self, fails_at=None):
        self.fails_at = fails_at

    def __iter__(self):
        for number in itertools.count():
            if number == self.fails_at:
                raise KeyError("shard-7")
            yield {"x": np.float32([number % 5, 1.0]), "y": number % 3}


@pytest.fixture
def short_counts(monkeypatch):
    monkeypatch.setattr(iterable, "SHORT_COUNT_S", 0.05)
    monkeypatch.setattr(iterable, "COUNT_S", 0.05)


def test_rows_without_an_end_are_trained_on_where_lengths_are_in_steps(short_counts):
    source = as_source(Corpus(), split="train", in_steps=True)
    assert source.num_rows == iterable.ENDLESS and source.describe()["rows"] is None
    plan = StepPlan(source.num_rows, 4, seed=3, shuffle=True, window_rows=50)
    rows = source.opened().read_on(plan.positions(9), plan)
    whole = source.opened().read_on(np.concatenate([plan.positions(step) for step in range(10)]), plan)
    assert np.array_equal(rows["x"], whole["x"][-4:])  # a resume reads what an uninterrupted run reads


def test_rows_without_an_end_are_refused_where_lengths_are_in_epochs_and_in_evaluations(short_counts):
    for split, in_steps in (("train", False), ("val", True)):
        with pytest.raises(DataError, match=r"(?s)the length of Corpus is not known.*stop\.after: 10000 steps"):
            as_source(Corpus(), split=split, in_steps=in_steps)


def test_a_stream_that_fails_while_it_is_counted_is_an_error_of_the_users_code():
    with pytest.raises(WorkloadError, match=r"(?s)Corpus\.__iter__\(\) failed while counting its rows.*shard-7"):
        as_source(Corpus(fails_at=20), split="train")


def test_a_stream_that_ends_although_it_was_not_counted_is_refused(short_counts):
    class Slow(Endless):
        def __iter__(self):
            for row in super().__iter__():
                time.sleep(0.01)
                yield row

    source = as_source(Slow(), split="train", in_steps=True)
    plan = StepPlan(source.num_rows, 13, shuffle=False)
    with pytest.raises(DataError, match=r"with 26 rows in epoch 1: it was taken for endless"):
        source.opened().read_on(plan.positions(2), plan)


class Numbers(Stream):
    """Numbers of a file from `first` on, whose handle is opened once for each `owner`."""

    FILE = None

    def __init__(self, path, first, owner):
        self.path, self.first, self.owner = path, first, owner

    def __len__(self):
        return 20

    def __iter__(self):
        if self.owner == "iteration":
            file = open(self.path)  # noqa: SIM115
        elif self.owner == "class":
            file = Numbers.FILE = Numbers.FILE or open(self.path)  # noqa: SIM115
        else:
            file = opened(self.path)
        file.seek(0)
        for place in range(self.first + 20):
            line = file.readline()
            if place >= self.first:
                yield {"x": np.float32([int(line or -1)]), "y": 0}


@functools.lru_cache
def opened(path):
    return open(path)


class Blocks(Numbers):
    """Lines of 4 letters of one file from `first` on, read in blocks of 50 lines from one handle of the class."""

    def __len__(self):
        return 150

    def __iter__(self):
        file = Numbers.FILE = Numbers.FILE or open(self.path)  # noqa: SIM115
        file.seek(4 * self.first)
        for _ in range(3):
            for line in file.read(4 * 50).split():
                yield {"x": np.float32([int(line)]), "y": 0}


class ByNumber(torch.utils.data.Dataset):
    """The same rows by their numbers."""

    def __init__(self, *given):
        self.rows = Numbers(*given)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return next(itertools.islice(self.rows, index, None))


@pytest.mark.parametrize("owner", ["class", "cache"])
@pytest.mark.parametrize("other", [Numbers, ByNumber])
def test_splits_that_iterate_one_handle_are_refused_by_name(owner, other, tmp_path):
    (tmp_path / "numbers").write_text("".join(f"{n}\n" for n in range(40)))
    Numbers.FILE = None
    opened.cache_clear()
    given = {"train": Numbers(tmp_path / "numbers", 0, owner), "val": other(tmp_path / "numbers", 20, owner)}
    with pytest.raises(
        DataError, match="the train data has different rows if val is read at the same time: they share a"
    ):
        load_sources(Gives(given))


def test_splits_that_read_blocks_of_one_handle_are_refused_by_name(tmp_path):
    (tmp_path / "numbers").write_text("".join(f"{n:03}\n" for n in range(300)))
    Numbers.FILE = None
    given = {"train": Blocks(tmp_path / "numbers", 0, "class"), "val": Blocks(tmp_path / "numbers", 150, "class")}
    with pytest.raises(
        DataError, match="the train data has different rows if val is read at the same time: they share a"
    ):
        load_sources(Gives(given))


@pytest.mark.parametrize("kind", [Stream, Noisy, Unrepeatable])
def test_splits_that_do_not_share_a_handle_are_accepted(kind, tmp_path):
    (tmp_path / "numbers").write_text("".join(f"{n}\n" for n in range(40)))
    given = {"train": kind(), "val": Numbers(tmp_path / "numbers", 20, "iteration"), "test": kind()}
    assert set(load_sources(Gives(given))) == set(given)


class OwnBuffer(Stream):
    """Every row lies in the same memory."""

    def __iter__(self):
        buffer = np.zeros(4, np.float32)
        for number in range(NUM):
            buffer[:] = number
            yield {"x": buffer, "y": number}


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_that_lie_in_memory_that_is_used_again_are_read_as_they_were(shuffle):
    source = as_source(OwnBuffer(), split="train")
    plan = StepPlan(NUM, NUM, seed=3, shuffle=shuffle, window_rows=7)
    for found in (source.opened().read_on(np.arange(NUM), plan), source.read(np.arange(NUM))):
        assert sorted(found["y"]) == list(range(NUM)) and (found["x"] == found["y"][:, None]).all()


class Gives:
    def __init__(self, splits):
        self.splits = splits

    def datasets(self):
        return self.splits
