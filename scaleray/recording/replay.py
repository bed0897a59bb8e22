"""Points that MLflow missed while it was away, sent to it from a run's unsent file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from scaleray.config.base import without_password
from scaleray.errors import TrackingError, first_line
from scaleray.recording import unsent_file
from scaleray.recording.outbox import is_refusal_of_content
from scaleray.recording.store import RunStore, check_reachable, named_or_in_use
from scaleray.records.mlflow_operations import LogArtifact, LogMetrics, Operation, pieces_of, shown


def replay(path: str | Path, *, uri: str | None = None) -> int:
    """Send what a run could not write, from its unsent file; returns the number of operations. Removes the file.

    What MLflow refuses does not hold back the rest. uri: where to send it; None is the MLflow in use, if it is the one
    that the file names. Files are sent from the folder of the unsent file, and from below it.

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
    uri = named_or_in_use(head["tracking_uri"], uri)
    if uri is None:
        allowed = "it names another MLflow than the one in use, which gets nothing unless you name it"
        raise TrackingError("unsent file", str(path), allowed, "scaleray tracking replay FILE --uri URI")
    check_reachable(uri)
    try:
        store = RunStore(uri, head["run_id"], head["experiment_id"])
        known = store.last_steps()
        refused = [text for operation in unsent.operations for text in _sent(store, operation, known, path.parent)]
    except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
        raise TrackingError("MLflow at", without_password(uri), f"it refused: {first_line(exc)}") from exc
    if refused:
        kept = path.with_name(f"{path.name}.refused")
        path.replace(kept)
        raise TrackingError(
            "unsent file",
            str(path),
            f"MLflow refused {len(refused)} of its values and took the others: {'; '.join(refused[:3])}",
            f"it is kept as {kept}",
        )
    num_lost = unsent.num_damaged + unsent.is_cut
    if num_lost:
        damaged = path.with_name(f"{path.name}.damaged")
        path.replace(damaged)
        raise TrackingError(
            "unsent file",
            str(path),
            f"{num_lost} of its lines cannot be read; the other {len(unsent.operations)} were sent",
            f"it is kept as {damaged}; steps.csv next to it has every step",
        )
    path.unlink()
    return len(unsent.operations)


def _sent(store: RunStore, operation: Operation, known: Mapping[str, int], folder: Path) -> list[str]:
    """Send an operation, or the values MLflow accepts; returns reasons for the rest."""
    if isinstance(operation, LogMetrics):  # a crash between sending and forgetting must not double points
        operation = operation.after(known)
    if isinstance(operation, LogArtifact):
        home, named = folder.resolve(), Path(operation.path)
        places = (place.resolve() for place in (named, home / named.name))  # the run may have been moved
        place = next((place for place in places if place.exists() and home in place.parents), None)
        if place is None:
            return [f"{shown(operation)}: it is not in {home}"]
        operation = dataclasses.replace(operation, path=str(place))
    try:
        store.send(operation)
    except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
        if not is_refusal_of_content(exc):
            raise
        pieces = pieces_of(operation)
        if len(pieces) > 1:
            return [text for piece in pieces for text in _sent(store, piece, known, folder)]
        return [f"{shown(operation)}: {first_line(exc)[:200]}"]
    return []
