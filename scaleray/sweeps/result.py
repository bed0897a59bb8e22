"""Result of a sweep in sentences: the fastest and the cheapest batch size, the knee, and the limit of each rule.

The value of a setting is the median over its seeds. Steps and samples to the target at several batch sizes give the
critical batch size, at which both are twice their minimum (McCandlish et al. 2018, arXiv:1812.06162, equation 2.11);
this is the knee.
"""

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence

from scaleray.common.printed import quantity
from scaleray.records.settings import Setting, best, best_by_batch, one_training, settings, trained
from scaleray.records.sweep_record import SweepRecord, Trial
from scaleray.sweeps.search_space import to_text
from scaleray.training.noise.statistical_efficiency import fit_trade_off

NOT_STARTED, FAILED, DIVERGED, STOPPED = "never fits", "failed", "diverged", "stopped early"
COARSE = 0.2  # evaluations further apart than this share of the way to the target are too coarse
MOST_SHARED = 4  # most trainings that are named


@dataclasses.dataclass(frozen=True)
class Knee:
    """Critical batch size of the trials, which may be `below`, `within` or `above` the sizes that reached the
    target."""

    batch_size: float
    smallest: int
    largest: int

    @property
    def where(self) -> str:
        if self.batch_size < self.smallest:
            return "below"
        return "above" if self.batch_size > self.largest else "within"


@dataclasses.dataclass(frozen=True)
class RuleRange:
    """Batch sizes, from the reference up, at which a rule reached the target.

    held_up_to: largest batch size before the first one that did not reach it. missed_at: that first size, if its trials
    ran to their end. stopped_at: that first size, if a scheduler stopped its trials before a result. refused_at: first
    batch size that the rule itself does not allow.
    """

    rule: str
    held_up_to: int | None
    missed_at: int | None
    stopped_at: int | None
    refused_at: int | None
    num_sizes: int


def with_common_target(record: SweepRecord) -> SweepRecord:
    """Add a target to a record without one: the median of the final values, which half of the trials reached.

    A record that has a target, or has no curves, is returned unchanged.
    """
    finals = [t.value for t in trained(record) if t.value is not None and math.isfinite(t.value)]
    if record.target is not None or len(finals) < 2:
        return record
    comparison = "<=" if record.direction == "min" else ">="
    value = _rounded(statistics.median(finals), up=record.direction == "min")
    trials = [_reaching(t, value, direction=record.direction) for t in record.trials]
    target = f"{record.metric} {comparison} {value:g}"
    return dataclasses.replace(record, trials=trials, target=target)


def sentences(record: SweepRecord, *, has_own_target: bool, reference_batch_size: int) -> list[str]:
    """Result of a sweep in sentences. has_own_target: whether the config has a target; otherwise `with_common_target`
    chose it."""
    found: list[str] = []
    if record.target is not None and not has_own_target:
        found.append(
            f"No target was given, so trials are compared at {record.target}, which half of them reached; "
            "set stop.at to choose one."
        )
    tried = settings(record)
    reached = [setting for setting in tried if setting.samples_to_target is not None]
    if reached:
        found += _choices(record, reached, reference_batch_size)
    elif tried:
        found.append(_never_reached(record, tried, reference_batch_size))
    knee = find_knee(record)
    if knee is not None:
        found.append(_knee_text(knee))
    if record.asked_sizes:
        pairs = (
            f"{samples} {'samples' if samples > 1 else 'sample'} are {size} tokens"
            for size, samples in record.asked_sizes.items()
        )
        found.append(f"Batches are counted in samples here, as averages if rows differ in length: {', '.join(pairs)}.")
    if reached:
        found += rule_sentences(record, reference_batch_size=reference_batch_size)
        found += _resolution(record, reached)
    return [*found, *_shared(record), *_problems(record)]


def rule_sentences(record: SweepRecord, *, reference_batch_size: int) -> list[str]:
    """One sentence for each rule: the batch size at which it stopped holding, and the prediction of theory."""
    knee = find_knee(record)
    ranges = [rule_range(record, rule, reference_batch_size=reference_batch_size) for rule in _rules(record)]
    return [_rule_text(record, each, knee, reference_batch_size) for each in ranges if each.num_sizes]


