"""Chooses the next trials of a grid in order to find the fastest way to a target with few samples.

Two trainings measure noise and throughput. From these follows the goodput at every batch size. Further trials explore
its peak: first other rules there, then neighbouring sizes, until all are slower or the budget is spent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from scaleray.records.study_record import Estimate
from scaleray.records.sweep_record import GoodputPoint, Trial
from scaleray.training.noise.statistical_efficiency import (
    MeasuredStep,
    Noise,
    ThroughputModel,
    fit_throughput,
    goodput_point,
    is_trusted,
    predict_samples,
)

# AdaScale's gain: how many steps of the reference batch a step of a larger one is worth.
#
# Source: Johnson et al. 2020, arXiv:2007.05105.


def adascale_gain(kappa: float, *, square: float, trace: float) -> float:
    """Number of reference steps that one step of `kappa` times as many samples is worth; in [1, kappa] for kappa of at
    least 1.

    square: |G|^2; trace: trace of the covariance of the reference batch's mean gradient. AdaScale multiplies the
    learning rate by this gain (for Adam, by its square root)."""
    square, trace = max(0.0, square), max(0.0, trace)
    if square == 0 and trace == 0:
        return 1.0  # no gradient: nothing is gained by more samples
    return (trace + square) / (trace / kappa + square)


SPREAD = 4
"""Ratio between the first two batch sizes. Their noise is then trusted over a 64-fold range."""
WORTHWHILE = 0.9
"""Minimum predicted goodput of a neighbour, relative to the best measured one, for it to be tried."""
NEVER_RAN = ("failed", "never fits")


@dataclass(frozen=True)
class Cell:
    """One setting of the grid. numbers: numbers of its trials, one for each seed. arm: everything but the batch size.

    most_samples: samples of its whole training. same_as: equal for cells that are the same training, as are all rules
    at the reference batch."""

    numbers: tuple[int, ...]
    batch_size: int
    arm: str
    most_samples: int
    same_as: str
    micro_size: int | None = None


@dataclass(frozen=True)
class Result:
    """Medians over the trials of a cell. samples: samples to the target; None if more than half of them missed it."""

    cell: Cell
    samples: float | None
    samples_per_s: float | None
    noise: Estimate | None
    spent: int


@dataclass(frozen=True)
class Guide:
    """Search of a grid. arms: settings other than the batch size, beginning with the one that theory prefers.
    reference: batch size at which the learning rate was tuned."""

    cells: Sequence[Cell]
    arms: Sequence[str]
    reference: int
    workers: int = 1
    share: float = 0.2
    """Maximum number of samples to spend, as a share of the whole grid's."""
    by_place: dict[tuple[int, str], Cell] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for cell in self.cells:
            self.by_place[cell.batch_size, cell.arm] = cell

    @property
    def sizes(self) -> list[int]:
        return sorted({cell.batch_size for cell in self.cells})

    def results(self, trials: Sequence[Trial]) -> dict[tuple[int, str], Result]:
        """Results so far, by batch size and arm. A training that several arms share is listed under one of them."""
        by_number = {trial.number: trial for trial in trials if trial.same_as is None}
        found = {}
        for cell in self.cells:
            if all(number in by_number for number in cell.numbers):
                found[cell.batch_size, cell.arm] = _result(cell, [by_number[n] for n in cell.numbers])
        return found

    def first_cells(self) -> list[Cell]:
        """The two trainings that measure noise: at the reference batch size, and at about 4 times that size."""
        sizes = self.sizes
        first = min(sizes, key=lambda b: (abs(math.log(b / self.reference)), b))
        others = [size for size in sizes if size != first]
        cells = [self._preferred(first)]
        if others:
            wanted = SPREAD * first if any(size > first for size in others) else first / SPREAD
            cells.append(self._preferred(min(others, key=lambda b: (abs(math.log(b / wanted)), b))))
        return cells

    def next_cells(self, trials: Sequence[Trial]) -> list[Cell]:
        """Cells to run next, independent of each other; None when the search is over."""
        results = self.results(trials)
        if first := [cell for cell in self.first_cells() if (cell.batch_size, cell.arm) not in results]:
            return first
        outlook = self.outlook(trials)
        if outlook is None:
            return []
        chosen: list[Cell] = []
        left = self.budget(outlook) - self.spent(trials)
        for cell in self.wanted_cells(trials):
            left -= outlook.samples_of(cell)
            if left < 0:
                break
            chosen.append(cell)
        return chosen

    def wanted_cells(self, trials: Sequence[Trial]) -> list[Cell]:
        """Cells worth running after the first two, the most promising first, regardless of the budget."""
        outlook = self.outlook(trials)
        return [] if outlook is None else self._wanted(self.results(trials), outlook)

    def outlook(self, trials: Sequence[Trial]) -> Outlook | None:
        """Samples, throughput and goodput at every batch size, based on trials; None until one reached the target."""
        results = self.results(trials)
        return Outlook.of(self, results)

    def budget(self, outlook: Outlook) -> float:
        """Number of samples that may be spent."""
        return self.share * self.grid_samples(outlook)

    def grid_samples(self, outlook: Outlook) -> float:
        """Known or predicted samples of the whole grid; identical trainings count once."""
        trainings: dict[tuple[int, str], Cell] = {}
        for cell in self.cells:
            if outlook.is_measured(cell) or (cell.batch_size, cell.same_as) not in trainings:
                trainings[cell.batch_size, cell.same_as] = cell
        return sum(map(outlook.samples_of, trainings.values()))

    def spent(self, trials: Sequence[Trial]) -> int:
        """Number of samples used by the trials so far."""
        return sum(trial.samples for trial in trials if trial.same_as is None)

    def fastest(self, trials: Sequence[Trial]) -> Result | None:
        """The cell that reached the target in the shortest time."""
        outlook = self.outlook(trials)
        return None if outlook is None else outlook.fastest

    def _preferred(self, size: int) -> Cell:
        return next(self.by_place[size, arm] for arm in self.arms if (size, arm) in self.by_place)

    def _wanted(self, results: dict[tuple[int, str], Result], outlook: Outlook) -> list[Cell]:
        """Cells worth running: the best one by prediction, then the other arms of the best one, its neighbours, and
        their other arms."""
        best = outlook.fastest
        promising = max((p for p in outlook.points if p.is_trusted), key=lambda p: p.goodput.value, default=None)
        if promising is not None and not any(size == promising.batch_size for size, _ in results):
            return [self._preferred(promising.batch_size)]
        size = best.cell.batch_size
        if arms := self._unknown_arms(size, results):
            return arms
        position = self.sizes.index(size)
        beside = [self.sizes[i] for i in (position - 1, position + 1) if 0 <= i < len(self.sizes)]
        goodput = {point.batch_size: point.goodput for point in outlook.points}
        beside.sort(key=lambda b: -goodput[b].value)
        least = WORTHWHILE * goodput[size].value
        # a bound that reaches this high is reason enough: predictions are not sharper than their intervals
        likely = [
            self.by_place.get((other, best.cell.arm)) or self._preferred(other)
            for other in beside
            if goodput[other].high >= least
        ]
        if cells := [cell for cell in likely if not self._is_known(cell, results)]:
            return cells
        return [cell for b in beside if goodput[b].value >= least for cell in self._unknown_arms(b, results)]

    def _unknown_arms(self, size: int, results: dict[tuple[int, str], Result]) -> list[Cell]:
        """Cells of a batch size that have not run, one for each distinct training."""
        cells = [self.by_place[size, arm] for arm in self.arms if (size, arm) in self.by_place]
        unknown = [cell for cell in cells if not self._is_known(cell, results)]
        return list({cell.same_as: cell for cell in reversed(unknown)}.values())[::-1]

    def _is_known(self, cell: Cell, results: dict[tuple[int, str], Result]) -> bool:
        """Whether the cell, or another arm that is the same training, has run."""
        return any(
            size == cell.batch_size and (arm == cell.arm or found.cell.same_as == cell.same_as)
            for (size, arm), found in results.items()
        )


