"""Import of a plain file of weights into a checkpoint or a model."""

import contextlib
import time
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from scaleray.checkpoints import sharded
from scaleray.checkpoints.catalog import Catalog, require
from scaleray.checkpoints.final_file import final_file
from scaleray.checkpoints.manifest import Incomplete, Manifest, Tensor, folder_name
from scaleray.checkpoints.storage import Store
from scaleray.checkpoints.tensor_files import dtype_of, new_file, write_tensors
from scaleray.checkpoints.weight_files import opened_safetensors, opened_torch
from scaleray.common.progress import Stage, stage
from scaleray.errors import CheckpointError, ScaleRayError
from scaleray.records.text.units import MIB

PREFIX, AVERAGE = "model.", "averaging."  # prefixes of the names of a model's tensors in a checkpoint, and of averages
IMPORTED = "imported"
"""Strategy name in a checkpoint that was not written by a training."""
ENDINGS = (".pt", ".pth", ".safetensors")
WRAPPERS = ("module.", "_orig_mod.")  # prefixes that DDP and torch.compile add to every name


def model_tensors(manifest: Manifest, *, averaged: bool = True) -> dict[str, Tensor]:
    """Return the model's tensors by their names in its state dict. averaged: use the averages of tensors that have one,
    if the run averages its weights."""
    saved = manifest.tensors
    found = {name.removeprefix(PREFIX): tensor for name, tensor in saved.items() if name.startswith(PREFIX)}
    return {name: saved.get(AVERAGE + name, tensor) for name, tensor in found.items()} if averaged else found


def counted(get: Callable[[str], torch.Tensor], writing: Stage) -> Callable[[str], torch.Tensor]:
    """Wrap `get` so that it reports its progress in MiB to a stage."""

    def given(name: str) -> torch.Tensor:
        tensor = get(name)
        writing.advance(tensor.nbytes / MIB)
        return tensor

    return given


def import_weights(path: str, run_path: str) -> Manifest:
    """Convert a `.pt` or `.safetensors` file to a checkpoint: step 0 in the folder `run_path`, containing only a model.

    For fine-tuning (`workload.weights`); a training cannot be resumed from it. Raises CheckpointError if the file is
    not a state dict, or if the folder already contains checkpoints."""
    ending = _ending(path, "the file to import")
    if not Path(path).is_file():
        raise CheckpointError(
            "the file to import",
            path,
            "it does not exist or is a folder",
            "a folder of safetensors files needs no import: --workload.weights FOLDER",
        )
    catalog, _ = Catalog.at(run_path)
    if catalog.steps():
        raise CheckpointError(
            "the folder to import to",
            run_path,
            "it already holds checkpoints",
            "choose a new folder; nothing is overwritten",
        )
    with opened_safetensors(path) if ending == ".safetensors" else opened_torch(path) as (names, get):
        wrapper = next((w for w in WRAPPERS if names and all(name.startswith(w) for name in names)), "")
        file = new_file(folder_name(0), "imported")
        plain = {PREFIX + name.removeprefix(wrapper): name for name in names}
        with stage("copying the weights", total=Path(path).stat().st_size / MIB, unit="MiB") as copying:
            read = counted(lambda name: get(plain[name]), copying)
            tensors, stored = write_tensors(catalog.stores, file, sorted(plain), read)
    manifest = Manifest(
        0,
        1,
        IMPORTED,
        time.time(),
        tensors,
        {},
        {file: stored},
        {"imported_from": str(path)},
        bytes_written=stored.num_bytes,
    )
    catalog.publish(manifest)
    return manifest


def load_weights(
    tensors: Mapping[str, torch.Tensor],
    where: str,
    *,
    group: dist.ProcessGroup | None = None,
    optional: Set[str] = frozenset(),
    is_part: bool = False,
) -> Manifest:
    """Load tensors of a model, by the names of its state dict, from a checkpoint, and return that checkpoint.

    is_part: these are only some of the model's tensors, such as those of a pipeline stage. where: a run folder (its
    newest complete checkpoint), the folder of one checkpoint, or a folder made by `import_weights`. Tensors may be
    sharded (DTensor), on any device, and of a wider dtype than the saved ones. Collective over `group`: rank 0 chooses
    the checkpoint, and all ranks raise if one fails. If it is None, each rank loads alone, without communication, which
    is safe if no process writes to `where` in the meantime. optional: tensors that stay unchanged if the checkpoint
    lacks them. Raises CheckpointError; the tensors are then unchanged, unless bytes turned out to be damaged."""
    if Path(where).is_file():
        raise CheckpointError(
            "the weights file",
            where,
            "it is not a folder",
            f"run scaleray checkpoint import {where} FOLDER, then use that folder",
        )
    catalog, step = Catalog.at(where)
    manifest = _chosen(catalog, step, where, group)
    saved = model_tensors(manifest)
    if is_part:
        saved = {name: tensor for name, tensor in saved.items() if name in tensors}
    wanted = with_a_source({n: t for n, t in tensors.items() if n in saved or n not in optional}, saved)
    check_fit(wanted, saved, f"step {manifest.step} of {where}")
    try:
        named = {_saved_name(name, manifest): tensor for name, tensor in wanted.items()}
        sharded.load(named, catalog.stores, manifest, group)
    except Incomplete as exc:
        raise _damaged(manifest, exc) from exc
    return manifest


