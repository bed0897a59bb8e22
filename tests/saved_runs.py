"""What tests of stored checkpoints share: saving plain tensors as a training would, and reading all of a checkpoint back."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.manifest import FORMAT, HASH, _digest
from scaleray.checkpoints.retention import Retention
from scaleray.checkpoints.saver import Saver
from scaleray.checkpoints.tensor_files import read_tensor


def make_saver(catalog, *, group=None, world_size=1, messages=None, full_every=16, asynchronous=False, **retention):
    """A saver whose records go to a list."""
    return Saver(
        catalog,
        group,
        world_size=world_size,
        strategy="ddp",
        is_asynchronous=asynchronous,
        full_every=full_every,
        retention=Retention(**{"keep_last": 1000, **retention}),
        emit=(messages if messages is not None else []).append,
    )


def save(saver, step, tensors, *, metrics=None, evaluated_at=None):
    """One checkpoint, written when this returns. metrics: of its own step, or of `evaluated_at`."""
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    facts = {"metrics": metrics or {}, "evaluated_at": step if evaluated_at is None else evaluated_at}
    saver.save(step, named, volatile=set(), values=lambda gather: {"progress": {"step": step}}, facts=facts)
    saver.wait()


def read_all(catalog, manifest):
    """Every tensor of a checkpoint; raises Incomplete where a byte is missing."""
    return {
        name.removeprefix("model."): read_tensor(catalog.stores, tensor) for name, tensor in manifest.tensors.items()
    }


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype and left[name].shape == right[name].shape, name
        assert _bits(left[name]) == _bits(right[name]), name


def _bits(tensor):
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def shards(folder):
    """The files with tensors below a folder."""
    return sorted(Path(folder).rglob("*.bin"))


def snapshot(folder):
    """Every file below a folder with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()
    }


def catalog_of(folder, copy=None):
    return Catalog.of_run(str(folder), str(copy) if copy else None)


def flip(path, position):
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def make_newer(folder):
    """Write a checkpoint's manifest as a later version would."""
    body = json.loads((folder / "manifest.json").read_bytes())
    del body["manifest_sha256"]
    rest = json.dumps({**body, "format": FORMAT + 1, "new": "field"})[1:]
    (folder / "manifest.json").write_text(HASH % _digest(rest.encode()) + rest)
