"""Sources: any rows by index, in the order asked for, and a reason where they cannot be read."""

import pickle
import re
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaleray.data import ArraySource, DatasetSource, ParquetSource, TokenSource, as_source, load_sources
from scaleray.data.source_interface import Source
from scaleray.errors import DataError, WorkloadError

INDICES = np.array([5, 0, 11, 0, 7, 6, 11])


def columns():
    return {"x": np.arange(24, dtype=np.float32).reshape(12, 2), "y": np.arange(12) * 10}


def write_parquet(folder, files=3, rows_in_group=2, **more):
    """Twelve rows over several files and row groups: id, x (fixed-size list), image (nested lists)."""
    folder.mkdir(exist_ok=True)
    per_file = 12 // files
    for number in range(files):
        ids = np.arange(number * per_file, (number + 1) * per_file)
        table = pa.table(
            {
                "id": ids,
                "x": pa.FixedSizeListArray.from_arrays(
                    pa.array(np.repeat(ids, 3) + np.tile([0.0, 0.25, 0.5], per_file)), 3
                ),
                "image": pa.array([[[int(i), 1], [2, int(i)]] for i in ids], pa.list_(pa.list_(pa.int16()))),
                "flag": ids % 2 == 0,
                **{name: make(ids) for name, make in more.items()},
            }
        )
        pq.write_table(table, folder / f"part-{number:02d}.parquet", row_group_size=rows_in_group)
    return folder


def sources(tmp_path):
    tokens = np.arange(61, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    x, y = (torch.from_numpy(v) for v in columns().values())
    return {
        "arrays": ArraySource(columns()),
        "tokens in memory": TokenSource(tokens, sequence_length=5),
        "tokens in a file": TokenSource(tmp_path / "tokens.bin", sequence_length=5, dtype="uint16"),
        "parquet": ParquetSource(write_parquet(tmp_path / "parquet")),
        "torch dataset": DatasetSource(torch.utils.data.TensorDataset(x, y)),
    }


KINDS = ["arrays", "tokens in memory", "tokens in a file", "parquet", "torch dataset"]


# every source


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_in_the_order_of_their_indices(kind, tmp_path):
    source = sources(tmp_path)[kind]
    assert isinstance(source, Source) and source.num_rows == 12 and source.row_bytes >= 1
    whole = source.read(np.arange(12))
    found = source.read(INDICES)
    assert found.keys() == whole.keys() and len(found) >= 1
    for name in whole:
        assert len(np.unique(whole[name].reshape(12, -1), axis=0)) == 12 or name == "flag"  # rows can be told apart
        assert np.array_equal(found[name], whole[name][INDICES])
        assert found[name].dtype == whole[name].dtype


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_reads_the_same_after_pickling(kind, tmp_path):
    source = sources(tmp_path)[kind]
    source.read(INDICES)
    again = pickle.loads(pickle.dumps(source))
    assert all(np.array_equal(again.read(INDICES)[name], values) for name, values in source.read(INDICES).items())
    assert again.describe() == source.describe()


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_is_plain_and_the_same_twice(kind, tmp_path):
    facts = sources(tmp_path)[kind].describe()
    assert facts == sources(tmp_path)[kind].describe()
    assert facts["rows"] == 12 and facts["bytes"] > 0
    assert all(value is None or isinstance(value, (str, int)) for value in facts.values())
    assert (facts["sha256"] is None) == (kind == "torch dataset")


# arrays


def test_arrays_may_be_numpy_or_tensors_of_any_layout():
    numbers = np.arange(24).reshape(2, 12).T
    source = ArraySource({"a": numbers, "b": torch.from_numpy(numbers), "c": [*range(12)], "d": numbers.astype(">f4")})
    found = source.read(INDICES)
    assert np.array_equal(found["a"], numbers[INDICES]) and np.array_equal(found["b"], found["a"])
    assert np.array_equal(found["d"], found["a"])
    assert all(
        torch.from_numpy(values).shape[0] == len(INDICES) for values in found.values()
    )  # torch takes all of them


def test_the_hash_of_arrays_follows_content_type_shape_and_name():
    def digest(**arrays):
        return ArraySource(arrays).describe()["sha256"]

    x = np.arange(6)
    digests = [
        digest(x=x),
        digest(x=x + 1),
        digest(x=x.astype(np.int32)),
        digest(x=x.reshape(6, 1)),
        digest(y=x),
        digest(x=x, y=x),
        digest(x=x[::-1]),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(x=x, y=x + 1) == digest(y=x + 1, x=x)  # the order of the columns says nothing


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "at least one array"),
        ({"a": np.zeros(3), "b": np.zeros(4)}, "'a': 3, 'b': 4"),
        ({"a": np.float32(1)}, "same number of rows"),
        ({"a": np.array(["cat", "dog"])}, "column a"),
        ({"a": np.array([None, 1], dtype=object)}, "columns hold numbers"),
        ({"a": np.array(["2024-01-01"], dtype="datetime64[D]")}, "columns hold numbers"),
        ({"a": np.zeros(3, dtype=np.longdouble)}, "columns hold numbers"),
    ],
)
def test_arrays_that_cannot_be_trained_on_are_refused(arrays, words):
    with pytest.raises(DataError, match=words):
        ArraySource(arrays)


