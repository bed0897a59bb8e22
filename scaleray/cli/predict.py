"""`scaleray predict`: what does the model of a run say of other rows?"""

from __future__ import annotations

import sys

from scaleray.cli.options import Flag, Json
from scaleray.cli.output import Output, print_json
from scaleray.cli.run_options import Run, Step, Uri, WhichWeights, WorkloadName, step_of


def predict(
    run: Run,
    *,
    out: str,
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

    The answers are the workload's predict(model, batch), or without one what the model returns to its loss.

    Parameters
    ----------
    out
        File to write, local or s3://; its ending says the format: .parquet or .jsonl.
    data
        Rows: a Parquet, CSV or JSON-lines file, or a folder or s3:// URI of such files. Labels are not needed.
    split
        A split of the run's own, in place of --data.
    keep
        Columns of the data to write beside the answers, with commas.
    batch_size
        Rows that the model is given at a time.
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
    with output.running():
        found = run_prediction(
            run,
            data,
            out=out,
            split=split,
            step=step_of(step),
            weights=weights,
            workload=workload,
            keep=[name.strip() for name in keep.split(",") if name.strip()],
            batch_size=batch_size,
            workers=workers,
            local=local,
            skip_failed=skip_failed,
            overwrite=overwrite,
            uri=uri,
            say=output.say,
        )
    for row, why in list(found.failed.items())[:MOST_NAMED]:
        print(f"left out: row {row} (from 0): {why}", file=sys.stderr)
    more = f" of {found.num_rows}; {len(found.failed)} failed and are left out" if found.failed else ""
    output.say(f"wrote {found.num_rows - len(found.failed)} rows{more} to {found.out}")
    if json:
        print_json(found.about(), written={"answers": str(found.out)})
    return 0
