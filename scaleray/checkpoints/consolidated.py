"""A model's weights as one plain file that other programs read, and back: into a checkpoint, and into a model.

Both formats are written here, tensor by tensor, so that a model need not fit into memory to be exported. A `.pt` file is
what `torch.save(model.state_dict())` makes: a zip archive with a pickle and one member a tensor (the layout of
torch/serialization.py). A `.safetensors` file is a JSON header and then the bytes
(https://huggingface.co/docs/safetensors). In both, tensors that a model ties are written under each of their names.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import pickle
import sys
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from scaleray.checkpoints import sharded
from scaleray.checkpoints.catalog import Catalog, require
from scaleray.checkpoints.manifest import Incomplete, Manifest, Tensor, folder_name
from scaleray.checkpoints.storage import Store
from scaleray.errors import CheckpointError, ScaleRayError

PREFIX = "model."  # of a model's tensors in a checkpoint
IMPORTED = "imported"
"""What stands for the strategy of a checkpoint that no training wrote."""
ENDINGS = (".pt", ".pth", ".safetensors")
WRAPPERS = ("module.", "_orig_mod.")  # what DDP and torch.compile put before every name
NESTED = ("state_dict", "model_state_dict", "model")  # where others keep the weights in a larger file

_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "complex64": "C64",
}  # fmt: skip


def model_tensors(manifest: Manifest) -> dict[str, Tensor]:
    """The model's tensors by the names that its state dict gives them."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in manifest.tensors.items() if name.startswith(PREFIX)}


def export(catalog: Catalog, manifest: Manifest, path: str, *, overwrite: bool = False) -> int:
    """Write a checkpoint's model to one file, by its ending `.pt` or `.safetensors`; gives its bytes.

    path: local or a URI. It appears when it is complete. Raises CheckpointError for a file that exists unless `overwrite`,
    for another ending, and for damage that no copy can mend.
    """
    tensors = model_tensors(manifest)
    about = {"step": manifest.step, "config_hash": manifest.facts.get("config_hash"), "strategy": manifest.strategy}
    about = {key: value for key, value in about.items() if value is not None}
    try:
        return write_file(
            path, tensors, lambda name: sharded.read_tensor(catalog.stores, tensors[name]), about, overwrite=overwrite
        )
    except Incomplete as exc:
        raise _damaged(manifest, exc) from exc


def write_file(
    path: str, tensors: Mapping[str, Tensor], get: Callable[[str], torch.Tensor], about: Mapping[str, Any], *,
    overwrite: bool = False,
) -> int:  # fmt: skip
    """Write tensors to one file, by its ending `.pt` or `.safetensors`; gives its bytes.

    get: gives one on the CPU when its turn comes. about: what the file says of itself. It appears when it is complete. Raises
    CheckpointError for a file that exists unless `overwrite`, and for another ending.
    """
    ending = _ending(path, "the file to export to")
    target = Store(path)
    folder, name = target.parent, target.name
    if folder.size(name) is not None and not overwrite:
        raise CheckpointError("the file to export to", path, "it exists already", "name another, or add --overwrite")
    layout = safetensors_file if ending == ".safetensors" else _torch
    try:
        return folder.write(name, layout(tensors, get, about))[1]
    except Incomplete:
        if not folder.is_local:
            folder.delete(name)  # a bucket takes what there is so far for the whole
        raise


