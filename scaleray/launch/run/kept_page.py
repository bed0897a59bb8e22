"""Report of a finished training, and the saved view of its experiment in MLflow."""

import tempfile
from pathlib import Path
from typing import Any

from scaleray.launch.run.run_page import run_page
from scaleray.live.steps_file import step_rows
from scaleray.recording import saved_views
from scaleray.recording.store import open_client
from scaleray.records.accepted_names import acceptable_name
from scaleray.records.page.page import render
from scaleray.records.run_record import RunRecord

CLOSING = "This page works offline. `scaleray report` recreates it, with figures as PNG and numbers as CSV."
NAME = "report.html"


def keep_for_readers(record: RunRecord, *, tracking_uri: str) -> str | None:
    """Write the report, add it to the run's files in MLflow, and save the view of the experiment's trainings. Returns
    the report's path, or None for a run in a bucket, whose report is only in MLflow. tracking_uri: with its password,
    if any."""
    client = open_client(tracking_uri)
    html = _page(record, client)
    folder = Path(record.run_dir)
    is_local = "://" not in record.run_dir and folder.is_dir()
    with tempfile.TemporaryDirectory() as temporary:
        path = (folder if is_local else Path(temporary)) / NAME
        path.write_text(html)
        client.log_artifact(record.run_id, str(path))
    saved_views.save_trainings(client, record.experiment_id, _judged_first(record))
    return str(path) if is_local else None


def _judged_first(record: RunRecord) -> list[str]:
    """Names of the evaluation metrics, starting with the one that decides."""
    judged = record.judged
    return sorted(record.metrics, key=lambda name: (judged is None or name != judged.name, name))


def _page(record: RunRecord, client: Any) -> str:
    steps = Path(record.run_dir) / "steps.csv"
    evaluations = {
        name: sorted(
            (point.step, point.value) for point in client.get_metric_history(record.run_id, acceptable_name(name))
        )
        for name in sorted(record.metrics)
    }
    rows = step_rows(steps.read_text(errors="replace") if steps.is_file() else None)
    return render(run_page(record, rows=rows, evaluations=evaluations, closing=CLOSING))
