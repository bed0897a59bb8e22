"""Predicted throughput of a run: the config's own value, or the measurement of a study of the same training."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scaleray.config import RunConfig
from scaleray.config.recipe.values import Recipe
from scaleray.launch.session.conditions import digest, training_of
from scaleray.records.read import FILE, parse_record
from scaleray.records.study_record import Point, StudyRecord

STUDIES = "study*"
"""Default names of study folders."""
NEWEST = 20
"""Maximum number of records to read, newest first, so that many studies do not delay a start."""


@dataclass(frozen=True)
class Prediction:
    """Predicted samples per second of a run; None if unknown. study: its source; empty for the config's own value."""

    samples_per_s: float | None = None
    study: str = ""

    def lines(self) -> list[str]:
        """Lines about the prediction before the run, if it was found rather than configured."""
        if not self.study:
            return []
        return [f"  compared with {self.samples_per_s:,.4g} samples/s, which {self.study} measured"]


def prediction(config: RunConfig, recipe: Recipe, *, run_path: str) -> Prediction:
    """Return the prediction for a run. run_path: its folder, next to which studies leave their records. Uses the newest
    study of the same training that has a point with this strategy, number of workers and global batch."""
    if config.monitoring.expected_samples_per_s is not None:
        return Prediction(config.monitoring.expected_samples_per_s)
    wanted = digest(training_of(config.to_dict()))
    for record in _studies(Path(run_path).parent):
        points = [at.point for curve in record.curves for at in curve.points]
        if record.conditions.config_hash == wanted:
            for point in points:
                if _is_of(point, config, recipe):
                    return Prediction(point.samples_per_s.value, record.name)
    return Prediction()


def _is_of(point: Point, config: RunConfig, recipe: Recipe) -> bool:
    wanted = recipe.strategy, config.scale.max_workers, recipe.global_batch_size
    return (point.strategy, point.workers, point.global_batch_size) == wanted


def _studies(storage: Path) -> Iterator[StudyRecord]:
    """Records of studies in a storage path on this machine, newest first."""
    found = sorted(storage.glob(f"{STUDIES}/{FILE}"), key=_written_at, reverse=True)
    for path in found[:NEWEST]:
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = parse_record(path.read_bytes())
            if isinstance(record, StudyRecord):
                yield record


def _written_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0
