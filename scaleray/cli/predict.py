"""`scaleray predict`: predict other rows with a run's model."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

from scaleray.cli.options import AS_OPTIONS, ConfigFile, Json, Run
from scaleray.cli.output import Output, print_json
from scaleray.errors import UsageError
from scaleray.models.model_options import PredictOptions


def predict(
    run: Run | None = None,
    *,
    out: str,
    config: ConfigFile = None,
    data: str | None = None,
    options: Annotated[PredictOptions, AS_OPTIONS] = PredictOptions(),
    json: Json = False,
) -> int:
    """Predict rows with a run's model over Ray Data, and write the predictions in the order of the rows.

    The predictions are the result of the workload's predict(model, batch), or else the model's output in its loss. With
    -c FILE the workload is that of the config, and --weights is the run.

    Parameters
    ----------
    out
        File to write, local or s3://; its extension gives the format: .parquet or .jsonl.
    data
        Rows: a Parquet, CSV or JSON-lines file, or a folder or s3:// URI of such files. Labels are not needed.
    """
    from scaleray.models.predict import MOST_NAMED
    from scaleray.models.predict import predict as run_prediction

    output = Output(json=json)
    name, options = _model(run, config, options)
    with output.running():
        found = run_prediction(name, data, options=options, out=out, say=output.say)
    for row, why in list(found.failed.items())[:MOST_NAMED]:
        print(f"omitted: row {row} (from 0): {why}", file=sys.stderr)
    more = f" of {found.num_rows}; {len(found.failed)} failed and were omitted" if found.failed else ""
    output.say(f"wrote {found.num_rows - len(found.failed)} rows{more} to {found.out}")
    if json:
        print_json(found.about(), written={"answers": str(found.out)})
    return 0


def _model(run: str | None, config: Path | None, options: PredictOptions) -> tuple[str, PredictOptions]:
    """Return the run, and the options with a config's workload and tracking URI; with a config, `--weights` is the run.

    Raises UsageError.
    """
    if config is None:
        if run is None:
            given = "scaleray predict RUN, or scaleray predict -c FILE --weights RUN"
            raise UsageError.problem("Give", "a RUN, or models:/NAME@ALIAS", given)
        return run, options
    if run is not None or options.workload is not None:
        given = "RUN" if run is not None else "--workload"
        raise UsageError.problem(
            given, "cannot be combined with -c: the config gives the workload and --weights the run", "omit one of them"
        )
    if options.weights is None:
        raise UsageError.problem("--weights", "is required with -c", "give a run, or models:/NAME@ALIAS")
    from scaleray.config import load_config
    from scaleray.workload import load_workload

    settings = load_config(config)
    made = load_workload(settings.workload.name, settings.workload.args, base_dir=config.resolve().parent)
    uri = options.uri or settings.tracking.uri
    return options.weights, dataclasses.replace(options, weights=None, workload=made, uri=uri)
