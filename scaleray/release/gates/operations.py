"""Gate `operations`: is each candidate safe to run unattended?"""

from collections.abc import Callable, Sequence

from scaleray.records.alert_record import Alert
from scaleray.records.gate_answer import Answer, Check, GateResult, gate_of
from scaleray.records.run_record import RunRecord
from scaleray.release.gates.confidence import Runs, above, power_above, runs_needed_above
from scaleray.release.gates.convergence import TRAIN_MORE
from scaleray.release.gates.policy import OperationsPolicy

GATE = "operations"
UNMEASURED = "not measured"


def operations_gate(
    runs: Sequence[RunRecord],
    alerts: Sequence[Sequence[Alert] | None] | None = None,
    *,
    policy: OperationsPolicy,
    endured: Sequence[RunRecord] = (),
) -> GateResult:
    """Checks of all candidates. alerts: content of each candidate's alerts.jsonl; None if it was not read. endured:
    further runs of the same training that were interrupted, resumed and finished."""
    checks = [_finished(runs)]
    if policy.max_nonfinite_steps is not None:
        checks.append(_at_most("steps that were not finite", runs, lambda run: float(run.nonfinite_steps),
                               policy.max_nonfinite_steps, "scaleray profile RUN"))  # fmt: skip
    if policy.min_goodput is not None:
        checks.append(_goodput(runs, policy.min_goodput))
    if policy.max_checkpoint_interval_s is not None:
        what, remedy = "s of training without a checkpoint, measured", "checkpoint.every in the config"
        checks.append(_at_most(what, runs, _without_checkpoint_s, policy.max_checkpoint_interval_s, remedy))
    if policy.min_faults_survived is not None:
        checks.append(_faults_survived([*runs, *endured], policy.min_faults_survived))
    if policy.min_memory_headroom is not None:
        remedy = "smaller batch.micro_size, or activations.checkpointing"
        checks.append(_at_least("memory left at the peak", runs, _headroom, policy.min_memory_headroom, remedy))
    if policy.no_alerts_of:
        checks.append(_alerts(runs, alerts or [None] * len(runs), policy.no_alerts_of))
    return gate_of(GATE, checks)


def faults_survived(run: RunRecord) -> int:
    """Number of times that a finished run resumed from a checkpoint after an interruption or lost workers."""
    if run.status != "FINISHED" or not run.resumed_after:
        return 0
    goodput = run.profile.goodput if run.profile else None  # counts the attempts of earlier processes too
    return max(len(run.resumed_after), goodput.attempts - 1 if goodput else 0)


def _finished(runs: Sequence[RunRecord]) -> Check:
    what = "every candidate has finished"
    bad = [f"{run.name} is {run.status}: {run.verdict}" for run in runs if run.status != "FINISHED"]
    if bad:
        return Check(what=what, answer="fail", words="; ".join(bad[:4]), numbers={"not finished": float(len(bad))})
    return Check(what=what, answer="pass", words=f"{len(runs)} of {len(runs)}")


def _goodput(runs: Sequence[RunRecord], least: float) -> Check:
    """Whether the candidates' mean goodput is above the limit, by an interval with 95 % at each end."""
    what, remedy = f"goodput above {least:g}", "scaleray profile RUN shows where it went"
    shares = [_goodput_of(run) for run in runs]
    values = [share for share in shares if share is not None]
    if missing := [run.name for run, share in zip(runs, shares, strict=True) if share is None]:
        words = f"{UNMEASURED} in {', '.join(missing[:4])}"
        return Check(what=what, answer="inconclusive", words=words, remedy=remedy)
    if len(values) < 2:
        words = f"{values[0]:.4g} in a single run, which does not show the spread between runs"
        return Check(what=what, answer="inconclusive", words=words, numbers={"goodput": values[0]}, runs_needed=2,
                     remedy=TRAIN_MORE)  # fmt: skip
    measured = Runs.of(values, are_successive=True)
    answer, low, high = above(measured, least)
    words = f"{measured.mean:.4g} ({low:.4g} to {high:.4g}) in {len(values)} runs"
    if answer == "inconclusive":
        words += f"; the interval contains {least:g}"
        remedy = TRAIN_MORE
    return Check(
        what=what, answer=answer, words=words, numbers={"goodput": measured.mean, "low": low, "high": high},
        power=power_above(measured, least), runs_needed=runs_needed_above(measured, least), needed_of="candidates",
        remedy="" if answer == "pass" else remedy,
    )  # fmt: skip


