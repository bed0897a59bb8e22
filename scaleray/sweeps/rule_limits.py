"""Batch size at which each learning-rate rule of a sweep stopped holding, compared with theory."""

from scaleray.records.sweep_record import SweepRecord
from scaleray.records.text.study_sweep_tables import Table
from scaleray.sweeps.result import RuleRange, find_knee, rule_range, theory


def rule_limits(record: SweepRecord) -> dict[str, RuleRange]:
    """Batch sizes at which each rule reached the target, from the reference up; empty if the reference is unknown."""
    reference = record.reference_batch_size
    if reference is None or not any(trial.samples_to_target is not None for trial in record.trials):
        return {}
    found = {
        rule: rule_range(record, rule, reference_batch_size=reference)
        for rule in dict.fromkeys(t.rule for t in record.trials)
    }
    return {rule: limit for rule, limit in found.items() if limit.num_sizes}


def ended_at(limit: RuleRange | None) -> int | None:
    """First batch size at which a rule is not allowed, or its trials ran to their end without reaching the target."""
    ends = [] if limit is None else [size for size in (limit.missed_at, limit.refused_at) if size is not None]
    return min(ends, default=None)


def rule_table(record: SweepRecord) -> Table:
    """Table with one row per rule."""
    reference, knee = record.reference_batch_size, find_knee(record)
    rows = []
    for rule, limit in rule_limits(record).items():
        held = "no batch size" if limit.held_up_to is None else f"{limit.held_up_to}"
        rows.append((rule, held, _ending(limit), f"{theory(record, rule, knee, reference or 0)}."))
    columns = ("rule", "reached the target up to batch", "what ended it", "in theory")
    return Table("Where each rule stopped holding", columns, tuple(rows))


def _ending(limit: RuleRange) -> str:
    found = []
    if limit.missed_at is not None:
        found.append(f"missed the target at {limit.missed_at}")
    if limit.stopped_at is not None:
        found.append(f"stopped by the scheduler at {limit.stopped_at}, before a result")
    if limit.refused_at is not None:
        found.append(f"does not exist from {limit.refused_at} up")
    return "; ".join(found) or "held up to the largest batch tried"
