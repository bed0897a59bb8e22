"""Plain files of weights for other programs, by format: writing their bytes, and reading their tensors by name.

A `.safetensors` file, a JSON header followed by bytes (https://huggingface.co/docs/safetensors), is written here tensor
by tensor, so the model need not fit into memory. Tied tensors are written under each of their names."""

import contextlib
import io
import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from scaleray.checkpoints.manifest import Tensor
from scaleray.checkpoints.tensor_files import dtype_of
from scaleray.checkpoints.weight_sums import check_file
from scaleray.errors import CheckpointError, first_line

NESTED = ("state_dict", "model_state_dict", "model")  # usual keys of the weights in a larger file

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
    """Yield the bytes of a `.safetensors` file in pieces; each tensor is requested when it is needed. Raises
    CheckpointError for a dtype that the format does not support."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **{key: str(value) for key, value in about.items()}}}
    position = 0
    # widest first, so that each tensor begins at a multiple of its element's size
    ordered = sorted(tensors.items(), key=lambda item: (-dtype_of(item[1]).itemsize, item[0]))
    for name, tensor in ordered:
        if tensor.dtype not in _SAFETENSORS:
            raise CheckpointError(
                f"the model's {name}", tensor.dtype, "safetensors does not support this dtype", "export to a .pt file"
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


@contextlib.contextmanager
def opened_safetensors(path: str) -> Iterator[tuple[list[str], Callable[[str], torch.Tensor]]]:
    """Yield the names of the tensors in a `.safetensors` file, and a function that returns one. Raises CheckpointError
    if the file cannot be read, or if it contains final weights that have changed."""
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
    """Yield the names of the tensors in a `.pt` file, and a function that returns one. Raises CheckpointError if the
    file is not a state dict, or if it contains final weights that have changed."""
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
        raise CheckpointError.problem(
            f"the file to import, {path},",
            f"must contain a mapping of names to tensors, but contains {other}",
            "save only the state dict: torch.save(model.state_dict(), path)",
        )
    yield list(content), content.__getitem__


def load_torch(path: str, content: io.BytesIO | None = None, *, what: str = "the file to import") -> Any:
    """Load a `.pt` file with only tensors and plain values. content: its bytes, if already in memory. Raises
    CheckpointError for anything else."""
    source: Any = path if content is None else content
    try:
        try:
            return torch.load(source, map_location="cpu", weights_only=True, mmap=content is None)
        except RuntimeError:  # files in the layout before torch 1.6 cannot be mapped
            if content is not None:
                raise
            return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as exc:  # torch raises errors of any type for a damaged pickle
        if isinstance(exc, pickle.UnpicklingError) and content is None:
            allowed = "it contains more than tensors, or was not written by torch.save"
            advice = "save only the state dict: torch.save(model.state_dict(), path)"
            raise CheckpointError(what, path, allowed, advice) from exc
        raise CheckpointError(what, path, f"it cannot be read: {first_line(exc)}") from exc


def _is_plain(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout is torch.strided
