"""Evaluate the gates of a training, with an answer for each and one for all."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.errors import ConfigError, UsageError
from scaleray.launch.session.conditions import digest, training_of
from scaleray.recording.find_record import FoundRun, find_run
from scaleray.records.gate_answer import Check, GateResult, gate_of, together
from scaleray.records.gates import GateRecord
from scaleray.records.study_record import StudyRecord
from scaleray.release.gate.as_recorded import runs_as_recorded, study_as_recorded
from scaleray.release.gate.evidence import Evidence, alerts_of, certificates_for, collect, learning, target_of, training
from scaleray.release.gate.of_promoted import OF_PROMOTED, evaluate_promoted, registered
from scaleray.release.gate.of_study import equality_of, evaluate_study
from scaleray.release.gate.policy_file import read_policy
from scaleray.release.gates import convergence, data_fingerprint, equality, operations, scaling
from scaleray.release.gates.environment import facts_of_environment, facts_of_run, unlike
from scaleray.release.gates.policy import Policy

GATES = (data_fingerprint.GATE, equality.GATE, scaling.GATE, convergence.GATE, operations.GATE)
"""Gates in the order of evaluation."""


def gate(
    *runs: str | Path,
    against: str | Path | Sequence[str | Path] = (),
    policy: str | Path | Mapping[str, Any] | None = None,
    study: str | None = None,
    certificates: Sequence[str | Path] = (),
    gates: Sequence[str] | None = None,
    days: float | None = None,
    uri: str | None = None,
) -> GateRecord:
    """Evaluate whether a training may go into production: `.answer` is pass, fail or inconclusive, `.gates` has the
    details.

    runs: the candidate, and runs that repeat it with other seeds: folders, names in the storage path, or ids or names
    in MLflow at `uri`; or one scaling study, which has its own gates. against: runs of the baseline. policy: a YAML
    file, or its sections as a mapping. study: a scaling study of the candidate's training. certificates: folders of
    `verify`. gates: names of the gates to evaluate; None: all.

    against may be one registered version, `NAME@ALIAS` or `models:/NAME/VERSION`. The gates are then `speed`,
    `convergence` and `data`, by the evidence stored at its promotion and its policy, or `policy`. If no runs are given,
    the gates evaluate runs of its experiment in MLflow that have the same training, began after its promotion and
    within the last `days` (8), and have finished or failed.

    Raises ConfigError for an unknown policy key or gate, TrackingError for a run that does not exist."""
    names, facts = [str(run) for run in runs], [str(one) for one in certificates]
    baselines = [str(run) for run in ([against] if isinstance(against, str | Path) else against)]
    version = registered(baselines)
    if version is not None:
        if study or facts:
            option = "--study" if study else "--certificates"
            raise UsageError.problem(
                option,
                f"has no effect with a registered version, whose gates are {', '.join(OF_PROMOTED)}",
                "omit it, or name runs with --against",
            )
        return evaluate_promoted(names, version, days=days, policy=policy, gates=gates, uri=uri)
    if days is not None:
        raise UsageError.problem("--days", "requires a registered version", "--against NAME@ALIAS")
    if not names:
        raise UsageError.problem("Give", "the RUN of a training or a study", "scaleray gate RUN --against BASELINE")
    gates = GATES if gates is None else gates
    for name in gates:
        if name not in GATES:
            raise ConfigError("--gates", name, f"it must be one of {', '.join(GATES)}")
    held = read_policy(policy)
    first = find_run(names[0], uri=uri)
    if isinstance(first.record, StudyRecord) and len(names) == 1:
        if baselines or study:
            raise UsageError.problem(
                "RUN",
                f"{names[0]} is a study, for which --against and --study are not allowed",
                "give a training as RUN, and the study with --study",
            )
        named = str(policy) if isinstance(policy, (str, Path)) else None
        return evaluate_study(first, held, certificates_for(first, facts), gates=gates, policy_name=named, uri=uri)
    evidence = collect([first, *names[1:]], against=baselines, study=study, certificates=facts, uri=uri)
    record = evaluate_evidence(evidence, held, gates=gates, uri=uri)
    asked_again = [
        dataclasses.replace(result, command=_command(evidence, policy, study, result.gate)) for result in record.gates
    ]
    return dataclasses.replace(record, gates=asked_again)


def evaluate_evidence(
    evidence: Evidence,
    policy: Policy,
    *,
    gates: Sequence[str] = GATES,
    now: float | None = None,
    uri: str | None = None,
) -> GateRecord:
    """Answers of the gates to this evidence. now: time in seconds since 1970 for a certificate's age, by default the
    current time. uri: MLflow server with which records are compared if their original one does not exist."""
    moment = time.time() if now is None else now
    asked: dict[str, Callable[[Evidence, Policy], GateResult]] = {
        data_fingerprint.GATE: functools.partial(_fingerprint, uri=uri),
        equality.GATE: functools.partial(_equality, now=moment, uri=uri),
        scaling.GATE: functools.partial(_scaling, uri=uri),
        convergence.GATE: _convergence,
        operations.GATE: _operations,
    }
    results = [filled(asked[name](evidence, policy), evidence) for name in GATES if name in gates]
    return GateRecord(
        answer=together(result.answer for result in results),
        gates=results,
        run=evidence.run.name,
        candidates=[one.where for one in evidence.candidates],
        baselines=[one.where for one in evidence.baselines],
        policy=policy.model_dump(mode="json"),
        notes=evidence.notes,
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(moment)),
    )


def filled(result: GateResult, evidence: Evidence) -> GateResult:
    """A gate's answer with complete commands as remedies."""
    run = evidence.run
    seeds = [training(one).config.get("seed") for one in (*evidence.candidates, *evidence.baselines)]
    following = max((seed for seed in seeds if isinstance(seed, int)), default=0) + 1
    words = {"-c FILE": f"-c {shlex.quote(f'{run.run_dir}/config.yaml')}", "--seed N": f"--seed {following}",
             " RUN ": f" {shlex.quote(_name(evidence.candidates[0]))} "}  # fmt: skip
    checks = []
    for check in result.checks:
        remedy = f"{check.remedy} "  # a word at the end is one too
        for placeholder, text in words.items():
            remedy = remedy.replace(placeholder, text)
        checks.append(dataclasses.replace(check, remedy=remedy.rstrip()))
    return dataclasses.replace(result, checks=checks)