# tokens


@given(length=st.integers(1, 9), num_tokens=st.integers(0, 60))
def test_rows_of_tokens_overlap_by_one_and_predict_every_token_but_the_first_once(length, num_tokens):
    source = TokenSource(np.arange(num_tokens), sequence_length=length)
    assert source.tokens_per_row == length
    assert source.num_rows == max(0, (num_tokens - 1) // length)
    if source.num_rows:
        rows = source.read(np.arange(source.num_rows))["tokens"]
        assert rows.shape == (source.num_rows, length + 1)
        assert np.array_equal(rows[:, 1:].reshape(-1), np.arange(1, source.num_rows * length + 1))
        assert np.array_equal(rows[1:, 0], rows[:-1, -1])


def test_tokens_in_a_file_and_in_memory_are_the_same(tmp_path):
    found = sources(tmp_path)
    memory, file = found["tokens in memory"], found["tokens in a file"]
    assert np.array_equal(memory.read(INDICES)["tokens"], file.read(INDICES)["tokens"])
    assert memory.describe() == file.describe()
    assert file.row_bytes == 12


def test_the_hash_of_tokens_follows_the_content():
    first, second = (TokenSource(np.arange(n, n + 61), sequence_length=5).describe()["sha256"] for n in (0, 1))
    assert first != second


def test_a_large_token_file_is_known_by_name_and_size(tmp_path, monkeypatch):
    source = sources(tmp_path)["tokens in a file"]
    monkeypatch.setattr("scaleray.data.sources.HASH_LIMIT_BYTES", 100)
    facts = source.describe()
    assert facts["hashed"] == "name and size" and len(facts["sha256"]) == 64


def test_a_token_file_that_is_missing_or_empty_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        TokenSource(tmp_path / "none.bin", sequence_length=4)
    (tmp_path / "empty.bin").touch()
    with pytest.raises(DataError, match="the train data is empty"):
        as_source(TokenSource(tmp_path / "empty.bin", sequence_length=4), split="train")


# Parquet


@pytest.mark.parametrize(("files", "rows_in_group"), [(1, 12), (1, 5), (3, 2), (12, 1)])
def test_parquet_of_several_files_and_row_groups_reads_as_one_table(tmp_path, files, rows_in_group):
    source = ParquetSource(write_parquet(tmp_path / "data", files, rows_in_group))
    assert sum(source.group_sizes) == source.num_rows == 12
    assert source.describe()["files"] == files and source.describe()["row_groups"] == len(source.group_sizes)
    found = source.read(INDICES)
    assert found["id"].tolist() == INDICES.tolist()
    assert np.allclose(found["x"], INDICES[:, None] + [0, 0.25, 0.5])
    assert found["image"].shape == (7, 2, 2) and found["image"].dtype == np.int16
    assert found["image"][:, 0, 0].tolist() == INDICES.tolist() == found["image"][:, 1, 1].tolist()
    assert found["flag"].tolist() == (INDICES % 2 == 0).tolist()


def test_parquet_reads_only_the_columns_asked_for_in_their_order(tmp_path):
    source = ParquetSource(write_parquet(tmp_path / "data"), columns=["x", "id"])
    assert list(source.read(INDICES)) == ["x", "id"]
    with pytest.raises(DataError, match="has the columns id, x, image, flag"):
        ParquetSource(tmp_path / "data", columns=["x", "label"])


@pytest.mark.parametrize("rows_in_group", [1, 4])
def test_the_size_of_a_parquet_row_is_that_of_its_uncompressed_columns(tmp_path, rows_in_group):
    folder = write_parquet(tmp_path / "p", rows_in_group=rows_in_group)
    total = 0
    for path in folder.iterdir():
        footer = pq.read_metadata(path)
        total += sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
    assert ParquetSource(folder).row_bytes == total // 12 > 1


def test_parquet_may_be_one_file_of_any_name_in_a_folder_with_spaces(tmp_path, monkeypatch):
    folder = tmp_path / "my data %20 ü"
    write_parquet(folder, files=1)
    (folder / "part-00.parquet").rename(folder / "numbers.bin")
    monkeypatch.chdir(folder)
    source = ParquetSource("numbers.bin")
    monkeypatch.chdir("/")  # workers run elsewhere
    assert source.read(INDICES)["id"].tolist() == INDICES.tolist()


def test_parquet_takes_a_file_uri(tmp_path):
    source = ParquetSource(write_parquet(tmp_path / "data").as_uri())
    assert source.read(INDICES)["id"].tolist() == INDICES.tolist()
    assert source.describe()["hashed"] == "content"


def test_other_files_in_a_folder_are_left_alone(tmp_path):
    folder = write_parquet(tmp_path / "data")
    (folder / "README.txt").write_text("not a table")
    (folder / "_SUCCESS").touch()
    write_parquet(folder / "deeper", files=1)
    assert ParquetSource(folder).num_rows == 24


def test_the_hash_of_parquet_follows_the_content_and_large_folders_go_by_names(tmp_path, monkeypatch):
    first = ParquetSource(write_parquet(tmp_path / "a")).describe()
    assert first["hashed"] == "content"
    assert ParquetSource(write_parquet(tmp_path / "b", files=4)).describe()["sha256"] != first["sha256"]
    monkeypatch.setattr("scaleray.data.parquet.HASH_LIMIT_BYTES", 100)
    assert ParquetSource(tmp_path / "a").describe()["hashed"] == "names and sizes"


@pytest.mark.parametrize("keep", [0, 4, 100, -20])
def test_a_truncated_file_is_named_at_once(tmp_path, keep):
    folder = write_parquet(tmp_path / "data")
    content = (folder / "part-01.parquet").read_bytes()
    (folder / "part-01.parquet").write_bytes(content[:keep])
    with pytest.raises(DataError, match=r"part-01\.parquet"):
        ParquetSource(folder)


def test_a_file_damaged_in_the_middle_is_named_with_its_row_group_when_it_is_read(tmp_path):
    folder = write_parquet(tmp_path / "data", rows_in_group=4)
    content = bytearray((folder / "part-02.parquet").read_bytes())
    content[4:200] = b"\xff" * 196
    (folder / "part-02.parquet").write_bytes(content)
    source = ParquetSource(folder)
    assert source.read(np.array([0, 5]))["id"].tolist() == [0, 5]
    with pytest.raises(DataError, match=r"part-02\.parquet, row group 0"):
        source.read(np.array([0, 9]))


def test_a_file_that_vanishes_is_named(tmp_path):
    folder = write_parquet(tmp_path / "data")
    source = ParquetSource(folder)
    (folder / "part-00.parquet").unlink()
    with pytest.raises(DataError, match=r"part-00\.parquet"):
        source.read(np.array([0]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda ids: pa.array([f"row {i}" for i in ids]), "columns hold numbers"),
        (lambda ids: pa.array([int(i) if i % 5 else None for i in ids]), "1 null"),
        (lambda ids: pa.array([[1, 2] if i % 5 else None for i in ids]), "1 null"),
        (lambda ids: pa.array([[1, None] for i in ids]), "2 nulls"),
        (lambda ids: pa.array([[[1], [2, 3]] for i in ids]), "only in the length of their outer list"),
        (lambda ids: pa.array([{"a": int(i)} for i in ids]), "columns hold numbers"),
    ],
)
def test_columns_that_are_no_arrays_of_numbers_are_refused_by_name(tmp_path, make, words):
    source = ParquetSource(write_parquet(tmp_path / "data", odd=make))
    with pytest.raises(DataError, match=words) as caught:
        source.read(np.arange(12))
    assert "odd" in str(caught.value)
    assert ParquetSource(tmp_path / "data", columns=["id"]).read(INDICES)["id"].tolist() == INDICES.tolist()


