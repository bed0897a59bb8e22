"""Points of MLflow's charts: selected steps of a run with their values, each sent only once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scaleray.common import metric_names as names
from scaleray.records.accepted_names import LONGEST_NAME, acceptable_name
from scaleray.records.run_record import CheckpointRecord, StepRecord

Point = tuple[str, float, int, int]
"""(metric, value, time in ms since 1970, step), as in MLflow's API."""


@dataclass
class _Window:
    """Steps since the last point."""

    steps: int = 0
    samples: int = 0
    time_s: float = 0.0
    wait_s: float = 0.0


class Points:
    """Collects points until they are taken.

    known: newest step of each metric; earlier points of it are dropped.
    """

    def __init__(self, *, every_steps: int, tokens_per_sample: int | None) -> None:
        self.every_steps, self.tokens_per_sample = every_steps, tokens_per_sample
        self.known: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._window = _Window()
        self._last: tuple[StepRecord, int] | None = None
        self._new: list[Point] = []

    def take(self) -> list[Point]:
        """Take the points added since the last call."""
        points, self._new = self._new, []
        return points

    def add(self, values: Mapping[str, float], step: int, *, at: float) -> None:
        """Add values by metric name.

        Values of a step that is already known, as after a resume, are dropped. at: time in s since 1970.
        """
        for given, value in values.items():
            name = self._name_of(given)
            if step > self.known.get(name, -1):  # a resumed run repeats the steps after its checkpoint
                # MLflow stores infinity as the largest float, which ruins charts; NaN is stored as such
                self._new.append((name, math.nan if math.isinf(value) else float(value), in_ms(at), step))
                self.known[name] = step

    def _name_of(self, given: str) -> str:
        """Name of a metric in MLflow, unique among metrics."""
        if given not in self._names:
            name, number = acceptable_name(given), 2
            while name in self._names.values():
                name, number = f"{acceptable_name(given)[: LONGEST_NAME - 10]}_{number}", number + 1
            self._names[given] = name
        return self._names[given]

    def renamed(self) -> dict[str, str]:
        """Metrics whose names MLflow does not accept, with their names there."""
        return {given: name for given, name in self._names.items() if given != name}

    def add_step(self, record: StepRecord, *, num_nonfinite: int) -> None:
        """Add the step if it is the first or an `every_steps`-th one; rates are means over the steps since the previous
        point."""
        window = self._window
        window.steps += 1
        window.samples += record.num_samples
        window.time_s += record.step_time_s
        window.wait_s += record.input_wait_s
        self._last = record, num_nonfinite
        if record.step % self.every_steps == 0 or record.step == 1:
            self.add_last_step()

    def add_last_step(self) -> None:
        """Add the last step, if it has no point yet."""
        if self._last is None:
            return
        (record, num_nonfinite), self._last = self._last, None
        window = self._window
        rate = window.samples / window.time_s
        points = {
            names.LOSS.name: record.loss,
            names.LEARNING_RATE.name: record.learning_rate,
            names.EPOCH.name: record.epoch,
            names.SAMPLES_PER_S.name: rate,
            names.STEP_TIME_S.name: window.time_s / window.steps,
            names.INPUT_WAIT_SHARE.name: window.wait_s / window.time_s,
            names.GRAD_NORM.name: record.grad_norm,
            names.LOSS_SCALE.name: record.loss_scale,
            names.TOKENS_PER_S.name: rate * self.tokens_per_sample if self.tokens_per_sample else None,
            names.WORKERS.name: float(record.world_size),
            names.SENT_BYTES.name: record.sent_bytes or None,
            **record.more,
            names.NONFINITE_STEPS.name: float(num_nonfinite) if num_nonfinite else None,
        }
        self.add({k: v for k, v in points.items() if v is not None}, record.step, at=record.recorded_at)
        self._window = _Window()

    def add_checkpoint(self, record: CheckpointRecord) -> None:
        """Add the cost of a checkpoint."""
        points = {
            names.CHECKPOINT_STALL_S.name: record.stall_s,
            names.CHECKPOINT_DURATION_S.name: record.duration_s,
            names.CHECKPOINT_WRITTEN_BYTES.name: float(record.bytes_written),
        }
        self.add(points, record.step, at=record.recorded_at)


def in_ms(at: float) -> int:
    """A time in seconds, converted to MLflow's unit."""
    return int(at * 1000)
