"""Gate `fingerprint`: are candidate and baseline the same code on the same data in the same kind of environment?

Different config keys are reported and not evaluated, since training on more workers changes some of them. Only the
workload and its data must be the same."""

from collections.abc import Mapping, Sequence
from typing import Any

from scaleray.config.decides import Decides, decides
from scaleray.records.gate_answer import Answer, Check, GateResult, gate_of
from scaleray.records.json_record import jsonable, leaves
from scaleray.records.run_record import RunRecord
from scaleray.release.gates.environment import GPU, facts_of_run, unknown_of_gpus, unlike, uses_gpus, workers_of
from scaleray.release.gates.policy import FingerprintPolicy

GATE = "fingerprint"
OF_THE_TRAINING = ("workload.", "data.")
"""Sections of the config that must be the same."""
ABOUT_FILES = ("rows", "bytes", "sha256", "hashed", "tokens")
"""Facts that identify the data of a split; others describe how it was read."""
CONTENT = "content"
"""Value of `hashed` if all bytes were hashed; otherwise only names and sizes were, or nothing."""
LINK = f"{GPU}interconnect"
"""Connection between GPUs, which is required for trainings on several GPUs."""


def fingerprint_gate(
    candidates: Sequence[RunRecord], baselines: Sequence[RunRecord], *, policy: FingerprintPolicy
) -> GateResult:
    """The gate's checks: code, environment, data, and workload."""
    if not candidates or not baselines:
        missing = "baseline" if candidates else "candidate"
        words = f"there is no {missing} to compare with"
        remedy = f"scaleray gate RUN --against {missing.upper()}"
        return gate_of(GATE, [Check(what="the same everything", answer="inconclusive", words=words, remedy=remedy)])
    runs = [*candidates, *baselines]
    parts = {"code": _code, "environment": _environment, "data": _data, "config": _trained}
    # a link between GPUs is no part of what a single worker ran on
    may_differ = (*policy.may_differ, *([LINK] if any(run.workers == 1 for run in runs) else []))
    checks = [_alike(name, [facts(run) for run in runs], runs, may_differ) for name, facts in parts.items()]
    known = [_known_hardware(runs, policy.may_differ), _known_content(runs, policy.may_differ)]
    states = {run.name: (run.environment.get("environment") or {}).get("git") or {} for run in runs}
    return gate_of(GATE, [*checks, *known, committed(states, policy)])


def _alike(
    name: str, facts: Sequence[Mapping[str, Any]], runs: Sequence[RunRecord], may_differ: Sequence[str]
) -> Check:
    what = f"the same {name}"
    if unknown := [run.name for run, known in zip(runs, facts, strict=True) if not known]:
        words = f"{', '.join(unknown)} did not record it"
        return Check(what=what, answer="inconclusive", words=words)
    for run, known in zip(runs[1:], facts[1:], strict=True):
        if found := unlike(facts[0], known, may_differ):
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            words = f"{runs[0].name} and {run.name} differ: {'; '.join(found[:4])}{more}"
            remedy = f"set fingerprint.may_differ in the policy, or train both alike: scaleray compare {run.name} ..."
            return Check(what=what, answer="fail", words=words, numbers={"differences": len(found)}, remedy=remedy)
    return Check(what=what, answer="pass", words=f"{len(runs)} runs, {len(facts[0])} facts")


def committed(states: Mapping[str, Mapping[str, Any]], policy: FingerprintPolicy) -> Check:
    """Whether the code is committed. states: git's state by name of the measurement."""
    what = "code is committed"
    if unknown := [name for name, git in states.items() if git.get("is_dirty") is None]:
        words = f"it is unknown for {', '.join(unknown)}"
        answer: Answer = "pass" if policy.allow_uncommitted else "inconclusive"
        return Check(what=what, answer=answer, words=words, remedy="train in a checkout")
    if (dirty := [name for name, git in states.items() if git["is_dirty"]]) and not policy.allow_uncommitted:
        words = f"{', '.join(dirty)}: measured with uncommitted changes"
        remedy = "commit and train again, or fingerprint.allow_uncommitted"
        return Check(what=what, answer="fail", words=words, remedy=remedy)
    commits = {str(git.get("commit"))[:12]: None for git in states.values()}
    return Check(what=what, answer="pass", words=f"commit {', '.join(commits)}")


def _known_hardware(runs: Sequence[RunRecord], may_differ: Sequence[str]) -> Check:
    """Whether the workers' hardware is known."""
    what = "hardware of the workers is known"
    unknown = [f"{run.name} has no record of its workers" for run in runs if not workers_of(run)]
    for run in runs:
        if uses_gpus(workers_of(run)) and (missing := unknown_of_gpus(facts_of_run(run), may_differ)):
            unknown.append(f"{run.name} ran on GPUs, but their {', '.join(missing)} were not recorded")
    if unknown:
        remedy = "scaleray doctor shows each node's report of its GPUs; train again, or set fingerprint.may_differ"
        return Check(what=what, answer="inconclusive", words="; ".join(unknown[:4]), remedy=remedy)
    devices = {"GPUs" if uses_gpus(workers_of(run)) else "CPUs" for run in runs}
    return Check(what=what, answer="pass", words=f"{len(runs)} runs on {' and '.join(sorted(devices))}")


def _known_content(runs: Sequence[RunRecord], may_differ: Sequence[str]) -> Check:
    """Whether the bytes of the data are known, since equal numbers of rows or equal file names prove nothing."""
    what = "content of the data is known"
    unknown = {
        f"{split} of {run.name} ({facts.get('hashed') or 'no hash'})": split
        for run in runs
        for split, facts in run.data.items()
        if not (facts.get("sha256") and facts.get("hashed") == CONTENT)
        and not f"data.{split}.sha256".startswith(tuple(may_differ))
    }
    if not unknown:
        return Check(what=what, answer="pass", words=", ".join(sorted({split for run in runs for split in run.data})))
    keys = ", ".join(f"data.{split}" for split in dict.fromkeys(unknown.values()))
    remedy = (
        "train on arrays, or on Parquet and token files that are small enough to be hashed (docs/workloads.md); or "
        f"set fingerprint.may_differ: [{keys}] if the team identifies the data in another way"
    )
    words = f"no run hashed the bytes of {', '.join(list(unknown)[:4])}"
    return Check(what=what, answer="inconclusive", words=words, remedy=remedy)


def _code(run: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in facts_of_run(run).items() if key.startswith("code.")}


def _environment(run: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in facts_of_run(run).items() if key.startswith("environment.")}


def _data(run: RunRecord) -> dict[str, Any]:
    return {
        f"data.{split}.{key}": jsonable(facts[key])
        for split, facts in run.data.items()
        for key in ABOUT_FILES
        if key in facts
    }


def _trained(run: RunRecord) -> dict[str, Any]:
    """Keys of the config that define the training."""
    return {
        f"config.{key}": value
        for key, value in leaves(jsonable(run.config))
        if key.startswith(OF_THE_TRAINING) and decides(key) is Decides.RESULT
    }
