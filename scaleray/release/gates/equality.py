"""Gate `equality`: does a certificate of `scaleray verify` show that the candidate's kind of training equals that of
one process, for this config, number of workers and environment?"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scaleray.common.printed import quantity
from scaleray.config.decides import Decides, decides
from scaleray.records.certificate import EqualityCertificate
from scaleray.records.gate_answer import Answer, Check, GateResult, gate_of
from scaleray.records.json_record import jsonable, leaves
from scaleray.records.run_record import RunRecord
from scaleray.release.gates.environment import facts_of_environment, facts_of_run, unlike, uses_gpus, workers_of
from scaleray.release.gates.policy import EqualityPolicy

GATE = "equality"
DAY_S = 86400.0
NOT_OF_THE_STEP = ("seed", "stop.", "schedule.", "evaluation.")
"""Keys of a training's length or random seed, on which the equality of a step does not depend."""


@dataclass(frozen=True)
class NamedCertificate:
    """A certificate, its folder, and the SHA-256 of its file, which MLflow also has."""

    record: EqualityCertificate
    name: str
    sha256: str = ""


@dataclass(frozen=True)
class Verified:
    """Required subject of a certificate: the kind of training of a run or a study. facts: facts about code and
    environment. folder: folder with its config.yaml.
    """

    strategy: str
    workers: int
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    folder: str
    is_on_cpus: bool

    @classmethod
    def of_run(cls, run: RunRecord) -> Verified:
        """The training of a run."""
        workers = workers_of(run)
        is_on_cpus = bool(workers) and not uses_gpus(workers)
        return cls(run.strategy, run.workers, run.config, facts_of_run(run), run.run_dir, is_on_cpus)


def equality_gate(
    run: Verified,
    certificates: Sequence[NamedCertificate],
    *,
    policy: EqualityPolicy,
    may_differ: Sequence[str] = (),
    now: float | None = None,
) -> GateResult:
    """The gate's check, with the best matching certificate. now: seconds since 1970, by default the current time."""
    what = f"{run.strategy} on {quantity(run.workers, 'worker')} equals one process"
    config = shlex.quote(f"{run.folder}/config.yaml")
    remedy = f"scaleray verify -c {config} --strategies {run.strategy} --world-sizes {run.workers}"
    if run.workers == 1:
        return gate_of(GATE, [Check(what=what, answer="pass", words="one worker equals one process")])
    if not certificates:
        words = "there is no certificate"
        return gate_of(GATE, [Check(what=what, answer="inconclusive", words=words, remedy=remedy)])
    moment = time.time() if now is None else now
    chosen = belonging(run, certificates, policy=policy, may_differ=may_differ, now=moment)
    if chosen is None:
        reasons = {one.name: _why_not(one.record, run, policy, may_differ, moment) for one in certificates}
        name, why = min(reasons.items(), key=lambda item: len(item[1]))
        words = f"none of {len(certificates)} certificates matches. {name}: {'; '.join(why[:3])}"
        return gate_of(GATE, [Check(what=what, answer="inconclusive", words=words, remedy=remedy)])
    record = chosen.record
    answer: Answer = "pass" if record.passed else "fail"
    numbers = {"bound": record.bound, "age in days": (moment - record.written_at) / DAY_S}
    words, remedy = f"{chosen.name}: {record.verdict}", "" if record.passed else remedy
    return gate_of(GATE, [Check(what=what, answer=answer, words=words, numbers=numbers, remedy=remedy)])


def belonging(
    run: Verified,
    certificates: Sequence[NamedCertificate],
    *,
    policy: EqualityPolicy,
    may_differ: Sequence[str],
    now: float,
) -> NamedCertificate | None:
    """The newest valid certificate for this training; None for one worker, which needs no certificate."""
    if run.workers == 1:
        return None
    newest_first = sorted(certificates, key=lambda one: -one.record.written_at)
    return next((one for one in newest_first if not _why_not(one.record, run, policy, may_differ, now)), None)


def _why_not(
    one: EqualityCertificate, run: Verified, policy: EqualityPolicy, may_differ: Sequence[str], now: float
) -> list[str]:
    """Reasons against a certificate; empty if it is valid."""
    reasons = []
    if run.strategy not in one.strategies:
        reasons.append(f"it is of {', '.join(one.strategies)}")
    if run.workers not in one.world_sizes:
        reasons.append(f"it is of {', '.join(map(str, one.world_sizes))} workers")
    if one.bound > policy.max_bound:
        reasons.append(f"its bound {one.bound:g} is above equality.max_bound {policy.max_bound:g}")
    age = (now - one.written_at) / DAY_S
    if policy.max_age_days is not None and age > policy.max_age_days:
        reasons.append(f"it is {age:.0f} days old, above equality.max_age_days {policy.max_age_days:g}")
    reasons += unlike(_trained(one.config), _trained(run.config), may_differ)
    # where nothing is known of its workers, GPUs of the machine that asked for it are no part of a run on CPUs
    workers = one.workers or ([{"device": "cpu"}] if run.is_on_cpus else [])
    theirs = facts_of_environment(one.environment, workers)
    return reasons + unlike(theirs, run.facts, may_differ)


def _trained(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"config.{key}": value
        for key, value in leaves(jsonable(config))
        if decides(key) is Decides.RESULT and not key.startswith(NOT_OF_THE_STEP)
    }
