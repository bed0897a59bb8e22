"""`sweep --guided`: measure noise and throughput in two trainings, then run trials only where goodput is highest.

The next trials are chosen only from the trials' records, so that an interrupted sweep continues as if it had not been
interrupted. Independent trials start together, so that their throughputs on a shared machine are comparable.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from scaleray.config import RunConfig
from scaleray.errors import ConfigError
from scaleray.records.study_record import Estimate
from scaleray.records.sweep_record import GoodputPoint, SweepRecord, Trial
from scaleray.sweeps.grid_comparison import compare_with_grid
from scaleray.sweeps.same_trainings import training_key, without_seed
from scaleray.sweeps.search_space import BATCH_SIZE, LEARNING_RATE, OPTIMIZER, RULE, SEED, Settings
from scaleray.sweeps.sweep_plan import SweepPlan
from scaleray.sweeps.sweep_question import SweepQuestion
from scaleray.training.noise.guidance import Cell, Guide, Outlook, Result, adascale_gain

THEORY = {
    "sgd": ("linear", "legw", "sqrt", "none"),
    "lars": ("linear", "legw", "sqrt", "none"),
    "adamw": ("sqrt", "adam", "legw", "linear", "none"),
    "lamb": ("sqrt", "legw", "none"),
}
"""Learning-rate rules in the order in which they are tried, by optimizer."""
MEASUREMENTS = 128
"""Minimum number of noise measurements in a whole training."""


def check_guided(base: RunConfig, question: SweepQuestion) -> None:
    """Raise ConfigError if the sweep cannot be guided."""
    if base.stop.at is None:
        raise ConfigError(
            "stop.at",
            None,
            "a guided sweep searches for the fastest way to a target",
            "for example --stop.at 'val/accuracy >= 0.97'",
        )
    if question.scheduler != "fifo":
        raise ConfigError(
            "--scheduler", question.scheduler, "trials that stop early do not show the time to the target", "omit it"
        )
    if question.num_trials is not None:
        raise ConfigError(
            "--trials", question.num_trials, "a guided sweep runs as many as it needs", "limit it with --guided-share"
        )


class GuidedTrials:
    """Trials of a guided sweep: their selection, execution and conclusion.

    against: record of the whole grid.
    """

    def __init__(self, plan: SweepPlan, *, share: float, against: SweepRecord | None = None) -> None:
        self.plan, self.against = plan, against
        self.guide = make_guide(plan, share=share)

    def measured_plan(self) -> SweepPlan:
        """Plan whose trials also measure gradient noise."""
        candidates = list(self.plan.candidates)
        for cell in self.guide.cells:
            for number in cell.numbers:
                candidates[number] = {**candidates[number], **_measuring(self.plan, candidates[number], cell)}
        return dataclasses.replace(self.plan, candidates=candidates)

    def run(
        self,
        get_trials: Callable[[], Sequence[Trial]],
        run_numbers: Callable[[list[int]], None],
        say: Callable[[str], None],
    ) -> None:
        """Run trials until none is worthwhile. run_numbers: runs those that have no record yet."""
        said = ""
        while cells := self.guide.next_cells(get_trials()):
            outlook = self.guide.outlook(get_trials())
            if outlook is not None and (text := _prediction(outlook)) != said:
                say(f"  {text}")
                said = text
            done = {trial.number for trial in get_trials()}
            numbers = [number for cell in cells for number in cell.numbers if number not in done]
            if not numbers:
                return
            run_numbers(numbers)

    def conclude(self, record: SweepRecord) -> SweepRecord:
        """Return the record with the goodput of each batch size and trial, and a description of the choice."""
        outlook = self.guide.outlook(record.trials)
        if outlook is None:
            spent = self.guide.spent(record.trials)
            text = (
                f"Guided: neither of the first two trainings reached {record.target} ({spent:,} samples), so nothing "
                f"can be predicted. Set a target that the reference batch reaches, or lengthen stop.after."
            )
            return dataclasses.replace(record, words=[text, *record.words])
        by_size = {point.batch_size: point for point in outlook.points}
        base = next(iter(outlook.points))
        at_reference = (base.predicted_samples or 0.0) * base.statistical_efficiency.value
        trials = [_with_goodput(trial, by_size, at_reference) for trial in record.trials]
        words = [*_words(self.guide, outlook, record), *record.words]
        if self.against is not None:
            words.insert(1, str(compare_with_grid(record, self.against)))
        return dataclasses.replace(record, trials=trials, goodput=outlook.points, words=words)


def make_guide(plan: SweepPlan, *, share: float) -> Guide:
    """Return the grid of a plan as cells. An arm is a combination of everything except batch size and seed."""
    groups: dict[tuple[int, str], list[int]] = {}
    for number, settings in enumerate(plan.candidates):
        groups.setdefault((settings[BATCH_SIZE], _arm(settings)), []).append(number)
    cells = [_cell(plan, numbers) for numbers in groups.values()]
    arms = {_arm(settings): settings for settings in plan.candidates}
    ordered = sorted(arms, key=lambda arm: _rank(plan, arms[arm]))
    first = plan.job(plan.candidates[0])
    in_samples = first.recipe.global_batch_size / first.config.batch.global_size
    guide = Guide(cells, ordered, round(plan.reference_batch_size * in_samples), workers=plan.workers, share=share)
    if plan.workers > 1 or plan.base.batch.micro_size is not None:
        return guide
    # one worker observes noise only between micro-batches, which is slower: measure in the first trainings only
    split = {
        cell: dataclasses.replace(cell, micro_size=cell.batch_size // 2)
        for cell in guide.first_cells()
        if cell.batch_size % 2 == 0
    }
    return Guide([split.get(cell, cell) for cell in cells], ordered, guide.reference, workers=plan.workers, share=share)


def _cell(plan: SweepPlan, numbers: list[int]) -> Cell:
    settings = plan.candidates[numbers[0]]
    recipe, (most, _, _) = plan.job(settings).recipe, plan.samples(settings)
    same_as = training_key(plan, without_seed(settings))
    return Cell(tuple(numbers), recipe.global_batch_size, _arm(settings), most, same_as=same_as)


def _measuring(plan: SweepPlan, settings: Settings, cell: Cell) -> Settings:
    """Settings with which a trial measures its noise, for which a single worker needs two micro-batches."""
    total = plan.job(settings).recipe.total_steps
    every = max(1, min(plan.base.noise_scale.every_steps, total // MEASUREMENTS))
    found: Settings = {"noise_scale.measure": "auto", "noise_scale.every_steps": every}
    # half of the batch, in the requested unit
    return {**found, "batch.micro_size": int(settings[BATCH_SIZE]) // 2} if cell.micro_size is not None else found


def _arm(settings: Settings) -> str:
    return json.dumps({k: v for k, v in settings.items() if k not in (BATCH_SIZE, SEED)}, sort_keys=True)


def _rank(plan: SweepPlan, settings: Settings) -> tuple[Any, ...]:
    """Sort key: the config's optimizer first, then the rule that theory suggests, then the nearest learning rate."""
    optimizer = settings.get(OPTIMIZER, plan.base.optimizer.name)
    order = THEORY.get(optimizer, ())
    rule = settings.get(RULE, plan.base.optimizer.rule)
    own_rate = plan.base.optimizer.learning_rate
    rate = settings.get(LEARNING_RATE, own_rate) or 1.0
    return (
        optimizer != plan.base.optimizer.name,
        order.index(rule) if rule in order else len(order),
        abs(math.log(rate / (own_rate or rate))),
        _arm(settings),
    )