def load_file(
    tensors: Mapping[str, torch.Tensor], where: str, *, optional: Set[str] = frozenset(), is_part: bool = False
) -> bool:
    """Load a model's tensors from a single file: `where` itself, `.pt` or `.safetensors`, or the final weights of a run
    without checkpoints. Returns False if there is no such file. Arguments as in `load_weights`; without communication.
    """
    opened: contextlib.AbstractContextManager[tuple[list[str], Callable[[str], torch.Tensor]]]
    if Path(where).is_file():
        ending = _ending(where, "the weights")
        opened = opened_safetensors(where) if ending == ".safetensors" else opened_torch(where)
    elif (final := final_file(where)) is not None:
        opened, where = contextlib.nullcontext((list(final.tensors), final.tensor)), final.path
    else:
        return False
    with opened as (names, get), torch.no_grad():
        wrapper = next((w for w in WRAPPERS if names and all(name.startswith(w) for name in names)), "")
        given = {name.removeprefix(wrapper): get(name) for name in names}
        given = {name: value for name, value in given.items() if value.layout == torch.strided}
        saved = {
            name: Tensor(str(value.dtype).removeprefix("torch."), tuple(value.shape), ())
            for name, value in given.items()
            if not is_part or name in tensors
        }
        wanted = with_a_source({n: t for n, t in tensors.items() if n in saved or n not in optional}, saved)
        check_fit(wanted, saved, where)
        for name, tensor in wanted.items():
            fill_part(tensor, given[name])
    return True


def fill_part(tensor: torch.Tensor, whole: Any) -> None:
    """Copy this rank's part of a whole tensor into one that may be sharded. whole: may be a slice of safetensors if the
    target is sharded."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    own = tensor.to_local()
    _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if own.numel():
        own.copy_(whole[tuple(slice(b, b + n) for b, n in zip(begin, own.shape, strict=True))])


def _saved_name(name: str, manifest: Manifest) -> str:
    """Name in a checkpoint from which a model's tensor is initialised: that of its average, if it has one."""
    return f"{AVERAGE if AVERAGE + name in manifest.tensors else PREFIX}{name}"


def _chosen(catalog: Catalog, step: int | None, where: str, group: dist.ProcessGroup | None) -> Manifest:
    box: list[Any] = [None]
    if group is None or dist.get_rank(group) == 0:
        try:
            box = [require(catalog, step, where=where)]
        except ScaleRayError as exc:
            box = [exc]
        except OSError as exc:
            box = [CheckpointError.problem(f"the weights in {where}", f"cannot be read: {exc}")]
    if group is not None:
        dist.broadcast_object_list(box, group=group, group_src=0)
    if isinstance(box[0], ScaleRayError):
        raise box[0]
    manifest: Manifest = box[0]
    return manifest


def with_a_source(tensors: Mapping[str, torch.Tensor], saved: Mapping[str, Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that need a source: without tied ones saved under another name, as by safetensors' `save_model`, and
    without sparse buffers, which build_model() creates since they are not weights."""
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.layout == torch.strided}
    places = {_place(tensor) for name, tensor in tensors.items() if name in saved}
    return {name: tensor for name, tensor in tensors.items() if name in saved or _place(tensor) not in places}


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return (
        local.untyped_storage().data_ptr(),
        local.storage_offset(),
        local.shape,
        local.stride(),
        local.numel() or id(tensor),
    )


def reshape_buffers(module: nn.Module, saved: Mapping[str, Tensor], *, may_register: bool = False) -> None:
    """Give the buffers of a new model their saved shapes, since training may enlarge some, or fill some that are None
    at first.

    may_register: add buffers that the model lacks, outside its state dict."""
    parts = dict(module.named_modules())
    device = next((p.device for p in module.parameters()), None)
    for name, tensor in saved.items():
        owner, _, last = name.rpartition(".")
        if (part := parts.get(owner)) is None:
            continue
        own = part._buffers.get(last)
        if last in part._buffers and (own is None or tuple(own.shape) != tensor.shape):
            part._buffers[last] = torch.empty(tensor.shape, dtype=dtype_of(tensor), device=device)
        elif may_register and not hasattr(part, last):
            part.register_buffer(last, torch.empty(tensor.shape, dtype=dtype_of(tensor), device=device), False)


def check_fit(own: Mapping[str, torch.Tensor], saved: Mapping[str, Tensor], where: str) -> None:
    """Check that names and shapes are equal, and that no dtype would be narrowed. Raises CheckpointError for the first
    tensor that differs."""
    different = [name for name in sorted(own.keys() | saved.keys()) if not _fits(own.get(name), saved.get(name))]
    if not different:
        return
    first = different[0]
    mine, theirs = own.get(first), saved.get(first)
    raise CheckpointError(
        f"the model's {first}",
        "missing" if mine is None else f"{list(mine.shape)} {str(mine.dtype).removeprefix('torch.')}",
        f"{where} has {'no such tensor' if theirs is None else f'{list(theirs.shape)} {theirs.dtype}'}"
        f" ({len(different)} of {len(own.keys() | saved.keys())} tensors differ)",
        "the weights belong to another model, or were saved in a wider dtype",
    )


def _fits(own: torch.Tensor | None, saved: Tensor | None) -> bool:
    """Whether the values can be copied exactly: the same dtype, or a wider one of the same kind."""
    if own is None or saved is None or tuple(own.shape) != saved.shape:
        return False
    theirs = dtype_of(saved)
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
        f"the checkpoint of step {manifest.step}",
        "damaged",
        str(exc),
        "scaleray checkpoint verify looks for a copy; --heal restores it",
    )
