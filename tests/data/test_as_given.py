"""Datasets that keep a state: their rows are right with several readers, and they are sent as they were given."""

import functools
import pickle
import socket
import sqlite3
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from scaleray.data import DatasetSource, as_source, load_sources
from scaleray.data.collation import collated
from scaleray.data.sample_order import StepPlan
from scaleray.data.user_dataset import AsGiven, problem_of
from scaleray.errors import DataError
from scaleray.verification.check.data_checks import sendable

NUM_ROWS = 400


@pytest.fixture
def numbers(tmp_path):
    path = tmp_path / "numbers.bin"
    np.arange(NUM_ROWS, dtype=np.int64).tofile(path)
    return str(path)


class Lazy(torch.utils.data.Dataset):
    """Each row is its own number in a file, which is opened when the first row is read."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        self.file.seek(8 * index)
        return {"asked": index, "got": int.from_bytes(self.file.read(8), "little")}


class _Gives:
    def __init__(self, splits):
        self.splits = splits

    def datasets(self):
        return self.splits


@functools.cache
def opened(path):
    return open(path, "rb", buffering=0)


class Cached(Lazy):
    """The handle lies in a cache of the module, which every copy shares."""

    def __getitem__(self, index):
        opened(self.path).seek(8 * index)
        time.sleep(1e-5)
        return {"asked": index, "got": int.from_bytes(opened(self.path).read(8), "little")}


class Shard(Lazy):
    """A shard is loaded when a row of it is asked for."""

    def __init__(self, path):
        super().__init__(path)
        self.number, self.rows = -1, None

    def __getitem__(self, index):
        if self.number != index // 10:
            self.number = index // 10
            self.rows = np.fromfile(self.path, np.int64, count=10, offset=80 * self.number)
        return {"asked": index, "got": self.rows[index % 10]}


def wrong_rows(*sources):
    """Rows other than those asked for, of these sources, each read by a thread of its own."""
    wrong, indices = [], np.arange(150)

    def read(source, seed):
        order = np.random.default_rng(seed).permutation(indices)
        for part in np.split(order, 15):
            rows = source.read(part)
            wrong.extend(rows["asked"][(rows["asked"] != rows["got"].reshape(len(part), -1).T).any(axis=0)])

    threads = [threading.Thread(target=read, args=(source, seed)) for seed, source in enumerate(sources)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return wrong


class Buffered(Lazy):
    """Every row lies in the same memory."""

    BUFFER = np.zeros(4096, np.int64)

    def __getitem__(self, index):
        self.BUFFER[:] = index
        return {"asked": index, "got": self.BUFFER}


@pytest.mark.parametrize("kind", [Lazy, Cached, Shard, Buffered])
@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: ConcatDataset([rows])])
def test_splits_that_share_a_state_read_the_rows_asked_for(kind, wrap, numbers):
    rows = wrap(kind(numbers))
    halves = [Subset(rows, range(200)), Subset(rows, range(200, 400))]
    assert wrong_rows(*map(DatasetSource, halves)) == []


class Numbered(_Gives):
    """Rows are their numbers; `transform` reads them by one handle of the module."""

    build_model = loss = None

    def __init__(self, path):
        self.path = path
        super().__init__({name: {"asked": np.arange(200)} for name in ("train", "val")})

    def transform(self, rows, rng):
        file, found = opened(self.path), []
        for number in rows["asked"]:
            file.seek(8 * number)
            time.sleep(1e-5)  # another thread runs
            found.append(int.from_bytes(file.read(8), "little"))
        return {**rows, "got": np.array(found)}


class Preprocessed(Numbered):
    """A preprocessor reads them."""

    transform = None

    def preprocessor(self):
        return _Reads(self.path)


class _Reads:
    def __init__(self, path):
        self.path = path

    def transform(self, rows):
        return Numbered.transform(self, rows, None)


class Reused(Numbered):
    """All rows of a column lie in the same memory, and all splits."""

    BUFFER = np.zeros((200, 4096), np.int64)

    def transform(self, rows, rng):
        found = self.BUFFER[: len(rows["asked"])]
        found[:] = rows["asked"][:, None]
        time.sleep(1e-4)
        return {**rows, "got": found}


class Collated(Numbered):
    """A Dataset reads by the handle of the module, and so does `collate`."""

    transform = None

    def __init__(self, path):
        super().__init__(path)
        self.splits["train"] = Cached(path)

    def collate(self, rows):
        return Numbered.transform(self, rows.columns, None)


@pytest.mark.parametrize("kind", [Numbered, Preprocessed, Reused, Collated])
def test_user_code_that_reads_by_one_handle_in_two_threads_gets_the_rows_asked_for(kind, numbers):
    workload = kind(numbers)
    train, val = load_sources(workload).values()
    if kind is Collated:
        of_val = val
        val = SimpleNamespace(read=lambda part: collated(workload.collate, of_val.read(part), gives_tuples=False))
    assert wrong_rows(train, val) == []


@pytest.mark.parametrize("kind", [Numbered, Reused])
def test_rows_of_a_transform_are_not_changed_by_the_next_ones(kind, numbers):
    source = load_sources(kind(numbers))["train"]
    first = source.read(np.arange(9))
    source.read(np.arange(9, 18))
    assert (first["asked"] == first["got"].reshape(9, -1).T).all()


def test_a_dataset_is_sent_as_it_was_given(numbers):
    rows = Lazy(numbers)
    splits = {"train": Subset(rows, range(200)), "val": Subset(rows, range(200, 400))}
    for name, source in load_sources(_Gives(splits)).items():
        assert rows.file is not None  # a few rows were read
        arrived = pickle.loads(pickle.dumps(source))
        assert arrived.dataset.dataset.file is None
        assert arrived.read(np.array([7]))["got"] == [splits[name].indices[7]]


class Held(Lazy):
    """An attribute that cannot be pickled."""

    def __init__(self, path, held):
        super().__init__(path)
        self.parts = {"held": held}


@pytest.mark.parametrize("make", [lambda: socket.socket(), threading.Lock, lambda: (n for n in range(3))])
def test_a_dataset_that_cannot_be_sent_names_class_and_attribute(make, numbers):
    source = as_source(Subset(Held(numbers, make()), range(200)), split="train")
    assert wrong_rows(source, source) == []  # it is read here
    with pytest.raises(DataError, match=r"(?s)parts\['held'\] of the Dataset Held is a .*open it in __getitem__"):
        pickle.dumps(source)
    [finding] = sendable({"train": source})
    assert "of the Dataset Held" in finding.text and str(problem_of(source)) == finding.text


class Database(Lazy):
    def __init__(self, path):
        super().__init__(path)
        self.db = sqlite3.connect(":memory:")

    def __getitem__(self, index):
        return {"x": self.db.execute("select ?", (index,)).fetchone()[0]}


def test_a_connection_of_one_thread_is_refused(numbers):
    with pytest.raises(DataError, match=r"db of the Dataset Database is a sqlite3\.Connection.*\n.*__getitem__"):
        as_source(Database(numbers), split="train")


class Lines(torch.utils.data.IterableDataset):
    """Rows through a handle that the object keeps, so that one iteration moves the other's place."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return NUM_ROWS

    def __iter__(self):
        self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        while read := self.file.read(8):
            yield {"got": int.from_bytes(read, "little")}