def import_weights(path: str, run_path: str) -> Manifest:
    """Make a checkpoint of a `.pt` or `.safetensors` file: step 0 in the folder `run_path`, with a model and nothing else.

    For fine-tuning (`workload.weights`); a training cannot be resumed from it. Raises CheckpointError for a file that is no
    state dict, and for a folder that holds checkpoints already.
    """
    ending = _ending(path, "the file to import")
    if not Path(path).is_file():
        raise CheckpointError(
            "the file to import", path, "it does not exist or is a folder",
            "a folder of safetensors files needs no import: --workload.weights FOLDER",
        )  # fmt: skip
    catalog, _ = Catalog.at(run_path)
    if catalog.steps():
        raise CheckpointError(
            "the folder to import to", run_path, "it holds checkpoints already", "name a new folder; nothing is overwritten"
        )  # fmt: skip
    with _opened_safetensors(path) if ending == ".safetensors" else _opened_torch(path) as (names, get):
        wrapper = next((w for w in WRAPPERS if names and all(name.startswith(w) for name in names)), "")
        file = sharded.new_file(folder_name(0), "imported")
        plain = {PREFIX + name.removeprefix(wrapper): name for name in names}
        tensors, stored = sharded.write_tensors(catalog.stores, file, sorted(plain), lambda name: get(plain[name]))
    manifest = Manifest(
        0, 1, IMPORTED, time.time(), tensors, {}, {file: stored}, {"imported_from": str(path)}, bytes_written=stored.num_bytes
    )  # fmt: skip
    catalog.publish(manifest)
    return manifest


def load_weights(
    tensors: Mapping[str, torch.Tensor], where: str, *, group: dist.ProcessGroup | None = None,
    optional: Set[str] = frozenset(), is_part: bool = False,
) -> Manifest:  # fmt: skip
    """Fill a model's tensors, by the names of its state dict, from a checkpoint; gives that checkpoint.

    is_part: these are only some of the model's tensors, such as those of a pipeline stage.
    where: a run folder (its newest complete checkpoint), one checkpoint's folder, or one that `import_weights` made.
    Tensors may be sharded (DTensor), on any device, and of a wider dtype than the saved ones. Collective over `group`:
    rank 0 chooses the checkpoint, and all ranks raise when one fails. With None each rank does it alone, without a word
    to others, which is safe where nothing writes to `where` meanwhile. optional: tensors that stay as they are where the
    checkpoint does not have them.
    Raises CheckpointError; the tensors are untouched unless bytes turn out to be damaged.
    """
    if Path(where).is_file():
        raise CheckpointError(
            "the weights", where, "it is a single file", f"scaleray checkpoint import {where} FOLDER, and then name that folder"
        )  # fmt: skip
    catalog, step = Catalog.at(where)
    manifest = _chosen(catalog, step, where, group)
    saved = model_tensors(manifest)
    if is_part:
        saved = {name: tensor for name, tensor in saved.items() if name in tensors}
    wanted = with_a_source({n: t for n, t in tensors.items() if n in saved or n not in optional}, saved)
    check_fit(wanted, saved, f"step {manifest.step} of {where}")
    try:
        sharded.load({PREFIX + name: tensor for name, tensor in wanted.items()}, catalog.stores, manifest, group)
    except Incomplete as exc:
        raise _damaged(manifest, exc) from exc
    return manifest


def _chosen(catalog: Catalog, step: int | None, where: str, group: dist.ProcessGroup | None) -> Manifest:
    box: list[Any] = [None]
    if group is None or dist.get_rank(group) == 0:
        try:
            box = [require(catalog, step, where=where)]
        except ScaleRayError as exc:
            box = [exc]
        except OSError as exc:
            box = [CheckpointError("the weights", where, f"they cannot be read: {exc}")]
    if group is not None:
        dist.broadcast_object_list(box, group=group, group_src=0)
    if isinstance(box[0], ScaleRayError):
        raise box[0]
    manifest: Manifest = box[0]
    return manifest