def test_nulls_are_refused_from_the_footers_with_file_column_and_row_group(tmp_path):
    folder = write_parquet(tmp_path / "data")
    table = pa.table({"id": pa.array([1, 2, 3, None, None, 6], pa.int64())})
    pq.write_table(table, folder / "zz.parquet", row_group_size=2)
    source = ParquetSource(folder, columns=["id"])
    with pytest.raises(DataError) as caught:
        as_source(source, split="train")
    assert re.search(r"column id of .*zz\.parquet, row group 1, has 1 null: ", str(caught.value)), caught.value
    assert as_source(source, split="train", allows_text=True).num_rows > 6  # a preprocessor fills them


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: pa.array([int(i) if i % 5 else None for i in ids]),
        lambda ids: pa.array([[1, 2 if i % 5 else None] for i in ids]),
    ],
)
def test_nulls_that_no_footer_counts_are_refused_where_they_are_read(tmp_path, make):
    folder = write_parquet(tmp_path / "data", odd=make)
    for path in folder.glob("*.parquet"):
        pq.write_table(pq.read_table(path), path, write_statistics=False)
    source = as_source(ParquetSource(folder), split="train")
    with pytest.raises(DataError, match=r"column odd of .*\.parquet, row group 0, has 1 null: "):
        source.read(np.arange(12))


