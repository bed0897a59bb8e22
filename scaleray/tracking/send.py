"""Sending to MLflow what it missed while it was away, of whatever kind the file is."""

from __future__ import annotations

from pathlib import Path

from scaleray.errors import TrackingError


def send(file: Path, *, uri: str | None = None) -> int | None:
    """Send the operations of an unsent.jsonl, or everything of the record.json of a study or sweep.

    Gives the number of operations; None for a record. Raises TrackingError where MLflow still lacks something.
    """
    if file.name == "record.json":
        from scaleray.tracking.study_runs import send_record

        if lacks := send_record(file, uri=uri):
            raise TrackingError("MLflow", "not complete", f"{lacks}", "run this again when it is back")
        return None
    from scaleray.tracking.replay import replay

    return replay(file, uri=uri)
