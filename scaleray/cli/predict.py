"""`scaleray predict`: what does the model of a run say of other rows?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from scaleray.cli.options import ConfigFile, Flag, Json
from scaleray.cli.output import Output, print_json
from scaleray.cli.run_options import Run, Step, Uri, WhichWeights, WorkloadName, step_of
from scaleray.errors import UsageError


def predict(
    run: Run | None = None,
    *,
    out: str,
    config: ConfigFile = None,
    data: str | None = None,
    split: str | None = None,
    step: Step = None,
    weights: WhichWeights = None,
    workload: WorkloadName = None,
    keep: str = "",
    batch_size: int = 256,
    workers: int = 1,
    local: Flag = False,
    skip_failed: Flag = False,
    overwrite: Flag = False,
    uri: Uri = None,
    json: Json = False,
) -> int:
    """Let a run's model predict rows over Ray Data, and write its answers in the order of the rows.

    The answers are the workload's predict(model, batch), or without one the model's output in its loss. With -c FILE
    the workload is that of the config, and --weights names the run.

    Parameters
    ----------
    out
        File to write, local or s3://; its ending says the format: .parquet or .jsonl.
    data
        Rows: a Parquet, CSV or JSON-lines file, or a folder or s3:// URI of such files. Labels are not needed.
    split
        A split of the run's own, in place of --data.
    keep
        Columns of the data to write next to the answers, with commas.
    batch_size
        Rows in a batch of the model.
    workers
        Ray actors, each of which has the model.
    local
        In this process, without Ray.
    skip_failed
        Leave out rows that fail, and name them; otherwise the first of them end the command.
    overwrite
        Replace a file that exists.
    """
    from scaleray.launch.model.predict import MOST_NAMED
    from scaleray.launch.model.predict import predict as run_prediction

    output = Output(json=json)
    name, which, made, of_config = _model(run, config, weights, workload)
    with output.running():
        found = run_prediction(
            name,
            data,
            out=out,
            split=split,
            step=step_of(step),
            weights=which,
            workload=made,
            keep=[name.strip() for name in keep.split(",") if name.strip()],
            batch_size=batch_size,
            workers=workers,
            local=local,
            skip_failed=skip_failed,
            overwrite=overwrite,
            uri=uri or of_config,
            say=output.say,
        )
    for row, why in list(found.failed.items())[:MOST_NAMED]:
        print(f"left out: row {row} (from 0): {why}", file=sys.stderr)
    more = f" of {found.num_rows}; {len(found.failed)} failed and are left out" if found.failed else ""
    output.say(f"wrote {found.num_rows - len(found.failed)} rows{more} to {found.out}")
    if json:
        print_json(found.about(), written={"answers": str(found.out)})
    return 0


def _model(
    run: str | None, config: Path | None, weights: str | None, workload: str | None
) -> tuple[str, str | None, Any, str | None]:
    """The run, which of its weights, the workload, and a config's tracking URI: with a config, `--weights` is the run.

    Raises UsageError.
    """
    if config is None:
        if run is None:
            given = "scaleray predict RUN, or scaleray predict -c FILE --weights RUN"
            raise UsageError("RUN", None, "a model is that of a run, or models:/NAME@ALIAS", given)
        return run, weights, workload, None
    if run is not None or workload is not None:
        said = "RUN" if run is not None else "--workload"
        raise UsageError(said, run or workload, "with -c the config names the workload, and --weights the run")
    if weights is None:
        allowed = "with -c it names the run whose weights are taken"
        raise UsageError("--weights", None, allowed, "a run, or models:/NAME@ALIAS")
    from scaleray.config import load_config
    from scaleray.workload import load_workload

    settings = load_config(config)
    made = load_workload(settings.workload.name, settings.workload.args, base_dir=config.resolve().parent)
    return weights, None, made, settings.tracking.uri
