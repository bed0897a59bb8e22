"""Plain files of weights that other programs read, by format: their bytes from tensors, and their tensors by name.

Both formats are written here, tensor by tensor, so that a model need not fit into memory to be exported. A `.pt` file
is what `torch.save(model.state_dict())` makes: a zip archive with a pickle and one member a tensor (the layout of
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
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from scaleray.checkpoints.manifest import Tensor
from scaleray.checkpoints.tensor_files import dtype_of
from scaleray.checkpoints.weight_sums import check_file
from scaleray.errors import CheckpointError, first_line

NESTED = ("state_dict", "model_state_dict", "model")  # where others keep the weights in a larger file

_SAFETENSORS = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64",
}  # fmt: skip


def _contents(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def safetensors_file(
    tensors: Mapping[str, Tensor], get: Callable[[str], torch.Tensor], about: Mapping[str, Any]
) -> Iterator[Any]:
    """Bytes of a `.safetensors` file, in pieces; each tensor is asked for when its turn comes. Raises CheckpointError
    for a dtype that the format does not know."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **{key: str(value) for key, value in about.items()}}}
    position = 0
    # widest first, so that each tensor begins at a multiple of its element's size
    ordered = sorted(tensors.items(), key=lambda item: (-dtype_of(item[1]).itemsize, item[0]))
    for name, tensor in ordered:
        if tensor.dtype not in _SAFETENSORS:
            raise CheckpointError(
                f"the model's {name}", tensor.dtype, "safetensors does not know this dtype", "export to a .pt file"
            )
        length = math.prod(tensor.shape) * dtype_of(tensor).itemsize
        header[name] = {
            "dtype": _SAFETENSORS[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [position, position + length],
        }
        position += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, _ in ordered:
        yield _contents(get(name))


class _Storage:
    """Placeholder for a tensor's memory in the pickle of a `.pt` file, which only names it."""

    def __init__(self, key: str, dtype: torch.dtype, num: int) -> None:
        self.key, self.dtype, self.num = key, dtype, num


class _Lazy:
    """Object that is pickled as a tensor whose memory is the member `data/<key>` of the archive."""

    def __init__(self, key: str, tensor: Tensor) -> None:
        self.key, self.tensor = key, tensor

    def __reduce__(self) -> tuple[Any, ...]:
        shape = tuple(self.tensor.shape)
        stride = torch.empty(shape, device="meta").stride()
        dtype = dtype_of(self.tensor)
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
    """Storage class of torch for an older dtype; None for newer ones, which lie in untyped bytes."""
    return getattr(torch, torch.storage._dtype_to_storage_type_map().get(dtype, ""), None)


def torch_file(
    tensors: Mapping[str, Tensor], get: Callable[[str], torch.Tensor], about: Mapping[str, Any]
) -> Iterator[Any]:
    """Bytes of a `.pt` file, in pieces; each tensor is asked for when its turn comes."""
    names = sorted(tensors)
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(
        OrderedDict((name, _Lazy(str(number), tensors[name])) for number, name in enumerate(names))
    )
    stream = _Pieces()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        small = {
            "data.pkl": pickled.getvalue(),
            "byteorder": sys.byteorder.encode(),
            ".format_version": b"1",
            "scaleray.json": json.dumps(about).encode(),
            "version": b"3\n",
        }
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
    """Archive member whose bytes begin at a multiple of 64, for readers that map the file."""
    info = zipfile.ZipInfo(f"archive/{name}")
    header = 30 + len(info.filename) + 20  # 20: sizes of 64 bits, which force_zip64 adds
    padding = -(stream.position + header + 4) % 64
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    return info


class _Pieces(io.RawIOBase):
    """File that can only grow, and whose bytes are taken away as they come."""

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
def opened_safetensors(path: str) -> Iterator[tuple[list[str], Callable[[str], torch.Tensor]]]:
    """Names of the tensors in a `.safetensors` file, and a function that gives one.
    Raises CheckpointError for a file that cannot be read, or of final weights that have changed."""
    from safetensors import SafetensorError, safe_open

    check_file(path)
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as exc:
        raise CheckpointError("the file to import", path, f"it cannot be read as safetensors: {exc}") from exc
    with file as opened:
        yield list(opened.keys()), opened.get_tensor


@contextlib.contextmanager
def opened_torch(path: str) -> Iterator[tuple[list[str], Callable[[str], torch.Tensor]]]:
    """Names of the tensors in a `.pt` file, and a function that gives one.
    Raises CheckpointError for a file that is no state dict, or of final weights that have changed."""
    check_file(path)
    content = load_torch(path)
    if isinstance(content, Mapping):
        content = next((content[key] for key in NESTED if isinstance(content.get(key), Mapping)), content)
    other = "" if isinstance(content, Mapping) and content else type(content).__name__
    if not other:
        other = next(
            (f"{key!r}: {type(value).__name__}" for key, value in content.items() if not _is_plain(key, value)), ""
        )
    if other:
        raise CheckpointError(
            "the file to import",
            path,
            f"it must hold tensors by name, and holds {other}",
            "save the state dict alone: torch.save(model.state_dict(), path)",
        )
    yield list(content), content.__getitem__


def load_torch(path: str, content: io.BytesIO | None = None, *, what: str = "the file to import") -> Any:
    """Content of a `.pt` file: tensors and plain values only. content: its bytes, if they are in memory already. Raises
    CheckpointError for anything else.
    """
    source: Any = path if content is None else content
    try:
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=content is None)
        except RuntimeError:  # a file of the layout before torch 1.6 cannot be mapped
            if content is not None:
                raise
            return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as exc:  # torch raises errors of any kind at a damaged pickle
        if isinstance(exc, pickle.UnpicklingError) and content is None:
            allowed = "it holds more than tensors, or is no file of torch.save"
            advice = "save the state dict alone: torch.save(model.state_dict(), path)"
            raise CheckpointError(what, path, allowed, advice) from exc
        raise CheckpointError(what, path, f"it cannot be read: {first_line(exc)}") from exc


def _is_plain(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout is torch.strided
