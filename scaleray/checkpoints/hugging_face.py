"""Weights in the layout of a Hugging Face model folder: config.json with model.safetensors, or with several files and
an index.

Only safetensors is read, never a pickle. Each rank reads only its own parts. Used by training.setup.fine_tuning; the
workload maps names in the files to names in the model. A folder of `training.state.final_weight_files` has the model's
own names and needs no config.json. Source: https://huggingface.co/docs/safetensors, and the index written by
transformers' `save_pretrained`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.consolidated import check_fit, fill_part, with_a_source
from scaleray.checkpoints.manifest import Tensor
from scaleray.checkpoints.model_layout import CONFIG, FINAL_WEIGHTS, INDEX, WEIGHTS, WRITTEN_BY, is_model_folder
from scaleray.checkpoints.storage import Store
from scaleray.checkpoints.weight_sums import check_weights
from scaleray.common.parsing import load_json
from scaleray.errors import CheckpointError

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def model_folder(where: str) -> str:
    """The folder with a sharded run's final weights, if `where` is such a run without checkpoints; otherwise
    `where`."""
    inside = str(Path(where) / FINAL_WEIGHTS)
    return inside if is_model_folder(inside) and not Catalog.at(where)[0].steps() else where


@dataclass(frozen=True)
class ModelFolder:
    """Folder of weights. files: name of the file that contains each tensor. has_own_names: whether tensors have the
    model's names."""

    path: Path
    config: dict[str, Any]
    files: dict[str, str]
    has_own_names: bool = False

    @classmethod
    def open(
        cls, where: str, *, recorded: Mapping[str, Any] | None = None, rank: int = 0, num_ranks: int = 1
    ) -> ModelFolder:
        """Read config and index, and check the hashes of a run's final weights, see `check_weights`. If several ranks
        open the same folder, each checks its share of the files. Raises CheckpointError."""
        path = Path(where)
        config: dict[str, Any] = {}
        index = _json(path / INDEX, "it lists the file of each tensor") if (path / INDEX).is_file() else None
        metadata = index.get("metadata") if index is not None else None
        is_own = isinstance(metadata, dict) and metadata.get("written_by") == WRITTEN_BY
        if not is_own:
            config = _json(path / CONFIG, 'it describes the weights, such as {"hidden_size": 128, ...}')
        if index is not None:
            files = index.get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(n, str) and Path(n).name == n for n in files.values()):
                raise CheckpointError.problem(
                    str(path / INDEX), "lacks a weight_map of names in the same folder: the layout needs one"
                )
        else:
            return cls.at(path, config, WEIGHTS)
        if is_own:
            names = [INDEX, *sorted(set(files.values()))]
            own = [f"{path.name}/{name}" for name in names[rank::num_ranks]]
            if own:
                check_weights(Store(str(path.absolute().parent)), own, recorded=recorded)
        return cls(path, config, files, is_own)

    @classmethod
    def at(cls, path: Path, config: dict[str, Any], name: str) -> ModelFolder:
        """Return one safetensors file of a folder. Raises CheckpointError if it cannot be read."""
        with _opened(path / name) as file:
            return cls(path, config, dict.fromkeys(file.keys(), name))

    def load(
        self,
        tensors: Mapping[str, torch.Tensor],
        names: Mapping[str, str],
        *,
        optional: Set[str] = frozenset(),
        is_part: bool = False,
    ) -> None:
        """Load a model's tensors in place, sharded or not; for a sharded model, read only this rank's part. Not
        collective.

        names: source of each of `tensors`, as a name in the files. Tensors in `optional` need no source. Every tensor
        in the files must have a counterpart in the model, unless `is_part` says that `tensors` are only those of a
        pipeline stage. Values are cast to wider dtypes only. Raises CheckpointError for the first tensor that does not
        fit, before any change."""
        wrong = sorted(set(names) - set(tensors))
        if wrong:
            raise CheckpointError(f"the model's {wrong[0]}", "missing", "weight_names() of the workload lists it")
        shapes = self.shapes()
        # by the model's names, which users know; a tensor without a counterpart keeps its name in the files
        own_names = {theirs: own for own, theirs in names.items()}
        saved = {own: shapes[theirs] for own, theirs in names.items() if theirs in shapes}
        if not is_part:
            saved |= {
                t: shape for t, shape in shapes.items() if t not in own_names and not self._follows_from_others(t)
            }
        wanted = with_a_source({n: t for n, t in tensors.items() if n in names or n not in optional}, saved)
        check_fit(wanted, saved, str(self.path))
        by_file: dict[str, list[str]] = {}
        for own in wanted:
            by_file.setdefault(self.files[names[own]], []).append(own)
        for name, members in by_file.items():
            with _opened(self.path / name) as file, torch.no_grad():
                for own in members:
                    _fill(wanted[own], file, names[own])

    def _follows_from_others(self, name: str) -> bool:
        """Whether a tensor follows from other tensors: a rotation table, as in old folders, or a second name of the
        embedding."""
        return name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and self.config.get("tie_word_embeddings") is True
        )

    def read(self) -> dict[str, torch.Tensor]:
        """Return all tensors on the CPU, in the order of the index. Those of a large model may not fit into memory."""
        self.shapes()
        return {name: self.tensor(name) for name in self.files}

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, by its name in the files."""
        with _opened(self.path / self.files[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def shapes(self) -> dict[str, Tensor]:
        """Return the shape and dtype of each tensor. Raises CheckpointError for a file that is missing, truncated, or
        does not match the index."""
        found: dict[str, Tensor] = {}
        for name in sorted(set(self.files.values())):
            with _opened(self.path / name) as file:
                for tensor in file.keys():  # noqa: SIM118 - it cannot be iterated over
                    about = file.get_slice(tensor)
                    dtype = about.get_dtype()
                    if dtype not in _DTYPES:
                        raise CheckpointError(
                            f"{tensor} in {self.path / name}", dtype, f"only {', '.join(_DTYPES)} can be read"
                        )
                    found[tensor] = Tensor(_DTYPES[dtype], tuple(about.get_shape()), ())
        missing = sorted(set(self.files) - set(found))
        if missing:
            raise CheckpointError(
                f"{missing[0]} in {self.path}", "missing", f"{INDEX} lists it", "copy the folder again"
            )
        return found


def _fill(tensor: torch.Tensor, file: Any, name: str) -> None:
    if not isinstance(tensor, DTensor):
        tensor.copy_(file.get_tensor(name))
        return
    fill_part(tensor, file.get_slice(name))


def _json(path: Path, why: str) -> dict[str, Any]:
    try:
        content = load_json(path.read_text())
    except FileNotFoundError as exc:
        raise CheckpointError(str(path), "missing", why, "copy the whole folder") from exc
    except (OSError, ValueError) as exc:
        raise CheckpointError(str(path), f"not readable ({exc})", why) from exc
    if not isinstance(content, dict):
        raise CheckpointError(str(path), type(content).__name__, "it must be a mapping")
    return content


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(
            str(path), "not readable", f"it must be a safetensors file: {exc}", "copy it again"
        ) from exc
    with file as opened:
        yield opened
