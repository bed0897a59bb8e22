"""Every kind of tensor and every kind of path comes back as it was."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from saved_runs import assert_equal, catalog_of, make_saver, read_all, save

from scaleray.checkpoints import sharded
from scaleray.checkpoints.storage import Store

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "int64", "int32",
    "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip


def varied():
    draw = torch.Generator().manual_seed(0)
    plain = torch.randn(4, 6, generator=draw)
    return {
        **{f"dtype.{name}": plain.to(getattr(torch, name)) for name in DTYPES},
        "empty": torch.zeros(0),
        "empty matrix": torch.zeros(3, 0, 2),
        "scalar": torch.tensor(3.5),
        "flag": torch.tensor(True),
        "transposed": plain.t(),
        "every other": plain[:, ::2],
        "expanded": plain[:1].expand(5, 6),
        "conjugated": plain.to(torch.complex64).conj(),
        "parameter": torch.nn.Parameter(plain),
        "one": torch.ones(1),
        "odd": torch.ones(13, dtype=torch.uint8),
        "not.a.number": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def test_every_dtype_and_layout_is_saved_and_loaded(tmp_path):
    catalog, tensors = catalog_of(tmp_path), varied()
    save(make_saver(catalog), 1, tensors)
    manifest = catalog.read(1)
    assert catalog.check(manifest) == []
    assert_equal(read_all(catalog, manifest), tensors)
    into = {f"model.{name}": torch.empty_like(t, requires_grad=False).contiguous() for name, t in tensors.items()}
    into["model.transposed"] = torch.empty(4, 6).t()
    sharded.load(into, catalog.stores, manifest, None)
    assert_equal({name.removeprefix("model."): t for name, t in into.items()}, tensors)


def test_unchanged_tensors_of_every_kind_are_not_written_again(tmp_path):
    catalog, tensors = catalog_of(tmp_path), varied()
    saver = make_saver(catalog)
    save(saver, 1, tensors)
    save(saver, 2, tensors)
    assert catalog.read(2).bytes_written == 0
    assert_equal(read_all(catalog, catalog.read(2)), tensors)


@pytest.mark.parametrize(
    "name", ["with space", "ümläut 漢", "what?", "a#b", "a%20b", "a&b=c", "{braces}", "'quoted\"", "trailing."]
)
def test_a_local_path_may_have_any_characters(tmp_path, name):
    run, copy = tmp_path / name / "run", tmp_path / "copies of" / name
    catalog = catalog_of(run, copy)
    saver = make_saver(catalog, keep_last=1)
    tensors = {"w": torch.arange(5.0)}
    for step in (1, 2):
        save(saver, step, tensors)
    assert [m.step for m in catalog.complete()] == [2]
    assert_equal(read_all(catalog, catalog.read(2)), tensors)
    assert (run / "checkpoints" / "step-000000002" / "manifest.json").is_file()
    assert (copy / "run" / "checkpoints" / "step-000000002" / "manifest.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {name, "copies of"}


def test_a_file_uri_is_the_folder_itself(tmp_path):
    store = Store(f"file://{tmp_path}/a%20b")
    store.write("x", [b"1"])
    assert (tmp_path / "a b" / "x").read_bytes() == b"1"
    assert store.is_local


def test_a_bucket_keeps_its_query_at_the_end():
    store = Store("s3://bucket/runs?scheme=http")
    assert store.child("run").root == "s3://bucket/runs/run?scheme=http"
    assert store.child("run").parent == store
    assert store.child("run").name == "run"


def test_a_write_gives_the_hash_of_what_is_there(tmp_path):
    store, pieces = Store(str(tmp_path)), [b"", np.arange(1000), b"tail", np.empty(0), memoryview(b"end")]
    sha256, length = store.write("folder/file", pieces)
    content = (tmp_path / "folder" / "file").read_bytes()
    assert (sha256, length) == (hashlib.sha256(content).hexdigest(), len(content)) == store.digest("folder/file")


def test_a_write_that_breaks_off_leaves_what_was_there(tmp_path):
    store = Store(str(tmp_path))
    store.write("file", [b"before"])

    def broken():
        yield b"after"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        store.write("file", broken())
    assert (tmp_path / "file").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_piece_of_more_than_2_gib_is_written_whole(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(Store, "writing", lambda self, name: _Counting(written))
    monkeypatch.setattr("hashlib.sha256", lambda: _NoHash())
    large = np.broadcast_to(np.zeros(1, dtype=np.uint8), (1,))  # a real one would take minutes to hash
    huge = torch.empty(2**31 + 5, dtype=torch.uint8)  # never touched, so it takes no memory
    _, length = Store(str(tmp_path)).write("huge", [huge.numpy(), large])
    assert length == sum(written) == 2**31 + 6


class _Counting:
    def __init__(self, written):
        self.written = written

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def write(self, part):
        self.written.append(len(part))


class _NoHash:
    def update(self, part): ...

    def hexdigest(self):
        return ""


def test_a_file_that_ends_too_early_is_an_error(tmp_path):
    store = Store(str(tmp_path))
    store.write("file", [b"12345"])
    target = bytearray(3)
    store.read_into("file", 2, memoryview(target))
    assert bytes(target) == b"345"
    with pytest.raises(OSError, match="1 bytes too early"):
        store.read_into("file", 3, memoryview(target))
