"""`scaleray export`: the model of a run in a file or folder that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from scaleray.cli.options import Json
from scaleray.cli.output import Output, print_json
from scaleray.cli.run_options import Run, Step, Uri, WhichWeights, WorkloadName, step_of


def export(
    run: Run,
    *,
    out: Path,
    format: Literal["safetensors", "torch.export", "onnx", "pt", "folder", "adapter"] | None = None,
    step: Step = None,
    weights: WhichWeights = None,
    workload: WorkloadName = None,
    data: Path | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    tolerance: float | None = None,
    overwrite: bool = False,
    uri: Uri = None,
    json: Json = False,
) -> int:
    """Write the model of a run, or models:/NAME@ALIAS, to a file or folder that others read.

    safetensors has the weights; torch.export and onnx have weights and the computation of the model's forward, as the
    workload calls it, for programs without its code. Such a file is opened again, and appears when its outputs on real
    rows are the model's. Transforms and preprocessors are no part of it.
    pt is the state dict as torch saves it. folder is what the workload's export() writes, such as from_pretrained
    reads; adapter is a folder of the low-rank adapters alone, as the library peft reads it.

    Parameters
    ----------
    out
        The file: .safetensors, .pt2, .onnx or .pt; a name without an ending is a folder.
    format
        Format; by default that of the ending. onnx needs pip install 'scaleray[onnx]'.
    data
        File of rows to compare on; by default rows of the training's data.
    dtype
        Type of the floating-point weights; by default as they were trained.
    tolerance
        Largest difference over the largest output; by default 0 for safetensors, 1e-5 for torch.export, 1e-4 for onnx
        and fp32, 1e-2 for fp16, 5e-2 for bf16.
    overwrite
        Replace a file that exists; a folder is renamed to FOLDER.before-1.
    """
    from scaleray.launch.model.exported import export_model

    output = Output(json=json)
    with output.running():
        found = export_model(
            run,
            out,
            format=format,
            step=step_of(step),
            weights=weights,
            workload=workload,
            data=data,
            dtype=dtype,
            tolerance=tolerance,
            overwrite=overwrite,
            uri=uri,
        )
    for line in found.lines():
        output.say(line)
    if json:
        print_json(found.to_dict())
    return 0
