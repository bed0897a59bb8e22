"""What MLflow missed while it was away, sent to it from a run's unsent file."""

from __future__ import annotations

from pathlib import Path

from scaleray.config.base import without_password
from scaleray.errors import TrackingError, first_line
from scaleray.tracking import unsent_file
from scaleray.tracking.operations import LogMetrics
from scaleray.tracking.store import RunStore, check_reachable


def replay(path: str | Path, *, uri: str | None = None) -> int:
    """Send what a run could not write, from its unsent file; returns the number of operations. Removes the file.

    uri: where to send it; None is where the run wrote, whose password, if any, the file does not hold.

    Raises TrackingError when the server still cannot be reached; the file stays then. It is raised too where lines of
    the file cannot be read, once the others are sent; the file is `unsent.jsonl.damaged` then.
    """
    path = Path(path)
    try:
        unsent = unsent_file.parse(path.read_bytes())
    except FileNotFoundError:
        raise TrackingError("unsent file", str(path), "it does not exist") from None
    except OSError as exc:
        raise TrackingError("unsent file", str(path), f"it cannot be read: {exc.strerror}") from exc
    head = unsent.head
    if head is None:
        raise TrackingError(
            "unsent file",
            str(path),
            "it is not one that scaleray wrote: its first line does not say which run it belongs to",
            f"its {len(unsent.operations)} whole operations can be sent once that line is there, as in run.json",
        )
    uri = uri or head["tracking_uri"]
    check_reachable(uri)
    try:
        store = RunStore(uri, head["run_id"], head["experiment_id"])
        known = store.last_steps()
        for operation in unsent.operations:
            # a crash between sending and forgetting must not double points
            store.send(operation.after(known) if isinstance(operation, LogMetrics) else operation)
    except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
        raise TrackingError("MLflow at", without_password(uri), f"it refused: {first_line(exc)}") from exc
    num_lost = unsent.num_damaged + unsent.is_cut
    if num_lost:
        damaged = path.with_name(f"{path.name}.damaged")
        path.replace(damaged)
        raise TrackingError(
            "unsent file",
            str(path),
            f"{num_lost} of its lines cannot be read; the other {len(unsent.operations)} were sent",
            f"it is kept as {damaged}; steps.csv beside it has every step",
        )
    path.unlink()
    return len(unsent.operations)