def test_lists_of_which_some_are_empty_hold_no_nulls(tmp_path):
    folder = write_parquet(
        tmp_path / "data", odd=lambda ids: pa.array([[1] * (int(i) % 3) for i in ids], pa.list_(pa.int64()))
    )
    source = as_source(ParquetSource(folder), split="train")
    assert len(source.read(np.arange(6))["odd"]) == 6


def test_lists_of_length_zero_are_an_array_without_width(tmp_path):
    source = ParquetSource(
        write_parquet(tmp_path / "data", none=lambda ids: pa.array([[] for _ in ids], pa.list_(pa.int8())))
    )
    assert source.read(INDICES)["none"].shape == (7, 0)


def test_files_with_other_columns_or_types_are_named_at_once(tmp_path):
    folder = write_parquet(tmp_path / "data")
    pq.write_table(pa.table({"id": [1.5]}), folder / "zz.parquet")
    with pytest.raises(DataError, match=r"zz\.parquet"):
        ParquetSource(folder)
    with pytest.raises(DataError, match=r"column id of .*zz\.parquet is double: it must be int64") as caught:
        ParquetSource(folder, columns=["id"])
    assert "part-00.parquet" in str(caught.value)


def test_files_may_order_their_columns_as_they_like(tmp_path):
    folder = write_parquet(tmp_path / "data", files=1)
    table = pq.read_table(folder / "part-00.parquet")
    pq.write_table(table.select(table.column_names[::-1]), folder / "part-01.parquet")
    assert ParquetSource(folder).read(np.array([3, 15]))["id"].tolist() == [3, 3]


@pytest.mark.parametrize("make", [lambda path: path / "nowhere", lambda path: path])
def test_a_path_without_parquet_is_refused(tmp_path, make):
    with pytest.raises(DataError, match=r"does not exist|contains no \.parquet file"):
        ParquetSource(make(tmp_path))


def test_a_path_of_an_unknown_kind_is_refused():
    with pytest.raises(DataError, match="cannot be opened"):
        ParquetSource("ftp2://host/data")


