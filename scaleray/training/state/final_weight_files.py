"""The final weights in a run folder: `weights.pt`, or for a sharded model the folder `weights`, whose files all ranks
write.

If a run keeps an average of its weights, these are the average, and `trained_weights.pt`, or the folder
`trained_weights`, has the trained weights.

`weights.pt` is a state dict that `torch.load(..., weights_only=True)` reads. `weights` has Hugging Face's layout:
`model-00001-of-00004.safetensors` and so on, each whole or absent, and an index of the tensors in each file. The
process that waited for the workers writes the index last, once the run is over and every file is there; a folder
without an index is not a set of weights. No rank waits for another one's file."""

from __future__ import annotations

import json
import shlex
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from scaleray.checkpoints.manifest import StoredFile, Tensor
from scaleray.checkpoints.model_layout import (
    ADAPTERS,
    FINAL_WEIGHTS,
    INDEX,
    TRAINED_WEIGHTS,
    WRITTEN_BY,
    is_model_folder,
    plain_file,
)
from scaleray.checkpoints.storage import Store
from scaleray.checkpoints.weight_files import safetensors_file
from scaleray.checkpoints.weight_sums import sums_name, write_sums
from scaleray.common.parsing import load_json
from scaleray.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from scaleray.strategies.contract.weight_shares import Placed, WeightShare

PENDING = "index.pending.json"
"""File in such a folder that becomes the index; it exists while files are being written."""
MAX_FILE_BYTES = 5 * 10**9
"""Maximum size of a file in bytes. Larger shares are split into several files, as in transformers'
`save_pretrained`."""


def file_names(layout: Mapping[str, Placed], *, max_bytes: int = MAX_FILE_BYTES) -> dict[str, str]:
    """File of each tensor. Each rank's tensors are in separate files, of at most `max_bytes` or one tensor."""
    numbers: dict[str, tuple[int, int]] = {}
    filled: dict[int, tuple[int, int]] = {}
    for name, (rank, num_bytes) in layout.items():
        number, before = filled.get(rank, (0, 0))
        if before and before + num_bytes > max_bytes:
            number, before = number + 1, 0
        filled[rank] = number, before + num_bytes
        numbers[name] = rank, number
    files = {key: place for place, key in enumerate(sorted(set(numbers.values())), start=1)}
    return {name: f"model-{files[key]:05d}-of-{len(files):05d}.safetensors" for name, key in numbers.items()}