def find_knee(record: SweepRecord) -> Knee | None:
    """Critical batch size of the best setting at each batch size; None if fewer than two sizes reached the target."""
    best_of: dict[int, Setting] = {}
    for batches in best_by_batch(record).values():
        for size, setting in batches.items():
            if setting.samples_to_target is not None:
                kept = best([setting, *([best_of[size]] if size in best_of else [])], record.direction)
                assert kept is not None
                best_of[size] = kept
    sizes = sorted(best_of)
    steps = [float(best_of[size].samples_to_target or 0) / size for size in sizes]
    fit = fit_trade_off(sizes, steps)
    return Knee(fit.critical_batch_size, sizes[0], sizes[-1]) if fit is not None else None


def rule_range(record: SweepRecord, rule: str, *, reference_batch_size: int) -> RuleRange:
    """Contiguous range of batch sizes at which a rule held, from the smallest that is at least the reference."""
    batches = best_by_batch(record).get(rule, {})
    own = [t for t in record.trials if t.rule == rule and t.batch_size >= reference_batch_size]
    held = {size for size, setting in batches.items() if setting.samples_to_target is not None}
    sizes = sorted({t.batch_size for t in own if t.status != NOT_STARTED})
    first = next((size for size in sizes if size not in held), None)
    is_stopped = any(t.batch_size == first and t.status == STOPPED for t in own)
    refused = [t.batch_size for t in own if t.status == NOT_STARTED and "optimizer.rule" in t.error]
    return RuleRange(
        rule,
        held_up_to=max((size for size in sizes if first is None or size < first), default=None),
        missed_at=None if is_stopped else first,
        stopped_at=first if is_stopped else None,
        refused_at=min(refused, default=None),
        num_sizes=len(sizes) + len(refused),
    )


def common_causes(trials: Sequence[Trial]) -> list[tuple[str, int]]:
    """First lines of the trials' errors with their counts, most frequent first."""
    return Counter(_first_line(t.error) for t in trials if t.status in (FAILED, DIVERGED)).most_common()


def _rules(record: SweepRecord) -> list[str]:
    return list(dict.fromkeys(t.rule for t in record.trials))


def _choices(record: SweepRecord, reached: list[Setting], reference: int) -> list[str]:
    workers = reached[0].trials[0].workers

    def time_s(setting: Setting) -> float:
        return math.inf if setting.time_to_target_s is None else setting.time_to_target_s

    cheapest = min(reached, key=lambda s: (s.samples_to_target or math.inf, time_s(s)))
    fastest = min(reached, key=time_s)
    on = f"on {quantity(workers, 'worker')}"
    first = (
        f"{_named(fastest, reference)} reached {record.target} after {time_s(fastest):.3g} s of training {on}, "
        f"with {fastest.samples_to_target:,.0f} samples."
    )
    factor = (fastest.samples_to_target or 0) / (cheapest.samples_to_target or 1)
    if cheapest is fastest or factor <= 1:
        return [f"Fastest and cheapest: {first}"]
    return [
        f"Fastest: {first}",
        f"Cheapest: {_named(cheapest, reference)} reached it with {cheapest.samples_to_target:,.0f} samples, after "
        f"{time_s(cheapest):.3g} s; the fastest needs {factor:.3g} x as many samples.",
    ]


def _resolution(record: SweepRecord, reached: list[Setting]) -> list[str]:
    """Sentence on the distance between two evaluations, if it is too coarse for a comparison."""
    apart = [after - before for t in trained(record) for (before, *_), (after, *_) in itertools.pairwise(t.curve)]
    way = statistics.median(s.samples_to_target or 0 for s in reached)
    if not apart or not way or statistics.median(apart) <= COARSE * way:
        return []
    share = statistics.median(apart) / way
    return [
        f"Evaluations are {statistics.median(apart):,.0f} samples apart, {share:.0%} of the median way to the target, "
        f"which limits the precision; evaluate more often (evaluation.every) to tell settings apart."
    ]


def _never_reached(record: SweepRecord, tried: list[Setting], reference: int) -> str:
    closest = best([s for s in tried if s.value is not None], record.direction)
    text = f"No setting reached {record.target}" if record.target else "No trial has a value to compare"
    if closest is None:
        return f"{text}."
    return (
        f"{text} in more than half of its trials; the closest, {_named(closest, reference)}, "
        f"ended at {closest.value:.4g}. "
        "Train longer (stop.after), choose an easier target (stop.at), or try other learning rates."
    )


def _knee_text(knee: Knee) -> str:
    sizes = f"{knee.smallest} to {knee.largest}"
    if knee.where == "within":
        return (
            f"The knee is at a batch of about {knee.batch_size:,.0f}: there, steps and samples to the target are "
            f"both twice their minimum; larger batches save few steps, smaller ones few samples."
        )
    if knee.where == "above":
        return (
            f"The knee lies above {sizes}: each doubling so far nearly halves the steps; larger batches are worth a "
            f"try."
        )
    return f"The knee lies below {sizes}: even the smallest batch takes twice the samples that the target needs."


