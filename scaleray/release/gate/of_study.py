"""Gates of a scaling study: is its largest number of workers efficient enough, and does a certificate prove that its
training equals that of one process? The other gates apply to trainings."""

import dataclasses
import shlex
import time
from collections.abc import Sequence

from scaleray.errors import UsageError
from scaleray.recording.find_record import FoundRun
from scaleray.records.gate_answer import Check, GateResult, gate_of, together
from scaleray.records.gates import GateRecord
from scaleray.records.study_record import Point, StudyRecord
from scaleray.release.gate.as_recorded import certificate_as_recorded, study_as_recorded
from scaleray.release.gates import data_fingerprint, equality, scaling
from scaleray.release.gates.environment import facts_of_environment, uses_gpus
from scaleray.release.gates.equality import NamedCertificate, Verified
from scaleray.release.gates.policy import Policy

OF_STUDY = (equality.GATE, scaling.GATE)


def evaluate_study(
    found: FoundRun,
    policy: Policy,
    certificates: Sequence[NamedCertificate],
    *,
    gates: Sequence[str],
    policy_name: str | None = None,
    uri: str | None = None,
) -> GateRecord:
    """Answers of the gates to a study. Raises UsageError if no requested gate applies to a study."""
    study = found.record
    assert isinstance(study, StudyRecord)
    asked = [gate for gate in OF_STUDY if gate in gates]
    if not asked:
        raise UsageError(
            "--gates",
            ",".join(gates),
            f"a study has only the gates {' and '.join(OF_STUDY)}",
            "for others, name a training RUN",
        )
    largest = _largest(study, policy)
    now = time.time()
    results = [
        _equality(study, largest, certificates, policy, now=now, uri=uri)
        if gate == equality.GATE
        else _scaling(study, largest, policy, uri=uri)
        for gate in asked
    ]
    where = str(found.folder or study.run_id or found.where)
    words = ["scaleray", "gate", where, *(["--policy", policy_name] if policy_name else [])]
    for one in certificates:
        words += ["--certificates", one.name]
    others = [gate for gate in gates if gate not in OF_STUDY]
    left_out = f"{', '.join(others)} apply to a training, not to a study: scaleray gate RUN --study {where}"
    return GateRecord(
        answer=together(result.answer for result in results),
        gates=[dataclasses.replace(one, command=shlex.join([*words, "--gates", one.gate])) for one in results],
        run=study.name,
        candidates=[found.where],
        baselines=[],
        policy=policy.model_dump(mode="json"),
        notes=[left_out] if others else [],
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now)),
    )


def _largest(study: StudyRecord, policy: Policy) -> Point:
    points = [one.point for curve in study.curves if curve.mode == policy.scaling.mode for one in curve.points]
    if not points:
        command = f"{study.command or 'scaleray study -c FILE'} --mode {policy.scaling.mode}"
        raise UsageError.problem(
            "The study",
            f"{study.name} has no curve of {policy.scaling.mode} scaling, which the policy requires (scaling.mode)",
            command,
        )
    return max(points, key=lambda point: point.workers)


def _scaling(study: StudyRecord, largest: Point, policy: Policy, *, uri: str | None) -> GateResult:
    result = scaling.scaling_gate(study, workers=largest.workers, policy=policy.scaling)
    checks: list[Check] = [*result.checks, study_as_recorded(study, uri)]
    states = {study.name: study.conditions.environment.get("git") or {}}
    return gate_of(scaling.GATE, [*checks, data_fingerprint.committed(states, policy.fingerprint)])


def _equality(
    study: StudyRecord,
    largest: Point,
    certificates: Sequence[NamedCertificate],
    policy: Policy,
    *,
    now: float,
    uri: str | None,
) -> GateResult:
    workers = study.conditions.topology.get("workers") or []
    measured = Verified(
        largest.strategy,
        largest.workers,
        study.config,
        facts_of_environment(study.conditions.environment, workers),
        study.folder,
        bool(workers) and not uses_gpus(workers),
    )
    return equality_of(measured, certificates, policy, now=now, uri=uri)


def equality_of(
    run: Verified, certificates: Sequence[NamedCertificate], policy: Policy, *, now: float, uri: str | None
) -> GateResult:
    """Gate `equality` for a kind of training, with a check that its certificate equals the recorded one."""
    may_differ = policy.fingerprint.may_differ
    result = equality.equality_gate(run, certificates, policy=policy.equality, may_differ=may_differ, now=now)
    chosen = equality.belonging(run, certificates, policy=policy.equality, may_differ=may_differ, now=now)
    if chosen is None:
        return result
    return gate_of(result.gate, [*result.checks, certificate_as_recorded(chosen, uri)])
