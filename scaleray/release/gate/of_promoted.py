"""Gates of recent runs against a registered version, whose evidence and policy were stored at its promotion."""

import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.common.progress import stage
from scaleray.config.decides import Decides, decides
from scaleray.errors import ConfigError, TrackingError, UsageError
from scaleray.models.fetched import MODEL, fetch_model
from scaleray.models.registry import MODEL_URI, ModelRegistry, Named
from scaleray.recording.find_record import FoundRun, find_run, locations_of
from scaleray.records.gate_answer import GateResult, together
from scaleray.records.gates import GateRecord
from scaleray.records.json_record import leaves
from scaleray.records.run_record import RunRecord
from scaleray.release.gate.evidence import Evidence, learning, refuse_twice, target_of, training
from scaleray.release.gate.policy_file import read_policy
from scaleray.release.gate.stored_evidence import EVIDENCE, read_evidence
from scaleray.release.gates import convergence, drift

OF_PROMOTED = (drift.SPEED, convergence.GATE, drift.DATA)
DAYS = 8.0
"""Age in days up to which runs count as recent by default: a week and some hours."""
MAY_DIFFER = ("seed", "workload.name", "workload.args.")
"""Config keys in which recent runs may differ from the promoted one, as the code's path differs and data are newer."""


def registered(against: Sequence[str]) -> Named | None:
    """The registered version among the names of a baseline; None if all names are runs.

    A version is NAME@ALIAS, unless a folder has this name, or begins with `models:/`. Raises UsageError if there is a
    version and another baseline.
    """
    for name in against:
        is_alias = "@" in name and not set("/:") & set(name) and not _is_folder(name)
        if is_alias or name.startswith(MODEL_URI):
            if len(against) > 1:
                allowed = "a registered version must be the only baseline"
                raise UsageError("--against", " ".join(against), allowed, f"give {name} alone")
            return Named.parse(name)
    return None


def _is_folder(name: str) -> bool:
    return any(Path(location.root).exists() for location in locations_of(name))


def evaluate_promoted(
    runs: Sequence[str],
    version: Named,
    *,
    days: float | None = None,
    policy: str | Path | Mapping[str, Any] | None = None,
    gates: Sequence[str] | None = None,
    uri: str | None = None,
) -> GateRecord:
    """Compare the speed, the convergence and the data of runs with those of a promoted model.

    runs: by default, runs of the promoted run's experiment in MLflow that have the same training, began after its
    promotion and within the last `days`, and have finished or failed. policy: None: the policy of the promotion. Raises
    UsageError, ConfigError and TrackingError."""
    for name in gates or ():
        if name not in OF_PROMOTED:
            raise ConfigError("--gates", name, f"it must be one of {', '.join(OF_PROMOTED)} with a registered version")
    if days is not None and days <= 0:
        raise UsageError("--days", days, "it must be above 0")
    kept, held = read_evidence(fetch_model(str(version), uri=uri).parents[len(MODEL.parts) - 1] / EVIDENCE)
    if policy is not None:
        held = read_policy(policy)
    registry = ModelRegistry(uri)
    with stage("searching for runs since the promotion"):
        notes: list[str] = []
        found = [find_run(name, uri=registry.uri) for name in runs]
        refuse_twice(found)
        found = found or _since(registry, version, kept, DAYS if days is None else days, notes)
    if not found:
        notes.append("no run of the same training has ended since then")
    today, promoted = ([training(one) for one in side] for side in (found, kept.candidates))
    target = held.convergence.target or target_of(kept.run)
    metric = held.convergence.metric_name
    learned = [[learning(one, target, metric) for one in side] for side in (found, kept.candidates)]
    finished = [run for run in today if run.status == "FINISHED"]
    asked: dict[str, Callable[[], GateResult]] = {
        drift.SPEED: lambda: drift.speed_gate(finished, promoted, policy=held.drift),
        convergence.GATE: lambda: convergence.convergence_gate(
            learned[0], learned[1], target=target, policy=held.convergence
        ),
        drift.DATA: lambda: drift.data_gate(today, promoted, policy=held.drift),
    }
    results = [asked[name]() for name in OF_PROMOTED if gates is None or name in gates]
    words = ["scaleray", "gate", *(str(one.folder or training(one).run_id or one.where) for one in found)]
    words += ["--against", f"{MODEL_URI}{version}"]
    words += ["--policy", str(policy)] if isinstance(policy, (str, Path)) else []
    return GateRecord(
        answer=together(one.answer for one in results),
        gates=[dataclasses.replace(one, command=shlex.join([*words, "--gates", one.gate])) for one in results],
        run=f"runs since the promotion of {version}",
        candidates=[one.where for one in found],
        baselines=[one.where for one in kept.candidates],
        policy=held.model_dump(mode="json"),
        notes=notes,
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def _since(registry: ModelRegistry, named: Named, kept: Evidence, days: float, notes: list[str]) -> list[FoundRun]:
    """Runs of the same training that began after the promotion and within the last days and have finished or failed,
    newest first. Runs that failed without a record are named in `notes`."""
    version = registry.find(named)
    since_ms = max(version.created_at_ms, 1000 * (time.time() - 86400 * days))
    known = {training(one).run_id for one in (*kept.candidates, *kept.baselines)}
    own = _training_of(kept.run)
    found = []
    for run_id, status in registry.runs_beside(version.run_id, since_ms=since_ms).items():
        try:
            one = None if run_id in known else find_run(run_id, uri=registry.uri)
        except TrackingError:
            if status == "FINISHED":
                raise
            notes.append(f"run {run_id} failed without a record: its training is unknown")
            continue
        if one is not None and isinstance(one.record, RunRecord) and _training_of(one.record) == own:
            found.append(one)
    return found


def _training_of(run: RunRecord) -> dict[str, Any]:
    """Training of a run, and its number of workers."""
    values = {
        key: value
        for key, value in leaves(run.config)
        if decides(key) is Decides.RESULT and not key.startswith(MAY_DIFFER)
    }
    attribute = str((run.config.get("workload") or {}).get("name")).rpartition(":")[2]
    return {**values, "workload": attribute, "workers": run.workers}
