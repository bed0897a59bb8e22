"""The gate `operations`: the candidate ran as something may run that nobody watches all day."""

from __future__ import annotations

from collections.abc import Sequence

from scaleray.gates.answer import Answer, Check, GateResult, gate_of
from scaleray.gates.policy import OperationsPolicy
from scaleray.records.alerts import Alert
from scaleray.records.run import RunRecord

GATE = "operations"


def operations_gate(run: RunRecord, *, alerts: Sequence[Alert] | None, policy: OperationsPolicy) -> GateResult:
    """The gate's checks. alerts: those that the run raised; None: nobody looked."""
    finished: Answer = "pass" if run.status == "FINISHED" else "fail"
    checks = [Check(what="the run has finished", answer=finished, words=f"{run.status}: {run.verdict}")]
    if policy.max_nonfinite_steps is not None:
        steps = float(run.nonfinite_steps)
        checks.append(_at_most("steps that were not finite", steps, policy.max_nonfinite_steps, "scaleray profile RUN"))
    if policy.min_goodput is not None:
        goodput = run.profile.goodput.shares().get("productive") if run.profile and run.profile.goodput else None
        checks.append(_at_least("goodput", goodput, policy.min_goodput, "scaleray profile RUN says where it went"))
    if policy.max_checkpoint_interval_s is not None:
        remedy = "checkpoint.every_steps in the config"
        interval = _checkpoint_interval_s(run)
        checks.append(_at_most("s between checkpoints", interval, policy.max_checkpoint_interval_s, remedy))
    if policy.min_memory_headroom is not None:
        remedy = "smaller batch.micro_size, or activations.checkpoint"
        checks.append(_at_least("memory left at the peak", _headroom(run), policy.min_memory_headroom, remedy))
    if policy.no_alerts_of:
        checks.append(_alerts(alerts, policy.no_alerts_of))
    return gate_of(GATE, checks)


def _alerts(alerts: Sequence[Alert] | None, severities: Sequence[str]) -> Check:
    what = f"no alert that is {' or '.join(severities)}"
    if alerts is None:
        return Check(what=what, answer="inconclusive", words="the run recorded no alerts")
    found = [alert.name for alert in alerts if alert.severity in severities]
    if found:
        return Check(what=what, answer="fail", words=", ".join(sorted(set(found))), numbers={"alerts": len(found)})
    return Check(what=what, answer="pass", words=f"{len(alerts)} alerts in all")


def _checkpoint_interval_s(run: RunRecord) -> float | None:
    steps = run.derived.get("checkpoint_every_steps")
    return steps * run.step_time_s if steps and run.step_time_s else None


def _headroom(run: RunRecord) -> float | None:
    """Share of the memory that was left on the worker with least; None where a capacity is not known, as on CPUs."""
    left = [
        1 - peak / part["device_bytes"]
        for peak, part in zip(run.peak_memory_bytes, run.memory, strict=False)
        if part.get("device_bytes")
    ]
    return min(left) if left and len(left) == run.workers else None


def _at_least(what: str, value: float | None, least: float, remedy: str) -> Check:
    return _limit(f"{what} at least {least:g}", value, value is not None and value >= least, remedy)


def _at_most(what: str, value: float | None, most: float, remedy: str) -> Check:
    return _limit(f"{what} at most {most:g}", value, value is not None and value <= most, remedy)


def _limit(what: str, value: float | None, is_kept: bool, remedy: str) -> Check:
    if value is None:
        return Check(what=what, answer="inconclusive", words="the run did not measure it", remedy=remedy)
    answer: Answer = "pass" if is_kept else "fail"
    return Check(
        what=what, answer=answer, words=f"{value:.4g}", numbers={"value": value}, remedy="" if is_kept else remedy
    )
