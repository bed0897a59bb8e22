"""Reports of any record: a training, a study or a sweep."""

from __future__ import annotations

import os
import re
from pathlib import Path

from scaleray.common.installed import names_what_is_missing
from scaleray.errors import StorageError
from scaleray.launch.run.run_page import write_run_report
from scaleray.recording.find_record import FoundRun, find_run
from scaleray.records.study_record import StudyRecord
from scaleray.records.sweep_record import SweepRecord
from scaleray.studies.study_page import write_study_report
from scaleray.sweeps.sweep_page import write_sweep_report


@names_what_is_missing
def report(run: str | Path, *, out: str | Path | None = None, uri: str | None = None) -> list[Path]:
    """Rewrite the report of a recorded training, study or sweep, and return its files, report.html first.

    run: its folder, its name in the storage path, or its id or name in MLflow at `uri`. out: a folder; None: the run's
    own."""
    return write_report(find_run(str(run), uri=uri), None if out is None else Path(out))


def write_report(found: FoundRun, out: Path | None = None) -> list[Path]:
    """Write the report and return the paths of its files, report.html first. Raises StorageError.

    out: a folder; None: the record's own, or report-NAME in the current folder if that is not on this machine."""
    record = found.record
    folder = out or _own_folder(found) or Path("report-" + re.sub(r"[^\w.-]", "_", record.name))
    try:
        if isinstance(record, StudyRecord):
            return write_study_report(record, folder)
        if isinstance(record, SweepRecord):
            return write_sweep_report(record, folder)
        return write_run_report(record, folder, steps=found.steps, evaluations=found.evaluations)
    except OSError as exc:
        raise StorageError.problem(
            "The report", f"cannot be written to {folder}: {exc.strerror}", "choose another folder with --out"
        ) from exc


def _own_folder(found: FoundRun) -> Path | None:
    return found.folder if found.folder is not None and os.access(found.folder, os.W_OK) else None