def save_weights(
    share: WeightShare, run_path: str, name: str = FINAL_WEIGHTS, *, rank: int, max_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write this rank's part to a local run folder or an s3:// URI. Not collective: no rank waits for another.

    name: `FINAL_WEIGHTS`, `TRAINED_WEIGHTS` or `ADAPTERS`. Raises StorageError if it cannot be written, and
    CheckpointError for a dtype that safetensors does not support."""
    store = Store(run_path)
    if share.adapters is not None and name == FINAL_WEIGHTS:
        save_weights(share.adapters, run_path, ADAPTERS, rank=rank, max_bytes=max_bytes)
    try:
        if share.layout:
            _write_files(share, store.child(name), is_first=rank == 0, max_bytes=max_bytes)
        elif share.tensors:
            _write_plain(share.tensors, store, name)
    except OSError as exc:
        raise StorageError.problem(
            f"the share of rank {rank} of the final weights",
            f"was not written: {store.path('').rstrip('/')} rejected it: {exc or type(exc).__name__}",
            "free space or repair the storage, then: scaleray train --resume "
            f"{shlex.quote(store.path('').rstrip('/'))}",
        ) from exc


def forget(run_path: str) -> None:
    """Remove the indexes of a run that is about to continue, since the files in its folders are no longer complete."""
    store = Store(run_path)
    for name in (FINAL_WEIGHTS, TRAINED_WEIGHTS, ADAPTERS):
        for file in (f"{name}/{INDEX}", f"{name}/{PENDING}", sums_name(f"{name}/{INDEX}")):
            store.delete(file)


def complete(run_path: str, name: str = FINAL_WEIGHTS) -> dict[str, StoredFile]:
    """Complete the weights of a run whose workers have all ended successfully, and write the hashes of their files.
    Returns the hashes by the files' names in the run folder; none if the run wrote no weights. name: as in
    `save_weights`. Removes files of earlier attempts. Raises StorageError if a file is missing or truncated."""
    store = Store(run_path)
    folder, plain = store.child(name), plain_file(name)
    if folder.size(PENDING) is None:
        return write_sums(store, [plain]) if store.size(plain) is not None else {}
    index = load_json(folder.read(PENDING))
    files = sorted(set(index["weight_map"].values()))
    for file in files:
        expected = {name for name, place in index["weight_map"].items() if place == file}
        if (found := _tensors_in(folder, file)) != expected:
            raise StorageError(
                folder.path(file),
                "missing or torn" if found is None else f"incomplete, with {len(found)} tensors",
                f"it should have {len(expected)} tensors, since every worker has ended",
                f"scaleray train --resume {shlex.quote(store.path('').rstrip('/'))}",
            )
    folder.write_text(INDEX, json.dumps(index, indent=2))
    for file in folder.names():
        if file not in (INDEX, *files):
            folder.delete(file)
    for file in (plain, sums_name(plain)):
        store.delete(file)
    return write_sums(store, [f"{name}/{file}" for file in (*files, INDEX)])


def read_weights(
    run_path: str | Path, name: str = FINAL_WEIGHTS, *, recorded: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read the weights in a local run folder as a state dict, in either form. name: as in `save_weights`.

    recorded: hashes in the run's record; None uses those in the folder. Raises CheckpointError."""
    # with torch's own checkpoints, which drivers do without
    from scaleray.checkpoints.final_file import FinalFile
    from scaleray.checkpoints.hugging_face import ModelFolder

    path, plain = Path(run_path), plain_file(name)
    if is_model_folder(str(path / name)):
        return ModelFolder.open(str(path / name), recorded=recorded).read()
    if not (path / plain).exists():
        absent = f"are missing: neither {plain} nor {name}/{INDEX} exists"
        hint = "a run writes them when it ends successfully"
        raise CheckpointError.problem(f"the final weights of {path}", absent, hint)
    return dict(FinalFile.read(Store(str(path)), plain, recorded=recorded).tensors)


def _write_plain(weights: Mapping[str, Any], store: Store, name: str) -> None:
    with store.writing(plain_file(name)) as stream:
        torch.save(weights, stream)
    store.delete_folder(name)  # what an attempt, or an earlier part of the run, left under another strategy


def _write_files(share: WeightShare, folder: Store, *, is_first: bool, max_bytes: int) -> None:
    files = file_names(share.layout, max_bytes=max_bytes)
    if is_first:
        total = sum(placed.num_bytes for placed in share.layout.values())
        index = {"metadata": {"total_size": total, "written_by": WRITTEN_BY}, "weight_map": files}
        folder.write_text(PENDING, json.dumps(index))
    by_file: dict[str, dict[str, Tensor]] = {}
    for name, tensor in share.tensors.items():
        about = Tensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), ())
        by_file.setdefault(files[name], {})[name] = about
    for file, tensors in by_file.items():
        folder.write(file, safetensors_file(tensors, share.tensors.__getitem__, {}))


def _tensors_in(folder: Store, file: str) -> set[str] | None:
    """Names of the tensors in a complete safetensors file; None for a missing, truncated or other file."""
    size = folder.size(file)
    if size is None or size < 8:
        return None
    with folder.open(file) as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        try:
            header = load_json(stream.read(length)) if 8 + length <= size else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        return None
    header.pop("__metadata__", None)
    ends = [about["data_offsets"][1] for about in header.values()]
    return set(header) if 8 + length + max(ends, default=0) == size else None