# words


def _prediction(outlook: Outlook) -> str:
    best = max(outlook.points, key=lambda p: p.goodput.value)
    is_far = "" if best.is_trusted else ", extrapolated"
    return (
        f"goodput is highest at batch {best.batch_size} ({best.goodput} samples/s of the reference batch{is_far}); "
        f"fastest so far: batch {outlook.fastest.cell.batch_size}"
    )


def _with_goodput(trial: Trial, points: dict[int, GoodputPoint], at_reference: float) -> Trial:
    point = points.get(trial.batch_size)
    if trial.samples_to_target is None or point is None:
        return trial
    return dataclasses.replace(trial, goodput=point.samples_per_s.value * at_reference / trial.samples_to_target)


def _words(guide: Guide, outlook: Outlook, record: SweepRecord) -> list[str]:
    spent, grid = guide.spent(record.trials), guide.grid_samples(outlook)
    chosen = outlook.fastest
    trial = next(t for t in record.trials if t.number == chosen.cell.numbers[0])
    rate = next(p.samples_per_s.value for p in outlook.points if p.batch_size == chosen.cell.batch_size)
    ran = sum(t.samples > 0 and t.same_as is None for t in record.trials)
    total = sum({(cell.batch_size, cell.same_as): len(cell.numbers) for cell in guide.cells}.values())
    found = [
        f"Guided: batch {chosen.cell.batch_size} with {trial.optimizer}, "
        f"learning rate {trial.learning_rate:.3g} (rule {trial.rule}) "
        f"is the fastest to {record.target}, by {chosen.samples:,.0f} samples at {rate:,.0f} samples/s. "
        f"{ran} of {total} trials ran, {spent / grid:.0%} of "
        f"the samples that the whole grid would take ({grid:,.0f}, mostly predicted)."
    ]
    noises = [r for r in guide.results(record.trials).values() if r.noise is not None]
    if noises:
        found.append(_noise_text(noises))
        found += _gain_text(guide, chosen, noises, optimizer=trial.optimizer)
    for left in guide.wanted_cells(record.trials)[:1]:
        arm = json.loads(left.arm)
        rule = f" with rule {arm[RULE]}" if RULE in arm else ""
        found.append(
            f"The budget of {guide.share:.0%} of the grid's samples ended the search; the next batch would have been "
            f"{left.batch_size}{rule}. --guided-share allows more."
        )
    far = [str(p.batch_size) for p in outlook.points if not p.is_trusted]
    if far:
        found.append(
            f"Goodput at batch {', '.join(far)} is uncertain: noise grows with the batch, and was not measured within "
            "a factor of 4 of it."
        )
    return found


