"""A run's operations on their way to MLflow: rejected ones are also stored in a file, which survives a kill."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from scaleray.checkpoints.storage import Store
from scaleray.common.filesystems import write_whole
from scaleray.errors import first_line
from scaleray.recording import unsent_file
from scaleray.recording.outbox import Outbox, is_refusal_of_content
from scaleray.recording.store import RunStore, without_password
from scaleray.records.chart_points import Point
from scaleray.records.mlflow_operations import EndRun, LogMetrics, Operation, pieces_of, shown, to_json

REFUSED = "refused.jsonl"
"""File of operations whose content MLflow refused, in the format of unsent.jsonl."""


class Spool(Outbox[Operation]):
    """Outbox of a run, backed by a file. say: receives sentences about MLflow's absence. where: returns the run's
    progress.

    store: the run in MLflow, once it exists. problem: reason why the file lacks stored operations."""

    store: RunStore | None

    def __init__(self, path: Path, *, say: Callable[[str], None], where: Callable[[], str]) -> None:
        super().__init__()
        self.path, self._say, self._where = path, say, where
        self._is_on_disk = True

    @property
    def problem(self) -> str | None:
        return None if self._is_on_disk else f"{self.path} cannot be written"

    def unsent_file(self) -> str | None:
        """The file of unsent operations, if there is any."""
        return str(self.path) if self.path.exists() else None

    def take_over(self, folder: str | None, known: dict[str, int]) -> None:
        """Take over the unsent operations of the interrupted process. folder: another location of its file.

        known: newest step of each metric in MLflow, updated with the stored operations."""
        if not self.path.exists() and folder:
            with contextlib.suppress(OSError):
                write_whole(self.path, Store(folder).read(self.path.name))
        if not self.path.exists():
            return
        unsent = unsent_file.parse(self.path.read_bytes())  # a last line that is cut is what a kill leaves
        if unsent.num_damaged:
            damaged = self.path.with_name(f"{self.path.name}.damaged")
            shutil.copyfile(self.path, damaged)
            self._say(
                f"{self.path.name} was damaged: {unsent.num_damaged} of its lines cannot be read, "
                f"{len(unsent.operations)} can; "
                f"it is kept as {damaged.name}, and the lost steps are sent from steps.csv"
            )
        for operation in unsent.operations:
            if isinstance(operation, LogMetrics):  # what was sent already, but not forgotten yet, is left out
                operation = operation.after(known)
                known.update({point[0]: point[3] for point in operation.points})
            if not isinstance(operation, EndRun):
                self._kept.append(operation)
        self._write_file()

    def points(self) -> list[Point]:
        """Points among the stored operations."""
        return [point for operation in self._kept if isinstance(operation, LogMetrics) for point in operation.points]

    def _set_aside(self, operation: Operation, refusal: Exception) -> bool:
        """Move an operation whose content MLflow refuses to a separate file, with the reason. If only some of its
        values are refused, the others are sent."""
        if not is_refusal_of_content(refusal):
            return False
        if len(pieces := pieces_of(operation)) > 1:
            # one piece may be kept for want of an answer: then all are, as points that MLflow has may be sent again
            return all(self._try(piece) is None for piece in pieces)
        self._say(f"MLflow refuses {shown(operation)}: {first_line(refusal)[:300]}; it is kept in {REFUSED}")
        with contextlib.suppress(OSError), open(self.path.with_name(REFUSED), "a") as file:
            if not file.tell():
                file.write(f"{json.dumps(self._head())}\n")
            file.write(f"{to_json(operation)}\n")
        return True

    def _say_away(self, problem: Exception) -> None:
        self._say(
            f"MLflow accepts no more data at {self._where()} ({type(problem).__name__}); storing it in {self.path} "
            "and retrying"
        )

    def _say_back(self) -> None:
        self._say(f"MLflow is back at {self._where()}; all stored data has been sent")

    def _keep(self, operation: Operation) -> None:
        line = to_json(operation)  # before it is kept: what cannot be written must not spoil the file for others
        super()._keep(operation)
        if len(self._kept) == 1 or not self._is_on_disk:
            self._write_file()
            return
        try:
            with open(self.path, "a") as file:
                file.write(f"{line}\n")
        except OSError:
            self._is_on_disk = False

    def _forget(self, number: int) -> None:
        super()._forget(number)
        if number:
            self._write_file()

    def _write_file(self) -> None:
        """Write all operations that MLflow lacks to the file; on a full disk, try again later."""
        try:
            if self._kept:
                self._rewrite()
            else:
                self.path.unlink(missing_ok=True)
            self._is_on_disk = True
        except OSError:
            self._is_on_disk = False

    def _rewrite(self) -> None:
        lines = [json.dumps(head := self._head()), *map(to_json, self._kept)]
        text = "".join(f"{line}\n" for line in lines)
        Store(str(self.path.parent)).write_record(self.path.name, text, head["tracking_uri"])

    def _head(self) -> dict[str, str]:
        store = self.store
        assert store is not None, "the run exists before anything is kept"
        return {
            "tracking_uri": without_password(store.uri),
            "run_id": store.run_id,
            "experiment_id": store.experiment_id,
        }
