"""`scaleray checkpoint export` and `import`: weights out to plain files, and in from them."""

from __future__ import annotations

from scaleray.cli import checkpoint_folder
from scaleray.cli.checkpoint_options import CopyPath, Json, Step, Where
from scaleray.cli.checkpoint_path import chosen, final_weights, written
from scaleray.cli.output import print_json
from scaleray.cli.run_options import WhichWeights
from scaleray.text.units import disk_space


def export(
    path: Where,
    file: str,
    *,
    step: Step = None,
    weights: WhichWeights = None,
    adapter: bool = False,
    overwrite: bool = False,
    copy_path: CopyPath = None,
    json: Json = False,
) -> int:
    """Write a checkpoint's weights, or the final ones of a run without checkpoints or of RUN/weights, to one plain
    file: .pt or .safetensors. To a name without an ending: the final weights as a folder, as the model's own library
    reads it.

    Parameters
    ----------
    file
        Where to; local or s3://. Its ending says the format; without one it is a folder, such as from_pretrained reads.
    adapter
        To a folder: the low-rank adapters alone, as the library peft reads them.
    overwrite
        Replace what exists.
    """
    if checkpoint_folder.is_folder(file):
        return checkpoint_folder.export(
            path, file, step=step, weights=weights, adapter=adapter, overwrite=overwrite, json=json
        )
    if adapter:
        raise checkpoint_folder.no_adapter(file)
    from scaleray.checkpoints.consolidated import export as write
    from scaleray.checkpoints.consolidated import has_average, model_tensors, write_file
    from scaleray.checkpoints.model_layout import TRAINED, check_which
    from scaleray.config.base import absolute_path

    found_step: int | None = None
    folder = final_weights(path, weights) if step is None else None
    if folder is not None:
        tensors = folder.shapes()
        with written(file):
            num_bytes = write_file(absolute_path(file), tensors, folder.tensor, {}, overwrite=overwrite)
    else:
        with chosen(path, step, copy_path) as (catalog, manifest), written(file):
            check_which(weights, has_average=has_average(manifest), where=f"the checkpoint of step {manifest.step}")
            is_average = weights != TRAINED
            num_bytes = write(catalog, manifest, absolute_path(file), averaged=is_average, overwrite=overwrite)
        found_step, tensors = manifest.step, model_tensors(manifest)
    if json:
        print_json(
            {"step": found_step, "file": file, "tensors": len(tensors), "bytes": num_bytes},
            written={"weights": absolute_path(file)},
        )
    else:
        source = f"of step {found_step}" if folder is None else f"of {folder.path}"
        print(f"wrote {len(tensors)} tensors {source}, {disk_space(num_bytes)}, to {file}")
    return 0


def import_(file: str, path: str, *, json: Json = False) -> int:
    """Make a checkpoint of a plain file of weights, to start a training from: --workload.weights PATH.

    Parameters
    ----------
    file
        A .pt file of torch.save with tensors only, or a .safetensors file.
    path
        New folder, local or s3://.
    """
    from scaleray.checkpoints.consolidated import import_weights
    from scaleray.config.base import absolute_path

    target = absolute_path(path)
    with written(path):
        manifest = import_weights(absolute_path(file), target)
    if json:
        print_json(
            {"path": target, "tensors": len(manifest.tensors), "bytes": manifest.total_bytes},
            written={"checkpoint": target},
        )
    else:
        print(
            f"imported {len(manifest.tensors)} tensors, {disk_space(manifest.total_bytes)}; "
            f"start from them with --workload.weights {path}"
        )
    return 0