def with_a_source(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without tied ones that are saved under their other name only, as safetensors' own `save_model` does."""
    places = {_place(tensor) for name, tensor in tensors.items() if name in saved}
    return {name: tensor for name, tensor in tensors.items() if name in saved or _place(tensor) not in places}


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr(), local.storage_offset(), local.shape, local.stride(), local.numel() or id(tensor)  # fmt: skip


def check_fit(own: Mapping[str, torch.Tensor], saved: Mapping[str, Tensor], where: str) -> None:
    """Same names and shapes, and dtypes that need not be narrowed. Raises CheckpointError with the first that differs."""
    different = [name for name in sorted(own.keys() | saved.keys()) if not _fits(own.get(name), saved.get(name))]
    if not different:
        return
    first = different[0]
    mine, theirs = own.get(first), saved.get(first)
    raise CheckpointError(
        f"the model's {first}",
        "not there" if mine is None else f"{list(mine.shape)} {str(mine.dtype).removeprefix('torch.')}",
        f"{where} has {'no such tensor' if theirs is None else f'{list(theirs.shape)} {theirs.dtype}'}"
        f" ({len(different)} of {len(own.keys() | saved.keys())} tensors differ)",
        "the weights belong to another model, or were saved in a wider dtype",
    )


def _fits(own: torch.Tensor | None, saved: Tensor | None) -> bool:
    """Whether the values can be taken over as they are: the same dtype, or a wider one of the same kind."""
    if own is None or saved is None or tuple(own.shape) != saved.shape:
        return False
    theirs = sharded.dtype_of(saved)
    if own.dtype == theirs:
        return True
    return own.is_floating_point() and theirs.is_floating_point and _widened(own.dtype, theirs) == own.dtype


def _widened(left: torch.dtype, right: torch.dtype) -> torch.dtype | None:
    try:
        return torch.promote_types(left, right)
    except RuntimeError:  # float8
        return None


def _ending(path: str, what: str) -> str:
    ending = Path(Store(path).name).suffix
    if ending not in ENDINGS:
        raise CheckpointError(what, path, f"its name must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    return ending


def _damaged(manifest: Manifest, exc: Incomplete) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {manifest.step}", "damaged", str(exc), "scaleray checkpoint verify looks for a copy; --heal takes it"
    )  # fmt: skip


def _contents(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def safetensors_file(
    tensors: Mapping[str, Tensor], get: Callable[[str], torch.Tensor], about: Mapping[str, Any]
) -> Iterator[Any]:
    """The bytes of a `.safetensors` file, in pieces; each tensor is asked for when its turn comes. Raises CheckpointError for
    a dtype that the format does not know."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **{key: str(value) for key, value in about.items()}}}
    position = 0
    # widest first, so that each tensor begins at a multiple of its element's size
    ordered = sorted(tensors.items(), key=lambda item: (-sharded.dtype_of(item[1]).itemsize, item[0]))
    for name, tensor in ordered:
        if tensor.dtype not in _SAFETENSORS:
            raise CheckpointError(
                f"the model's {name}", tensor.dtype, "safetensors does not know this dtype", "export to a .pt file"
            )
        length = math.prod(tensor.shape) * sharded.dtype_of(tensor).itemsize
        header[name] = {
            "dtype": _SAFETENSORS[tensor.dtype], "shape": tensor.shape, "data_offsets": [position, position + length]
        }  # fmt: skip
        position += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, _ in ordered:
        yield _contents(get(name))


class _Storage:
    """Stands for a tensor's memory in the pickle of a `.pt` file, which only names it."""

    def __init__(self, key: str, dtype: torch.dtype, num: int) -> None:
        self.key, self.dtype, self.num = key, dtype, num


class _Lazy:
    """Pickled as a tensor whose memory is the member `data/<key>` of the archive."""

    def __init__(self, key: str, tensor: Tensor) -> None:
        self.key, self.tensor = key, tensor

    def __reduce__(self) -> tuple[Any, ...]:
        shape = tuple(self.tensor.shape)
        stride = torch.empty(shape, device="meta").stride()
        dtype = sharded.dtype_of(self.tensor)
        storage = _Storage(self.key, dtype, torch.Size(shape).numel())
        if _storage_class(dtype) is not None:
            return torch._utils._rebuild_tensor_v2, (storage, 0, shape, stride, False, OrderedDict())
        return torch._utils._rebuild_tensor_v3, (storage, 0, shape, stride, False, OrderedDict(), dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = _storage_class(obj.dtype)
        num = obj.num if kind is not None else obj.num * obj.dtype.itemsize
        return "storage", kind or torch.UntypedStorage, obj.key, "cpu", num


def _storage_class(dtype: torch.dtype) -> Any:
    """torch's class of storage for an older dtype; newer ones have none and lie in bytes."""
    return getattr(torch, torch.storage._dtype_to_storage_type_map().get(dtype, ""), None)


def _torch(
    tensors: Mapping[str, Tensor], get: Callable[[str], torch.Tensor], about: Mapping[str, Any]
) -> Iterator[Any]:
    names = sorted(tensors)
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(
        OrderedDict((name, _Lazy(str(number), tensors[name])) for number, name in enumerate(names))
    )
    stream = _Pieces()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        small = {"data.pkl": pickled.getvalue(), "byteorder": sys.byteorder.encode(), ".format_version": b"1",
                 "scaleray.json": json.dumps(about).encode(), "version": b"3\n"}  # fmt: skip
        for name, text in small.items():
            with archive.open(_member(name, stream), "w") as member:
                member.write(text)
            yield from stream.take()
        for number, name in enumerate(names):
            content = _contents(get(name))
            with archive.open(_member(f"data/{number}", stream), "w", force_zip64=True) as member:
                for start in range(0, len(content), 2**24):
                    member.write(content[start : start + 2**24])
                    yield from stream.take()
    yield from stream.take()


def _member(name: str, stream: _Pieces) -> zipfile.ZipInfo:
    """A member whose bytes begin at a multiple of 64, for readers that map the file."""
    info = zipfile.ZipInfo(f"archive/{name}")
    header = 30 + len(info.filename) + 20  # 20: sizes of 64 bits, which force_zip64 adds
    padding = -(stream.position + header + 4) % 64
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return info


class _Pieces(io.RawIOBase):
    """A file that can only grow, whose bytes are taken away as they come."""

    def __init__(self) -> None:
        self.position = 0
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        piece = bytes(content)
        self._pieces.append(piece)
        self.position += len(piece)
        return len(piece)

    def take(self) -> Iterator[bytes]:
        pieces, self._pieces = self._pieces, []
        yield from pieces


@contextlib.contextmanager
def _opened_safetensors(path: str) -> Iterator[tuple[list[str], Callable[[str], torch.Tensor]]]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as exc:
        raise CheckpointError("the file to import", path, f"it cannot be read as safetensors: {exc}") from exc
    with file as opened:
        yield list(opened.keys()), opened.get_tensor


@contextlib.contextmanager
def _opened_torch(path: str) -> Iterator[tuple[list[str], Callable[[str], torch.Tensor]]]:
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of the layout before torch 1.6 cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        raise CheckpointError(
            "the file to import", path, "it holds more than tensors, or is no file of torch.save",
            "save the state dict alone: torch.save(model.state_dict(), path)",
        ) from exc  # fmt: skip
    except (
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as exc:  # of a spoilt pickle
        reason = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
        raise CheckpointError("the file to import", path, f"it cannot be read: {reason}") from exc
    if isinstance(content, Mapping):
        content = next((content[key] for key in NESTED if isinstance(content.get(key), Mapping)), content)
    other = "" if isinstance(content, Mapping) and content else type(content).__name__
    if not other:
        other = next((f"{key!r}: {type(value).__name__}" for key, value in content.items() if not _is_plain(key, value)), "")  # fmt: skip
    if other:
        raise CheckpointError(
            "the file to import", path, f"it must hold tensors by name, and holds {other}",
            "save the state dict alone: torch.save(model.state_dict(), path)",
        )  # fmt: skip
    yield list(content), content.__getitem__


def _is_plain(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout is torch.strided
