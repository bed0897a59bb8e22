"""Send data that MLflow missed while it was unreachable, from a file of any kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from scaleray.common.installed import names_what_is_missing
from scaleray.common.printed import quantity
from scaleray.config.base import without_password
from scaleray.errors import TrackingError, first_line
from scaleray.recording import unsent_file
from scaleray.recording.outbox import is_refusal_of_content
from scaleray.recording.store import RunStore, check_reachable, named_or_in_use
from scaleray.records.mlflow_operations import LogArtifact, LogMetrics, Operation, pieces_of, shown


@names_what_is_missing
def replay(file: str | Path, *, uri: str | None = None) -> int | None:
    """Send data of a run, study or sweep that could not be written to MLflow while the server was unreachable.

    file: a run folder's unsent.jsonl, which is removed, or the record.json of a study or sweep. uri: tracking URI, if
    the server has moved. Returns the number of operations sent, None for a record. Refused operations and unreadable
    lines do not block the others; they remain in a file of another name. Raises TrackingError if MLflow still lacks
    something. Uploads are limited to the file's folder and its subfolders."""
    path = Path(file)
    if path.name == "record.json":
        from scaleray.recording.study_runs import send_record

        if lacks := send_record(path, uri=uri):
            text = f"{path} is not completely in MLflow: {lacks}"
            raise TrackingError.problem("The record", text, "run this command again when the server is back")
        return None
    try:
        unsent = unsent_file.parse(path.read_bytes())
    except FileNotFoundError:
        raise TrackingError.problem("The unsent file", f"{path} does not exist") from None
    except OSError as exc:
        raise TrackingError.problem("The unsent file", f"{path} cannot be read: {exc.strerror}") from exc
    head = unsent.head
    if head is None:
        raise TrackingError.problem(
            "The unsent file",
            f"{path} was not written by scaleray: its first line does not name its run",
            f"its {len(unsent.operations)} complete operations can be sent once that line is restored from run.json",
        )
    uri = named_or_in_use(head["tracking_uri"], uri)
    if uri is None:
        raise TrackingError.problem(
            "The unsent file",
            f"{path} names an MLflow other than the one in use, so nothing is sent to it unless you name it",
            "scaleray tracking replay FILE --uri URI",
        )
    check_reachable(uri)
    try:
        store = RunStore(uri, head["run_id"], head["experiment_id"])
        known = store.last_steps()
        refused = [text for operation in unsent.operations for text in _sent(store, operation, known, path.parent)]
    except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
        raise TrackingError.problem(
            "MLflow", f"at {without_password(uri)} rejected the data: {first_line(exc)}"
        ) from exc
    if refused:
        kept = path.with_name(f"{path.name}.refused")
        path.replace(kept)
        raise TrackingError.problem(
            "MLflow",
            f"rejected {quantity(len(refused), 'value')} of {path}: {'; '.join(refused[:3])}. It accepted the others",
            f"see the file, which is kept as {kept}",
        )
    num_lost = unsent.num_damaged + unsent.is_cut
    if num_lost:
        damaged = path.with_name(f"{path.name}.damaged")
        path.replace(damaged)
        raise TrackingError.problem(
            "The unsent file",
            f"{path} has unreadable lines: {num_lost}; operations sent: {len(unsent.operations)}",
            f"the file is now {damaged}; steps.csv next to it has every step",
        )
    path.unlink()
    return len(unsent.operations)


def _sent(store: RunStore, operation: Operation, known: Mapping[str, int], folder: Path) -> list[str]:
    """Send an operation, or those of its values that MLflow accepts. Returns the reasons why the rest was rejected."""
    if isinstance(operation, LogMetrics):  # a crash between sending and forgetting must not double points
        operation = operation.after(known)
    if isinstance(operation, LogArtifact):
        home, named = folder.resolve(), Path(operation.path)
        candidates = (file.resolve() for file in (named, home / named.name))  # the run may have been moved
        file = next((file for file in candidates if file.exists() and home in file.parents), None)
        if file is None:
            return [f"{shown(operation)}: it is not in {home}"]
        operation = dataclasses.replace(operation, path=str(file))
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