def _command(evidence: Evidence, policy: str | Path | Mapping[str, Any] | None, study: str | None, gate: str) -> str:
    """The command that evaluates one gate again on the same evidence."""
    words = ["scaleray", "gate", *(_name(one) for one in evidence.candidates)]
    if evidence.baselines:
        words += ["--against", *(_name(one) for one in evidence.baselines)]
    words += ["--policy", str(policy)] if isinstance(policy, (str, Path)) else []
    if evidence.study is not None:
        words += ["--study", study or evidence.study.folder]
    for certificate in evidence.certificates:
        words += ["--certificates", certificate.name]
    return shlex.join([*words, "--gates", gate])


def _name(found: FoundRun) -> str:
    return str(found.folder or training(found).run_id or found.where)


def _fingerprint(evidence: Evidence, policy: Policy, *, uri: str | None) -> GateResult:
    runs = [[training(one) for one in side] for side in (evidence.candidates, evidence.baselines)]
    result = data_fingerprint.fingerprint_gate(runs[0], runs[1], policy=policy.fingerprint)
    return gate_of(result.gate, [*result.checks, runs_as_recorded(evidence, uri)])


def _equality(evidence: Evidence, policy: Policy, *, now: float, uri: str | None) -> GateResult:
    return equality_of(equality.Verified.of_run(evidence.run), evidence.certificates, policy, now=now, uri=uri)


def _scaling(evidence: Evidence, policy: Policy, *, uri: str | None) -> GateResult:
    run, study = evidence.run, evidence.study
    result = scaling.scaling_gate(study, workers=run.workers, policy=policy.scaling)
    if study is None or run.workers == 1:
        return result
    checks = [*result.checks, study_as_recorded(study, uri)]
    theirs = facts_of_environment(study.conditions.environment, study.conditions.topology.get("workers") or ())
    differs = unlike(theirs, facts_of_run(run), policy.fingerprint.may_differ)
    if study.conditions.config_hash != digest(training_of(run.config)):
        differs.insert(0, "its config defines a different training")
    what = "the study is of this training, code and environment"
    if differs:
        remedy = f"scaleray study -c {shlex.quote(f'{run.run_dir}/config.yaml')}"
        words = f"study {study.name}: {'; '.join(differs[:3])}"
        return gate_of(result.gate, [*checks, Check(what=what, answer="inconclusive", words=words, remedy=remedy)])
    return gate_of(result.gate, [*checks, Check(what=what, answer="pass", words=study.name)])


def _convergence(evidence: Evidence, policy: Policy) -> GateResult:
    target = policy.convergence.target or target_of(evidence.run)
    sides = [
        [learning(one, target, policy.convergence.metric_name) for one in side]
        for side in (evidence.candidates, evidence.baselines)
    ]
    return convergence.convergence_gate(sides[0], sides[1], target=target, policy=policy.convergence)


def _operations(evidence: Evidence, policy: Policy) -> GateResult:
    runs, endured = ([training(one) for one in side] for side in (evidence.candidates, evidence.endured))
    alerts = [alerts_of(one) for one in evidence.candidates]
    return operations.operations_gate(runs, alerts, policy=policy.operations, endured=endured)