def _noise_text(noises: list[Result]) -> str:
    known: dict[int, Estimate] = {}  # the most certain one at each batch size
    for result in sorted(noises, key=lambda r: r.cell.batch_size):
        size, noise = result.cell.batch_size, result.noise
        if noise is not None and (size not in known or noise.high - noise.low < known[size].high - known[size].low):
            known[size] = noise
    shown = [f"{_scale(n.value)} ({_scale(n.low)} to {_scale(n.high)}) at batch {size}" for size, n in known.items()]
    return f"Gradient noise scale over a training, in samples: {'; '.join(shown)}."


def _gain_text(guide: Guide, chosen: Result, noises: list[Result], *, optimizer: str) -> list[str]:
    """Learning rate that theory predicts at the chosen batch, if that is larger than the reference."""
    size = chosen.cell.batch_size
    nearest = min(noises, key=lambda r: abs(math.log(r.cell.batch_size / size)))
    kappa = size / guide.reference
    if kappa <= 1 or nearest.noise is None or math.isinf(nearest.noise.value):
        return []
    gain = adascale_gain(kappa, square=1.0, trace=nearest.noise.value / guide.reference)
    is_adam = optimizer in ("adamw", "lamb")
    factor = f"{math.sqrt(gain):.2f} x, its square root, for Adam" if is_adam else f"{gain:.2f} x"
    return [
        f"By AdaScale a step of batch {size} is worth {gain:.2f} of the reference's {guide.reference}, "
        f"and the learning rate should grow {factor}."
    ]


def _scale(value: float) -> str:
    return "beyond measure" if math.isinf(value) else f"{value:,.0f}"
