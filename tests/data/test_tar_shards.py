"""WebDataset tar shards: indexed once, read by index in any order, decoded by the ending of a name."""

from __future__ import annotations

import io
import json
import pickle
import tarfile

import numpy as np
import pytest

from scaleray.data import Padding, Split, TarSource, load_sources
from scaleray.errors import DataError

NUM = 9


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def png(value):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.full((4, 5, 3), value, np.uint8)).save(file, "png")
    return file.getvalue()


def files_of(row):
    return {
        "x.npy": npy(np.full((2, 3), row, np.float32)),
        "cls": str(row % 3).encode(),
        "json": json.dumps({"weight": row / 2, "box": [row, 1]}).encode(),
        "bin": bytes([row, 7]),
    }


def write(folder, make=files_of, *, shards=2):
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / f"part-{shard}.tar", "w") as tar:
            folder_itself = tarfile.TarInfo("train")
            folder_itself.type = tarfile.DIRTYPE
            tar.addfile(folder_itself)
            tar.addfile(tarfile.TarInfo("train/.hidden"))
            for row in range(shard, NUM, shards):
                for ending, content in make(row).items():
                    info = tarfile.TarInfo(f"train/{row:04d}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return folder


def doubled(content):
    return 2 * np.frombuffer(content, np.uint8)


def test_rows_are_read_by_index_in_any_order_and_after_pickling(tmp_path):
    source = TarSource(write(tmp_path / "data"), decoders={"bin": doubled})
    assert source.num_rows == NUM
    rows = [0, 2, 4, 6, 8, 1, 3, 5, 7]  # by shard
    index = np.array([8, 0, 3, 3])
    for one in (source, pickle.loads(pickle.dumps(source))):
        found = one.read(index)
        assert found["x.npy"].shape == (4, 2, 3) and found["x.npy"][:, 0, 0].tolist() == [rows[i] for i in index]
        assert found["cls"].tolist() == [rows[i] % 3 for i in index]
        assert found["json.weight"].tolist() == [rows[i] / 2 for i in index]
        assert found["json.box"][:, 0].tolist() == [rows[i] for i in index]
        assert found["bin"].dtype == np.uint8 and found["bin"][:, 1].tolist() == [14] * 4
    facts = source.describe()
    assert facts["kind"] == "tar shards" and facts["files"] == 2 and len(facts["sha256"]) == 64


def workload_of(source, **more):
    return type("Given", (), {"datasets": lambda self: {"train": source}, **more})()


def test_images_and_text_become_columns(tmp_path):
    source = TarSource(write(tmp_path / "data", lambda row: {"png": png(row), "txt": f"row {row}".encode()}))

    def transform(self, rows, rng):
        return {"image": rows["png"], "number": np.array([int(text.split()[1]) for text in rows["txt"]])}

    found = load_sources(workload_of(source, transform=transform))["train"].read(np.array([1, 5]))
    assert found["image"].shape == (2, 4, 5, 3) and found["number"].tolist() == [2, 1]
    assert found["image"][:, 0, 0, 0].tolist() == [2, 1]
    with pytest.raises(DataError, match=r"column txt is .*: columns hold numbers"):
        load_sources(workload_of(source))


def test_rows_of_unequal_length_are_ragged(tmp_path):
    source = TarSource(write(tmp_path / "data", lambda row: {"npy": npy(np.arange(row + 1))}))
    loaded = load_sources(workload_of(source, collate=Padding()))["train"]
    assert loaded.read(np.array([4, 0]))["npy"].lengths.tolist() == [9, 1]
    assert Split.of("train", loaded).row_values.promise == ""
    with pytest.raises(DataError, match="column npy of the train data has rows of unequal length"):
        load_sources(workload_of(source))


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda row: {"cls": b"1", **({"bin": b"1"} if row < 5 else {})}, {}, r"row train/0006 .* lacks \.bin"),
        (lambda row: {"xyz": b"1"}, {}, r"give decoders=\{'xyz'"),
        (files_of, {"columns": ["wav"]}, r"they have the extensions x\.npy, cls, json, bin"),
        (lambda row: {"npy": npy(np.array([{}], dtype=object))}, {}, r"0000\.npy of .*it cannot be decoded"),
        (lambda row: {"cls": b"one"}, {}, r"0000\.cls of .*it cannot be decoded"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, make, options, words):
    with pytest.raises(DataError, match=words):
        TarSource(write(tmp_path / "data", make), **options)


def test_paths_without_shards_are_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        TarSource(tmp_path / "none")
    with pytest.raises(DataError, match=r"contains no \.tar file"):
        TarSource(tmp_path)
    (tmp_path / "odd.tar").write_bytes(b"no tar" * 300)
    with pytest.raises(DataError, match=r"shards are plain \.tar files"):
        TarSource(tmp_path / "odd.tar")