def _rule_text(record: SweepRecord, found: RuleRange, knee: Knee | None, reference: int) -> str:
    if found.missed_at is None and found.stopped_at is None:
        held = f"held at every batch size tried, up to {found.held_up_to}" if found.held_up_to else "was not tried"
    elif found.held_up_to is None:
        held = f"missed the target at {found.missed_at}, the smallest batch tried from the reference up"
    else:
        held = f"held up to {found.held_up_to} and missed the target at {found.missed_at}"
    if found.stopped_at is not None:
        start = f"held up to {found.held_up_to}; " if found.held_up_to else ""
        held = f"{start}at {found.stopped_at} the scheduler stopped its trials before a result"
    if found.refused_at is not None:
        held += f"; it does not exist from {found.refused_at} up"
    return f"Rule {found.rule} {held}. In theory {theory(record, found.rule, knee, reference)}."


def theory(record: SweepRecord, rule: str, knee: Knee | None, reference: int) -> str:
    """Predicted range of a rule, as the end of a sentence. reference: batch size for which the learning rate was
    tuned."""
    critical = "the critical batch size"
    if knee is not None:
        where = {"within": "about", "above": "above", "below": "below"}[knee.where]
        size = {"within": knee.batch_size, "above": knee.largest, "below": knee.smallest}[knee.where]
        critical += f" ({where} {size:,.0f} in these trials)"
    if rule == "adam":
        betas = record.config.get("optimizer", {}).get("betas", (0.9, 0.999))
        largest = 1 / (1 - min(betas))
        return (
            f"it exists below {largest:.4g} x the reference, a batch of {largest * reference:,.0f}, "
            "while noise dominates"
        )
    return {
        "linear": f"it holds for SGD well below {critical}",
        "sqrt": f"it keeps the noise level of Adam while noise dominates, which is up to {critical}",
        "legw": f"it is a square root with a warm-up that grows with the batch, and holds for batches up to {critical}",
        "none": "the learning rate is too small for a larger batch, so samples to the target grow with it",
    }.get(rule, f"it holds up to {critical}")


def _shared(record: SweepRecord) -> list[str]:
    groups = [group for group in one_training(record) if len({t.rule for t in group}) > 1]
    if not groups:
        return []
    names = dict.fromkeys(
        f"batch {group[0].batch_size}, learning rate {group[0].learning_rate:.3g} "
        f"({', '.join(dict.fromkeys(t.rule for t in group))})"
        for group in groups
    )
    shown = "; ".join(list(names)[:MOST_SHARED])
    more = f"; and {len(names) - MOST_SHARED} more" if len(names) > MOST_SHARED else ""
    return [f"Some rules give the same training, which ran once and counts for each: {shown}{more}."]


def _problems(record: SweepRecord) -> list[str]:
    found = []
    refused = [t for t in record.trials if t.status == NOT_STARTED]
    for cause, number in Counter(_first_line(t.error) for t in refused).most_common(3):
        found.append(f"Not started: {number} of {len(record.trials)}, as {cause}")
    for cause, number in common_causes(record.trials)[:3]:
        found.append(f"Failed: {number} of {len(record.trials)}: {cause}")
    return found


def _named(setting: Setting, reference: int) -> str:
    rule = "the reference, where all rules agree" if setting.batch_size == reference else f"rule {setting.rule}"
    warmup = f", warm-up {setting.warmup}" if setting.warmup and not setting.warmup.startswith("0 ") else ""
    others = to_text(setting.trials[0].settings)
    more = f"{rule}{warmup}{f', {others}' if others else ''}"
    return f"batch {setting.batch_size} with {setting.optimizer}, learning rate {setting.learning_rate:.3g} ({more})"


def _reaching(trial: Trial, value: float, *, direction: str) -> Trial:
    sign = 1 if direction == "min" else -1
    hit = next(((n, s) for n, s, v in trial.curve if sign * v <= sign * value), None)
    if hit is None:
        return trial
    return dataclasses.replace(trial, samples_to_target=hit[0], time_to_target_s=hit[1])


def _rounded(value: float, *, up: bool) -> float:
    """The value rounded to three digits, up or down, towards the side that is easier to reach."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return float(f"{(math.ceil if up else math.floor)(value / unit) * unit:.6g}")


def _first_line(error: str) -> str:
    return (error.strip().splitlines() or ["no reason given"])[0]
