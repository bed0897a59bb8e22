"""The gate `fingerprint`: candidate and baseline are the same code on the same data in the same kind of environment.

Keys of the config that differ are named and not judged: to train on more workers is to change some of them. Only what
the training is of, the workload and its data, has to be the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scaleray.config.decides import Decides, decides
from scaleray.gates.answer import Answer, Check, GateResult, gate_of
from scaleray.gates.policy import FingerprintPolicy
from scaleray.records.json_record import jsonable, leaves
from scaleray.records.run import RunRecord

GATE = "fingerprint"
MISSING = "missing"
OF_THE_TRAINING = ("workload.", "data.")
"""Sections of the config that must be the same."""
ABOUT_FILES = ("rows", "bytes", "sha256", "hashed", "tokens")
"""Facts of a split that say which data it is; others say how it was read."""


def fingerprint_gate(
    candidates: Sequence[RunRecord], baselines: Sequence[RunRecord], *, policy: FingerprintPolicy
) -> GateResult:
    """The gate's checks: code, environment, data, and what is trained."""
    if not candidates or not baselines:
        missing = "baseline" if candidates else "candidate"
        words = f"there is no {missing} to compare with"
        remedy = f"scaleray gate RUN --against {missing.upper()}"
        return gate_of(GATE, [Check(what="the same everything", answer="inconclusive", words=words, remedy=remedy)])
    runs = [*candidates, *baselines]
    parts = {"code": _code, "environment": _environment, "data": _data, "config": _trained}
    checks = [_alike(name, [facts(run) for run in runs], runs, policy.may_differ) for name, facts in parts.items()]
    return gate_of(GATE, [*checks, _committed(runs, policy)])


def facts_of_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Code and environment as `reproducibility.fingerprint.environment` took them, as dotted keys."""
    found = {}
    for key, value in leaves(jsonable(environment)):
        section = "code" if key.startswith("git.") else "environment"
        found[f"{section}.{key.removeprefix('git.')}"] = value
    return found


def unlike(here: Mapping[str, Any], there: Mapping[str, Any], may_differ: Sequence[str]) -> list[str]:
    """Keys whose values differ, in words; those that may differ are left out."""
    keys = sorted({*here, *there})
    return [
        f"{key} is {here.get(key, MISSING)} and {there.get(key, MISSING)}"
        for key in keys
        if here.get(key) != there.get(key) and not key.startswith(tuple(may_differ))
    ]


def _alike(
    name: str, facts: Sequence[Mapping[str, Any]], runs: Sequence[RunRecord], may_differ: Sequence[str]
) -> Check:
    what = f"the same {name}"
    if unknown := [run.name for run, known in zip(runs, facts, strict=True) if not known]:
        words = f"{', '.join(unknown)} recorded nothing of it"
        return Check(what=what, answer="inconclusive", words=words)
    for run, known in zip(runs[1:], facts[1:], strict=True):
        if found := unlike(facts[0], known, may_differ):
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            words = f"{runs[0].name} and {run.name} differ: {'; '.join(found[:4])}{more}"
            remedy = f"fingerprint.may_differ in the policy, or train both alike: scaleray compare {run.name} ..."
            return Check(what=what, answer="fail", words=words, numbers={"differences": len(found)}, remedy=remedy)
    return Check(what=what, answer="pass", words=f"{len(runs)} runs, {len(facts[0])} facts")


def _committed(runs: Sequence[RunRecord], policy: FingerprintPolicy) -> Check:
    what = "code that a commit holds"
    states = [(run.environment.get("environment") or {}).get("git") or {} for run in runs]
    if unknown := [run.name for run, git in zip(runs, states, strict=True) if git.get("is_dirty") is None]:
        words = f"it is not known of {', '.join(unknown)}"
        answer: Answer = "pass" if policy.allow_uncommitted else "inconclusive"
        return Check(what=what, answer=answer, words=words, remedy="train in a checkout")
    if (dirty := [run.name for run, git in zip(runs, states, strict=True) if git["is_dirty"]]) and not (
        policy.allow_uncommitted
    ):
        words = f"{', '.join(dirty)}: trained with changes that no commit holds"
        remedy = "commit and train again, or fingerprint.allow_uncommitted"
        return Check(what=what, answer="fail", words=words, remedy=remedy)
    return Check(what=what, answer="pass", words=f"commit {str(states[0].get('commit'))[:12]}")


def _code(run: RunRecord) -> dict[str, Any]:
    found = facts_of_environment(run.environment.get("environment") or {})
    return {key: value for key, value in found.items() if key.startswith("code.")}


def _environment(run: RunRecord) -> dict[str, Any]:
    found = facts_of_environment(run.environment.get("environment") or {})
    return {key: value for key, value in found.items() if key.startswith("environment.")}


def _data(run: RunRecord) -> dict[str, Any]:
    return {
        f"data.{split}.{key}": jsonable(facts[key])
        for split, facts in run.data.items()
        for key in ABOUT_FILES
        if key in facts
    }


def _trained(run: RunRecord) -> dict[str, Any]:
    """The keys of the config that say what is trained."""
    return {
        f"config.{key}": value
        for key, value in leaves(jsonable(run.config))
        if key.startswith(OF_THE_TRAINING) and decides(key) is Decides.RESULT
    }