def test_empty_row_groups_and_files_do_no_harm(tmp_path):
    folder = write_parquet(tmp_path / "data")
    table = pq.read_table(folder / "part-00.parquet")
    pq.write_table(table.slice(0, 0), folder / "part-000.parquet")
    source = ParquetSource(folder)
    assert source.num_rows == 12
    assert source.read(INDICES)["id"].tolist() == INDICES.tolist()


# torch datasets


class Items(torch.utils.data.Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_a_dataset_of_tuples_gives_numbered_columns_and_of_dicts_named_ones():
    tuples = as_source(Items((torch.ones(2), 5), (torch.zeros(2), 6)), split="train")
    assert tuples.gives_tuples and tuples.read(np.array([1, 0]))["1"].tolist() == [6, 5]
    dicts = as_source(Items({"x": np.ones(2), "y": 5}, {"x": np.zeros(2), "y": 6}), split="train")
    assert not dicts.gives_tuples and dicts.read(np.array([1, 0]))["y"].tolist() == [6, 5]
    bare = as_source(Items(torch.ones(2), torch.zeros(2)), split="train")
    assert bare.gives_tuples and bare.read(np.array([1]))["0"].tolist() == [[0, 0]]


def test_rows_of_several_lengths_are_refused_with_the_way_out_where_nothing_collates_them():
    items = Items({"x": np.ones(2)}, {"x": np.ones(3)})
    workload = type("Given", (), {"datasets": lambda self: {"train": items}})()
    with pytest.raises(DataError, match=r"rows of unequal length .2 to 3 values.[^$]*collate = scaleray.data.Padding"):
        load_sources(workload)


def test_items_that_are_no_numbers_are_refused_at_once():
    with pytest.raises(DataError, match="column label"):
        as_source(Items({"label": "cat"}), split="train")


# what datasets() may return


@pytest.mark.parametrize("value", [None, "path", [1, 2], (1, 2), np.zeros(3), 5, object()])
def test_anything_else_is_refused_with_what_is_allowed(value):
    with pytest.raises(
        DataError, match="a dict of arrays, a source, a torch Dataset, an IterableDataset or a Ray Dataset"
    ):
        as_source(value, split="val")


@pytest.mark.parametrize("value", [{"x": np.zeros((0, 3))}, Items()])
def test_an_empty_split_is_refused_by_name(value):
    with pytest.raises(DataError, match="the val data is empty"):
        as_source(value, split="val")


def test_a_source_of_the_users_own_is_taken_as_it_is():
    class Squares:
        num_rows, row_bytes, tokens_per_row, group_sizes = 10, 8, None, None

        def read(self, indices):
            return {"n": indices**2}

        def describe(self):
            return {"kind": "squares"}

    source = Squares()
    assert as_source(source, split="train") is source


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([Decimal("1.5"), Decimal("2")], "value 0 of column x is a Decimal, 1.5: .*\n  convert the column with float"),
        (
            [1.0, None, 2.0],
            "value 1 of column x is nothing .None.: columns hold numbers.\n  fill in the missing values",
        ),
        ([{"a": 1}, {"a": 2}], "value 0 of column x is a dict, .*\n  make each of its keys"),
        (np.array(None), "column x is nothing .None.:"),
        (
            [[[1, 2], [3]]] * 3,
            "column x is a nested list with parts of unequal length: columns hold numbers.\n  give rows of one",
        ),
        ([[1, [2, 3]]] * 3, "column x is a nested list with parts of unequal length: "),
        ([[[1, 2], [3]], [[1]]], "column x is a nested list with parts of unequal length: "),
    ],
)
def test_values_that_are_no_numbers_are_named_by_their_type(value, words):
    with pytest.raises(DataError, match=words):
        ArraySource({"x": value, "y": np.arange(len(value) if isinstance(value, list) else 1)})


@pytest.mark.parametrize("length", [-1, 10**30, 2.5, "12", None])
def test_a_length_that_is_none_is_an_error_of_the_dataset(length):
    class Odd(torch.utils.data.Dataset):
        def __len__(self):
            return length

        def __getitem__(self, index):
            return {"x": 1.0}

    with pytest.raises(
        WorkloadError, match=r"(?s)Odd\.__len__\(\) .*it must return the number of rows, an int of at least 0"
    ):
        as_source(Odd(), split="train")