def test_splits_that_iterate_one_object_do_not_move_each_others_place(numbers):
    lines, plan = Lines(numbers), StepPlan(NUM_ROWS, 1, shuffle=False)
    train, val = load_sources(_Gives({"train": lines, "val": lines})).values()
    found = []
    for number in range(0, 100, 10):
        found.append(train.read_on(np.arange(number, number + 10), plan)["got"])
        val.read_on(np.arange(number // 2, number // 2 + 5), plan)
    assert np.array_equal(np.concatenate(found), np.arange(100))


class Noted(torch.utils.data.Dataset):
    """Writes into an array of its own."""

    def __init__(self):
        self.x, self.reads = np.arange(8.0), np.zeros(8)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.reads[index] = 1
        return self.x[index], index


def test_a_dataset_may_write_into_arrays_that_arrive_read_only():
    source = DatasetSource(Noted())
    arrays = []
    state = pickle.dumps(source, protocol=5, buffer_callback=arrays.append)
    arrived = pickle.loads(state, buffers=[bytes(array.raw()) for array in arrays])  # as Ray's shared memory
    assert not arrived.dataset.x.flags.writeable
    assert arrived.read(np.array([3]))["0"] == [3.0] and arrived.dataset.reads[3] == 1


def test_arrays_and_code_are_shared_with_the_copy():
    given = AsGiven(noted := Noted())
    copy = given.copy()
    assert copy is not noted and copy.x is noted.x and type(copy) is Noted


class Noisy(Noted):
    """Adds its noise in place, through torch."""

    def __getitem__(self, index):
        row = torch.from_numpy(self.x[index : index + 1])
        row += torch.randn(1)
        return row, index


def test_a_dataset_whose_rows_change_as_they_are_read_is_named():
    values = DatasetSource(Noisy()).row_values
    assert not values.are_repeatable and "row 0 differs in column 0 when it is read again" in values.difference
