"""Send data that MLflow missed while it was unreachable, from any kind of file."""

from __future__ import annotations

from pathlib import Path

from scaleray.common.installed import names_what_is_missing
from scaleray.errors import TrackingError


@names_what_is_missing
def replay(file: str | Path, *, uri: str | None = None) -> int | None:
    """Send data of a run, study or sweep that could not be written to MLflow while the server was unreachable.

    file: a run folder's unsent.jsonl, or the record.json of a study or sweep. uri: tracking URI, if the server has
    moved. Returns the number of operations that were sent, None for a record. Raises TrackingError if MLflow still
    lacks something."""
    file = Path(file)
    if file.name == "record.json":
        from scaleray.recording.study_runs import send_record

        if lacks := send_record(file, uri=uri):
            text = f"{file} is not completely in MLflow: {lacks}"
            raise TrackingError.problem("The record", text, "run this again when the server is back")
        return None
    from scaleray.recording.replay import replay as send_operations

    return send_operations(file, uri=uri)
