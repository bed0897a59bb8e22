"""Today's runs against those of a promoted model, whose records and evaluations are kept with its version."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.config.decides import Decides, decides
from scaleray.errors import TrackingError, UsageError
from scaleray.gates.answer import GateResult, together
from scaleray.gates.convergence import convergence_gate
from scaleray.gates.drift import data_gate, speed_gate
from scaleray.gates.record import GateRecord
from scaleray.launch.gate.evidence import Evidence, learning, target_of, training
from scaleray.launch.gate.kept_evidence import read_evidence
from scaleray.launch.gate.policy_file import read_policy
from scaleray.launch.promote.promote import EVIDENCE
from scaleray.progress import stage
from scaleray.records.json_record import leaves
from scaleray.records.run import RunRecord
from scaleray.tracking.find_record import FoundRun, find_run
from scaleray.tracking.registry.fetched import MODEL, fetch_model
from scaleray.tracking.registry.models import ModelRegistry, Named

DAYS = 8.0
"""Days back in which runs count as today's: a week and some hours."""
MAY_DIFFER = ("seed", "workload.name", "workload.args.")
"""Keys of the config in which today's runs may differ from the promoted one: code lies elsewhere, data are newer."""


def drift(
    model: str,
    runs: str | Sequence[str] = (),
    *,
    days: float = DAYS,
    policy: str | Path | Mapping[str, Any] | None = None,
    uri: str | None = None,
) -> GateRecord:
    """Whether runs are still like those of a promoted model: their speed, how they learn, and their data. `.answer` is
    pass, fail or inconclusive, as of `gate`.

    model: `NAME@ALIAS` or `NAME/VERSION`. runs: folders, names in the storage path, or ids or names in MLflow; without
    any, those in MLflow of the promoted run's experiment that train the same, began after its promotion and in the last
    `days`, and have finished or failed. policy: a YAML file, or its sections; None is that of the promotion.
    Raises UsageError, ConfigError and TrackingError.
    """
    names = [runs] if isinstance(runs, str) else list(runs)
    if days <= 0:
        raise UsageError("--days", days, "it must be above 0")
    kept, held = read_evidence(fetch_model(model, uri=uri).parents[len(MODEL.parts) - 1] / EVIDENCE)
    if policy is not None:
        held = read_policy(policy)
    registry = ModelRegistry(uri)
    with stage("looking for today's runs"):
        notes: list[str] = []
        found = [find_run(name, uri=registry.uri) for name in names]
        found = found or _since(registry, Named.parse(model), kept, days, notes)
    today, promoted = ([training(one) for one in side] for side in (found, kept.candidates))
    target = held.convergence.target or target_of(kept.run)
    learned = [
        [learning(one, target, held.convergence.metric_name) for one in side] for side in (found, kept.candidates)
    ]
    gates = [
        speed_gate([run for run in today if run.status == "FINISHED"], promoted, policy=held.drift),
        convergence_gate(learned[0], learned[1], target=target, policy=held.convergence),
        data_gate(today, promoted, policy=held.drift),
    ]
    words = ["scaleray", "drift", model, *(str(one.folder or training(one).run_id or one.where) for one in found)]
    if not found:
        notes.append("no run that trains the same has ended since")
    return _record(model, gates, found, kept, held.model_dump(mode="json"), notes, command=shlex.join(words))


def _record(
    model: str, gates: Sequence[GateResult], found: Sequence[FoundRun], kept: Evidence, policy: dict[str, Any],
    notes: list[str], *, command: str,
) -> GateRecord:  # fmt: skip
    return GateRecord(
        answer=together(gate.answer for gate in gates),
        gates=[dataclasses.replace(gate, command=command) for gate in gates],
        run=f"drift from {model}",
        candidates=[one.where for one in found],
        baselines=[one.where for one in kept.candidates],
        policy=policy,
        notes=notes,
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def _since(registry: ModelRegistry, named: Named, kept: Evidence, days: float, notes: list[str]) -> list[FoundRun]:
    """Runs of the same training that began after the promotion and in the last days and have finished or failed, the
    newest first. Those that failed before they had a record are named in `notes`."""
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
            notes.append(f"run {run_id} failed and has no record: whether it trained the same is not known")
            continue
        if one is not None and isinstance(one.record, RunRecord) and _training_of(one.record) == own:
            found.append(one)
    return found


def _training_of(run: RunRecord) -> dict[str, Any]:
    """What a run trains, and on how many workers."""
    values = {
        key: value
        for key, value in leaves(run.config)
        if decides(key) is Decides.RESULT and not key.startswith(MAY_DIFFER)
    }
    attribute = str((run.config.get("workload") or {}).get("name")).rpartition(":")[2]
    return {**values, "workload": attribute, "workers": run.workers}