def _faults_survived(runs: Sequence[RunRecord], least: int) -> Check:
    what = f"faults survived at least {least}"
    survived = [(run.name, number) for run in runs if (number := faults_survived(run))]
    total = sum(number for _, number in survived)
    if total >= least:
        words = ", ".join(
            f"{name} resumed {'once' if number == 1 else f'{number} times'}" for name, number in survived[:4]
        )
        return Check(what=what, answer="pass", words=words, numbers={"survived": float(total)})
    words = f"{total} recorded: there is no evidence that the training survives a fault"
    remedy = "kill a training of the same config (kill -9) and resume it: scaleray train --resume RUN"
    return Check(what=what, answer="inconclusive", words=words, numbers={"survived": float(total)}, remedy=remedy)


def _alerts(runs: Sequence[RunRecord], alerts: Sequence[Sequence[Alert] | None], severities: Sequence[str]) -> Check:
    operated = list(zip(runs, alerts, strict=True))
    what = f"no alert that is {' or '.join(severities)}"
    if lacking := [name for run, own in operated for name in _not_in_the_file(run, own)]:
        words = f"alerts.jsonl lacks alerts of the record: {', '.join(lacking[:4])}"
        return Check(what=what, answer="fail", words=words, numbers={"lacking": float(len(lacking))})
    raised = [
        f"{alert.name} in {run.name}" for run, own in operated for alert in own or () if alert.severity in severities
    ]
    if raised:
        words = ", ".join(sorted(set(raised)))
        return Check(what=what, answer="fail", words=words, numbers={"alerts": float(len(raised))})
    if silent := [run.name for run, own in operated if own is None]:
        words = f"{', '.join(silent[:4])} have no record of alerts"
        return Check(what=what, answer="inconclusive", words=words)
    number = sum(len(own or ()) for own in alerts)
    return Check(what=what, answer="pass", words=f"{number} alerts in total, in {len(runs)} runs")


def _not_in_the_file(run: RunRecord, alerts: Sequence[Alert] | None) -> list[str]:
    """Alerts of the record that are missing or different in alerts.jsonl."""
    if alerts is None:
        return []
    there = {(alert.name, alert.severity, alert.since) for alert in alerts}
    return [
        f"{alert.get('name')} of {run.name}"
        for alert in run.alerts
        if (alert.get("name"), alert.get("severity"), alert.get("since")) not in there
    ]


def _goodput_of(run: RunRecord) -> float | None:
    return run.profile.goodput.shares().get("productive") if run.profile and run.profile.goodput else None


def _without_checkpoint_s(run: RunRecord) -> float | None:
    return run.profile.goodput.longest_without_checkpoint_s if run.profile and run.profile.goodput else None


def _headroom(run: RunRecord) -> float | None:
    """Share of free memory on the worker with the least of it; None if a capacity is unknown, as on CPUs."""
    left = [
        1 - peak / part["device_bytes"]
        for peak, part in zip(run.peak_memory_bytes, run.memory, strict=False)
        if part.get("device_bytes")
    ]
    return min(left) if left and len(left) == run.workers else None


Measure = Callable[[RunRecord], float | None]


def _at_least(what: str, runs: Sequence[RunRecord], measure: Measure, least: float, remedy: str) -> Check:
    return _worst(f"{what} at least {least:g}", runs, measure, min, lambda value: value >= least, remedy)


def _at_most(what: str, runs: Sequence[RunRecord], measure: Measure, most: float, remedy: str) -> Check:
    return _worst(f"{what} at most {most:g}", runs, measure, max, lambda value: value <= most, remedy)


def _worst(
    what: str,
    runs: Sequence[RunRecord],
    measure: Measure,
    worst: Callable[[list[float]], float],
    is_kept: Callable[[float], bool],
    remedy: str,
) -> Check:
    """Check of a limit for every candidate, with the worst value."""
    values = [(run.name, measure(run)) for run in runs]
    known = [value for _, value in values if value is not None]
    found = worst(known) if known else None
    if found is not None and not is_kept(found):
        names = ", ".join(name for name, value in values if value is not None and not is_kept(value))
        words = f"{found:.4g} ({names})"
        return Check(what=what, answer="fail", words=words, numbers={"value": found}, remedy=remedy)
    if len(known) < len(runs) or found is None:
        silent = ", ".join(name for name, value in values if value is None)
        return Check(what=what, answer="inconclusive", words=f"{UNMEASURED} in {silent}", remedy=remedy)
    answer: Answer = "pass"
    return Check(what=what, answer=answer, words=f"{found:.4g} at worst", numbers={"value": found})