@dataclass(frozen=True)
class Outlook:
    """Samples to the target, throughput and goodput at every batch size, measured or predicted. fastest: fastest cell
    that has run."""

    points: list[GoodputPoint]
    fastest: Result
    throughput: ThroughputModel
    measured_samples: dict[tuple[int, str], int]

    @classmethod
    def of(cls, guide: Guide, results: dict[tuple[int, str], Result]) -> Outlook | None:
        """Predict every batch size from the results; None until a cell has reached the target."""
        reached = [r for r in results.values() if r.samples is not None and r.samples_per_s]
        if not reached:
            return None
        throughput = _fitted(guide, results)
        best: dict[int, Result] = {}  # the best arm at each size
        for result in sorted(reached, key=lambda r: -(r.samples or 0)):
            best[result.cell.batch_size] = result
        known = {size: float(result.samples or 0) for size, result in best.items()}
        noises = [Noise(r.cell.batch_size, r.noise) for r in results.values() if r.noise is not None]
        reference = predict_samples(guide.reference, known=known, noises=noises).value
        points = [
            goodput_point(
                size,
                samples_per_s=_rate(guide, size, results, throughput),
                to_target=predict_samples(size, known=known, noises=noises),
                reference_to_target=reference,
                is_trusted=size in best or is_trusted(size, noises),
                is_measured=size in best,
            )
            for size in guide.sizes
        ]
        rates = {point.batch_size: point.samples_per_s.value for point in points}
        fastest = min(reached, key=lambda r: (r.samples or 0) / rates[r.cell.batch_size])
        return cls(points, fastest, throughput, {place: result.spent for place, result in results.items()})

    def is_measured(self, cell: Cell) -> bool:
        """Whether the trials of the cell have run."""
        return (cell.batch_size, cell.arm) in self.measured_samples

    def samples_of(self, cell: Cell) -> float:
        """Samples that the trials of a cell took, or would take."""
        spent = self.measured_samples.get((cell.batch_size, cell.arm))
        if spent is not None:
            return spent
        predicted = next(p.predicted_samples for p in self.points if p.batch_size == cell.batch_size)
        assert predicted is not None
        return len(cell.numbers) * min(predicted, cell.most_samples)


