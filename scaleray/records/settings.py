"""Settings of a sweep: groups of trials that differ only in their seed, and the best one at each batch size.
Used by MLflow's pages and the reports.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from scaleray.common import metric_names as names
from scaleray.records.rows import Row
from scaleray.records.sweep_record import SweepRecord, Trial

NEVER_RAN = ("failed", "never fits")
BROKEN = (*NEVER_RAN, "diverged")
"""Statuses of trials without a result; `diverged` means that the setting does not work."""


@dataclass(frozen=True)
class Setting:
    """Trials that differ only in their seed, with medians of their values.

    value: last value of the sweep's metric. samples_to_target, time_to_target_s: None unless more than half of the
    trials reached the target.
    """

    rule: str
    batch_size: int
    learning_rate: float
    optimizer: str
    warmup: str
    trials: tuple[Trial, ...]
    value: float | None
    samples_to_target: float | None
    time_to_target_s: float | None

    one_training_with: tuple[str, ...] = ()
    """Other rules under which the setting leads to the same training, which was run only once."""

    @property
    def num_reached(self) -> int:
        """Number of trials that reached the target."""
        return sum(trial.samples_to_target is not None for trial in self.trials)

    def rows(self) -> list[Row]:
        """Measurements of the setting."""
        return [
            Row(names.TRIAL_VALUE, self.value),
            Row(names.TRIAL_SAMPLES_TO_TARGET, self.samples_to_target),
            Row(names.TRIAL_TIME_TO_TARGET_S, self.time_to_target_s),
        ]


def trained(record: SweepRecord) -> list[Trial]:
    """Trials that were actually trained, without those that share another trial's training."""
    return [trial for trial in record.trials if trial.same_as is None]


def one_training(record: SweepRecord) -> list[list[Trial]]:
    """Groups of trials that share one training, each starting with the trained one."""
    groups: dict[int, list[Trial]] = defaultdict(list)
    for trial in sorted(record.trials, key=lambda t: t.same_as is not None):
        groups[trial.number if trial.same_as is None else trial.same_as].append(trial)
    return [group for group in groups.values() if len(group) > 1]


def settings(record: SweepRecord) -> list[Setting]:
    """All settings, by rule, batch size and learning rate, without trials that never ran."""
    groups: dict[tuple[str, int, float, str, str, str], list[Trial]] = defaultdict(list)
    for t in record.trials:
        if t.status not in NEVER_RAN:
            others = repr(sorted((k, repr(v)) for k, v in t.settings.items() if not k.endswith("seed")))
            groups[t.rule, t.batch_size, t.learning_rate, t.optimizer, t.warmup, others].append(t)
    rules = {t.number: [other.rule for other in group] for group in one_training(record) for t in group}
    return [
        Setting(
            *key[:5],
            trials=tuple(trials),
            value=_median(t.value for t in trials),
            samples_to_target=_median_reached([t.samples_to_target for t in trials]),
            time_to_target_s=_median_reached([t.time_to_target_s for t in trials]),
            one_training_with=tuple(sorted({r for t in trials for r in rules.get(t.number, ()) if r != key[0]})),
        )
        for key, trials in sorted(groups.items())
    ]


def best(found: Iterable[Setting], direction: str) -> Setting | None:
    """The setting with the fewest samples to the target, or with the best value if none reached it."""
    sign = 1.0 if direction == "min" else -1.0

    def rank(setting: Setting) -> tuple[float, float]:
        samples = math.inf if setting.samples_to_target is None else setting.samples_to_target
        return samples, math.inf if setting.value is None else sign * setting.value

    return min(found, key=rank, default=None)


def best_by_batch(record: SweepRecord) -> dict[str, dict[int, Setting]]:
    """Best setting of each rule at each batch size, by increasing batch size."""
    groups: dict[str, dict[int, list[Setting]]] = defaultdict(lambda: defaultdict(list))
    for setting in settings(record):
        groups[setting.rule][setting.batch_size].append(setting)
    found: dict[str, dict[int, Setting]] = {}
    for rule, batches in groups.items():
        chosen = {batch: best(group, record.direction) for batch, group in sorted(batches.items())}
        found[rule] = {batch: setting for batch, setting in chosen.items() if setting is not None}
    return found


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    return statistics.median(known) if known else None


def _median_reached(values: list[int | None] | list[float | None]) -> float | None:
    """Median that counts trials without the target as infinite, so that a lucky seed does not represent others."""
    middle = statistics.median(math.inf if v is None else float(v) for v in values)
    return middle if math.isfinite(middle) else None
