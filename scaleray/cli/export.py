"""`scaleray export`: the model of a run as a file or folder for other programs."""

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
    """Write the model of a run, or models:/NAME@ALIAS, to a file or folder for other programs.

    safetensors contains the weights; torch.export and onnx contain weights and the computation of the model's forward,
    as called by the workload, for programs without its code. Such a file is loaded again, and is only kept if its
    outputs on real rows equal the model's. Transforms and preprocessors are not included.
    pt is the state dict written by torch.save. folder is the output of the workload's export(), such as a folder for
    from_pretrained; adapter is a folder with only the low-rank adapters, for the library peft.

    Parameters
    ----------
    out
        The file: .safetensors, .pt2, .onnx or .pt; a name without an extension is a folder.
    data
        File of rows for the comparison; by default rows of the training's data.
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
