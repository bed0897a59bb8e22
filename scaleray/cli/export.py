"""`scaleray export`: the model of a run in a file or folder that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from scaleray.cli.options import AS_OPTIONS, Json, Run
from scaleray.cli.output import Output, print_json
from scaleray.models.model_options import ExportOptions


def export(
    run: Run,
    *,
    out: Path,
    data: Path | None = None,
    options: Annotated[ExportOptions, AS_OPTIONS] = ExportOptions(),
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
    data
        File of rows to compare on; by default rows of the training's data.
    """
    from scaleray.models.exported import export_model

    output = Output(json=json)
    with output.running():
        found = export_model(run, out, options=options, data=data)
    for line in found.lines():
        output.say(line)
    if json:
        print_json(found.to_dict())
    return 0