def _result(cell: Cell, trials: list[Trial]) -> Result:
    ran = [trial for trial in trials if trial.status not in NEVER_RAN]
    to_target = [math.inf if t.samples_to_target is None else float(t.samples_to_target) for t in trials]
    middle = statistics.median(to_target)
    rates = [trial.samples_per_s for trial in ran if trial.samples_per_s]
    noises = [
        Estimate(_or_infinite(t.noise_scale), t.noise_interval[0], _or_infinite(t.noise_interval[1]))
        for t in ran
        if t.noise_interval is not None
    ]
    return Result(
        cell,
        samples=middle if math.isfinite(middle) else None,
        samples_per_s=statistics.median(rates) if rates else None,
        noise=sorted(noises, key=lambda n: n.value)[(len(noises) - 1) // 2] if noises else None,
        spent=sum(trial.samples for trial in trials),
    )


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _fitted(guide: Guide, results: dict[tuple[int, str], Result]) -> ThroughputModel:
    measured = [
        MeasuredStep(r.cell.batch_size, r.cell.batch_size / r.samples_per_s, r.cell.micro_size)
        for r in results.values()
        if r.samples_per_s
    ]
    return fit_throughput(measured, workers=guide.workers)


def _rate(guide: Guide, size: int, results: dict[tuple[int, str], Result], throughput: ThroughputModel) -> Estimate:
    """Samples per second at a batch size: measured by trials whose micro-batches were not reduced in order to measure
    noise, or else predicted by the model."""
    found = [
        r.samples_per_s for (b, _), r in results.items() if b == size and r.samples_per_s and r.cell.micro_size is None
    ]
    if found:
        return Estimate(statistics.median(found), min(found), max(found))
    modelled = throughput.samples_per_s(size, workers=guide.workers)
    return Estimate(modelled, modelled, modelled)
