"""Comparison of a guided sweep with the whole grid: quality of its choice, by the grid's figures, and its cost."""

import math
import statistics
from dataclasses import dataclass

from scaleray.errors import ConfigError
from scaleray.records.sweep_record import SweepRecord, Trial

Key = tuple[int, str, float, str, str]


@dataclass(frozen=True)
class GridComparison:
    """A guided sweep compared with the whole grid.

    loss: relative difference of the chosen setting's goodput from the grid's best; infinite if the chosen setting
    missed the target in the grid. samples_share: samples of the guided sweep's trials divided by those of the grid's.
    """

    chosen: Key
    best: Key
    loss: float
    samples_share: float

    def __str__(self) -> str:
        below = "missed the target" if math.isinf(self.loss) else f"is {self.loss:.1%} below its best"
        return (
            f"Against the grid: batch {self.chosen[0]} (rule {self.chosen[1]}) {below}, "
            f"batch {self.best[0]} (rule {self.best[1]}), "
            f"by the grid's own figures, for {self.samples_share:.1%} of its samples."
        )


def compare_with_grid(guided: SweepRecord, grid: SweepRecord) -> GridComparison:
    """Compare a guided sweep with the whole grid.

    Raises ConfigError if the sweeps have different targets or the grid lacks the chosen setting.
    """
    for what, ours, theirs in (
        ("the target", guided.target, grid.target),
        ("the training", guided.conditions.config_hash, grid.conditions.config_hash),
        ("the workers of a trial", _workers(guided), _workers(grid)),
    ):
        if ours != theirs:
            raise ConfigError(
                "--against-grid", grid.name, f"{what} is {theirs} in the grid and {ours} here", "give a matching grid"
            )
    times = _times_to_target(grid.trials)
    own = _times_to_target(guided.trials)
    if not own or not times or min(times.values()) == math.inf:
        raise ConfigError("--against-grid", grid.name, "one of the two sweeps did not reach the target")
    chosen, best = min(own, key=own.__getitem__), min(times, key=times.__getitem__)
    if chosen not in times:
        raise ConfigError("--against-grid", grid.name, f"it has no trial of batch {chosen[0]} with rule {chosen[1]}")
    spent, whole = (sum(t.samples for t in record.trials if t.same_as is None) for record in (guided, grid))
    return GridComparison(
        chosen, best, 1 - times[best] / times[chosen] if times[chosen] < math.inf else math.inf, spent / whole
    )


def _times_to_target(trials: list[Trial]) -> dict[Key, float]:
    """Seconds to the target by setting: samples to the target, at the throughput of all trials of that batch size.

    Values are medians over seeds.
    """
    rates: dict[int, list[float]] = {}
    for trial in trials:
        if trial.samples_per_s and trial.same_as is None:
            rates.setdefault(trial.batch_size, []).append(trial.samples_per_s)
    samples: dict[Key, list[float]] = {}
    for t in trials:
        if t.samples > 0 and t.batch_size in rates:
            needed = math.inf if t.samples_to_target is None else float(t.samples_to_target)
            samples.setdefault((t.batch_size, t.rule, t.learning_rate, t.optimizer, t.warmup), []).append(needed)
    return {key: statistics.median(needed) / statistics.median(rates[key[0]]) for key, needed in samples.items()}


def _workers(record: SweepRecord) -> int | None:
    return record.trials[0].workers if record.trials else None
