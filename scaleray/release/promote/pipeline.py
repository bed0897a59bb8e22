"""The pipeline of a promoted model, in a separate folder: the retraining job, its alert limits, and the drift check.
The user's scheduler runs its scripts.

It is part of the version's files, so the version's statement covers every byte."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from scaleray.clusters.manifests.cloud_machines import MACHINES, Machine
from scaleray.clusters.manifests.cluster_spec import ClusterSpec
from scaleray.clusters.manifests.written_files import files as manifest_files
from scaleray.common.filesystems import write_whole
from scaleray.common.metric import prometheus_name
from scaleray.common.metric_names import SAMPLES_PER_S
from scaleray.common.parsing import load_json
from scaleray.config import RunConfig
from scaleray.config.alerts import AlertLimits
from scaleray.config.base import HIDDEN, without_password
from scaleray.errors import StorageError, UsageError
from scaleray.live.rules.learning_rules import IN_A_ROW, LEAST_POINTS, LOOK_BACK, mads_above, over_median
from scaleray.live.rules.promql import RUN
from scaleray.live.rules.rule_files import PATH as ALERTS
from scaleray.live.rules.rule_files import files as rule_files
from scaleray.live.rules.series_history import Values
from scaleray.live.steps_file import step_rows
from scaleray.models.trained_run import CODE
from scaleray.recording.find_record import FoundRun
from scaleray.records.json_record import jsonable
from scaleray.records.run_record import RunRecord
from scaleray.records.statement import digests
from scaleray.release.gate.evidence import training
from scaleray.release.gates.policy import Policy

FOLDER = "pipeline"
"""Name among the files of a version."""
JOB, PINS = "job.yaml", "pipeline.json"
KINDS = ("local", "kubernetes", "slurm", "ray-up")
"""Kinds of cluster of a pipeline."""


def write_pipeline(
    runs: Sequence[FoundRun],
    packed: Path,
    out: Path,
    *,
    model: str,
    cluster: str = "local",
    policy: Policy | None = None,
    uri: str,
) -> None:
    """Write the pipeline to a new folder. runs: the promoted run and its repeats. packed: folder of the packed model,
    whose code is copied. model: NAME@ALIAS. policy: policy of the promotion, None for the default. uri: MLflow server
    in which the model is registered.

    Raises UsageError for an unknown kind of cluster."""
    check_cluster(cluster)
    run, measured = training(runs[0]), measured_limits(runs)
    if (packed / CODE).is_dir():
        shutil.copytree(packed / CODE, out / CODE, ignore=shutil.ignore_patterns("__pycache__"))
    note = load_json((packed / "run.json").read_bytes())
    job = _job(run, _workload_name(str(note["config"]["workload"]["name"]), packed / CODE), measured.limits, uri)
    machine = _machine(run)
    wanted = ClusterSpec(nodes=run.workers)
    if machine:
        wanted = ClusterSpec(gpus=f"{machine.gpus}x{machine.gpu}", nodes=math.ceil(run.workers / machine.gpus))
    manifests = manifest_files(wanted, [cluster]) if cluster != "local" else {}
    texts = {
        **manifests,
        JOB: _head(run, model) + yaml.safe_dump(jsonable(job), sort_keys=False, width=110),
        PINS: json.dumps(jsonable(_pins(run, model, cluster, measured)), indent=1) + "\n",
        ALERTS: _alerts(run, model, measured),
        "retrain.sh": _retrain(model, cluster),
        "drift.sh": _drift(model, uri, policy or Policy()),
    }
    for name, text in texts.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, text)
        if text.startswith("#!"):
            (out / name).chmod(0o755)


def check_cluster(cluster: str) -> None:
    """Raise UsageError for an unknown kind of cluster."""
    if cluster not in KINDS:
        raise UsageError("--cluster", cluster, f"it must be one of {', '.join(KINDS)}")


def copy_pipeline(folder: Path, to: str | Path) -> None:
    """Copy a pipeline atomically to a new folder, or one that is already equal.

    Raises UsageError, StorageError."""
    target = Path(to).expanduser().absolute()
    if target.exists():
        if not target.is_dir() or digests(target) != digests(folder):
            raise UsageError.problem("--pipeline", f"{to} already exists with different content", "name a new folder")
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as place:
            shutil.copytree(folder, Path(place) / "new").rename(target)
    except OSError as exc:
        raise StorageError.problem("--pipeline", f"{to} cannot be written: {exc.strerror or exc}") from exc


def _job(run: RunRecord, workload: str, limits: AlertLimits, uri: str) -> dict[str, Any]:
    """Resolved config that repeats the run, with its own code, a new name, and the measured limits."""
    values: dict[str, Any] = RunConfig.model_validate(run.config).model_dump(mode="json")
    values["workload"]["name"] = workload
    values["tracking"] |= {"run_name": None, "uri": without_password(uri)}
    values["alerts"] |= limits.model_dump(mode="json", include=set(AlertLimits.model_fields))
    if HIDDEN in str(values["alerts"].get("webhook")):  # its address was never stored
        values["alerts"]["webhook"] = None
    return values


def _workload_name(name: str, code: Path) -> str:
    """The packed workload's name as a path from the job file; the name of an installed package is unchanged."""
    target, _, attribute = name.partition(":")
    file = target if target.endswith(".py") else f"{target.replace('.', '/')}.py"
    return f"{CODE}/{file}:{attribute}" if (code / file).is_file() else name


def _head(run: RunRecord, model: str) -> str:
    git = (run.environment.get("environment") or {}).get("git") or {}
    data = [
        f"# data {split}: {facts.get('rows')} rows, SHA-256 {facts.get('sha256')}" for split, facts in run.data.items()
    ]
    changed = " with uncommitted changes" if git.get("is_dirty") else ""
    lines = [
        f"# Trains {model} again: scaleray train -c {JOB}, or retrain.sh for another seed.",
        f"# From run {run.name}, {run.run_id}; unchanged copies of its workload's files are in {CODE}/.",
        f"# commit {git.get('commit')}{changed}",
        *data,
    ]
    return "\n".join([*lines, ""])


def _pins(run: RunRecord, model: str, cluster: str, measured: MeasuredLimits) -> dict[str, Any]:
    """Sources of the pipeline, for programs."""
    facts = run.environment.get("environment") or {}
    return {
        "model": model,
        "run": run.name,
        "run_id": run.run_id,
        "cluster": cluster,
        "code": facts.get("git") or {},
        "packages": facts.get("packages") or {},
        "data": {
            name: {key: about.get(key) for key in ("rows", "sha256", "hashed")} for name, about in run.data.items()
        },
        "alert_limits": list(measured.lines),
        "samples_per_s": measured.samples_per_s,
    }


def _alerts(run: RunRecord, model: str, measured: MeasuredLimits) -> str:
    """Prometheus rules with the measured limits, and a rule that compares a run's speed with the promoted runs'
    speed."""
    groups = yaml.safe_load(rule_files(measured.limits)[ALERTS])
    if measured.samples_per_s:
        config = RunConfig.model_validate(run.config)
        names = f"{config.workload.stem}-w{run.workers:03d}-b{config.batch.global_size}-.*"
        limit = SLOWER * measured.samples_per_s
        summary = f'{{{{ $value | printf "%.3g" }}}} samples/s; {model} was promoted with {measured.samples_per_s:.4g}'
        rule = {
            "alert": "ScaleraySlowerThanPromoted",
            "expr": f'max by ({RUN}) ({prometheus_name(SAMPLES_PER_S)}{{ray_train_run_name=~"{names}"}}) < {limit:.4g}',
            "for": "300s",
            "labels": {"severity": "warning", "source": "scaleray", "rule": "slower_than_promoted"},
            "annotations": {
                "summary": summary,
                "costs": "The same training costs more.",
                "what_to_do": f"scaleray gate --against {model} shows whether it exceeds the noise, scaleray profile "
                f"RUN where the time goes.",
            },
        }
        groups["groups"].append({"name": "scaleray-promoted", "rules": [rule]})
    lines = [f"# Alerts for {model}. Measured in its runs, with the largest values; other limits are the defaults:"]
    lines += [f"#   {line}" for line in measured.lines] or ["#   nothing"]
    return "\n".join(lines) + "\n" + yaml.safe_dump(groups, sort_keys=False, width=110, allow_unicode=True)


def _retrain(model: str, cluster: str) -> str:
    words = f'-c {JOB} --seed "$seed" "$@"'
    before, start = _find_python(), f'"$python" -m scaleray train {words} --resume auto'
    if cluster == "slurm":  # whose script finds Python and resumes by itself
        sbatch = shlex.quote(shutil.which("sbatch") or "sbatch")
        before, start = "export SLURM_SCRIPTS=slurm\n", f"{sbatch} slurm/train.sbatch {words}"
    return f"""#!/bin/bash
# Trains {model} again, with a seed of the day, since runs of one seed would not show their noise.
# Nothing is promoted: scaleray promote RUN --as ALIAS evaluates the gates.
set -euo pipefail
cd "$(dirname "$0")"
{before}seed=${{SEED:-$(date +%Y%j)}}
exec {start}
"""


def _drift(model: str, uri: str, policy: Policy) -> str:
    runs = max(policy.drift.min_runs, policy.convergence.min_runs)
    words = shlex.join(["gate", "--against", model, "--uri", without_password(uri)])
    return f"""#!/bin/bash
# Compares the runs of the last days with {model}. The policy requires {runs} runs, so the default is as many weeks and
# a day; DAYS sets another number of days.
# Exit code 0: as promoted; 1: one gate fails; 3: too few runs to tell, as until {runs} have been trained since.
set -euo pipefail
{_find_python()}exec "$python" -m scaleray {words} --days "${{DAYS:-{7 * runs + 1}}}" "$@"
"""


def _find_python() -> str:
    """Shell lines that set `python`, also under cron, whose PATH lacks the environment: PYTHON, this interpreter, or
    `python` on a machine without it."""
    default = f"python=${{PYTHON:-{shlex.quote(sys.executable)}}}"
    return f'{default}\ncommand -v "$python" > /dev/null || python=python\n'


def _machine(run: RunRecord) -> Machine | None:
    """Largest kind of node with the run's GPUs that the run filled; None for a run on CPUs, or on GPUs that the table
    lacks."""
    names = ((run.environment.get("environment") or {}).get("accelerators") or {}).get("names") or []
    name = str(names[0]).lower() if names else ""
    known = [one for one in MACHINES if name and one.gpu.partition("-")[0] in name]
    filled = [one for one in known if one.gpus <= run.workers]
    return max(filled, key=lambda one: one.gpus, default=min(known, key=lambda one: one.gpus, default=None))


FACTOR = 2.0
"""Factor between the largest measurement and a limit."""
MOST_CHECKS = 2000
"""Maximum number of evenly spaced steps of a run at which losses and gradients are compared with earlier values."""
SLOWER = 0.8
"""Share of the slowest run's samples per second below which a later run counts as slower than the promoted runs."""


@dataclass(frozen=True)
class MeasuredLimits:
    """Alert limits, and a line for each measured one. samples_per_s: rate of the slowest run; None if no run was
    steady."""

    limits: AlertLimits
    lines: tuple[str, ...]
    samples_per_s: float | None


def measured_limits(runs: Sequence[FoundRun]) -> MeasuredLimits:
    """Limits from these runs. Quantities without measurements keep the default limit."""
    usual, records = AlertLimits(), [training(run) for run in runs]
    rows = [step_rows(run.steps) for run in runs]
    times, losses, norms = (
        [np.array([row[name] for row in one if row.get(name) is not None]) for one in rows]
        for name in ("step_time_s", "loss", "grad_norm")
    )
    waits = [record.input_wait_share for record in records if record.input_wait_share is not None]
    shares = [
        peak / part["device_bytes"]
        for record in records
        for peak, part in zip(record.peak_memory_bytes, record.memory, strict=False)
        if part.get("device_bytes")
    ]
    measured = {
        "no_progress_s": max((float(one.max()) for one in times if len(one)), default=None),
        "input_wait_share": max(waits, default=None),
        "loss_spike_mads": _largest(losses, mads_above),
        "gradient_factor": _largest(norms, over_median),
        "memory_share": max(shares, default=None),
    }
    found: dict[str, float] = {}
    lines = []
    for name, value in measured.items():
        if value is None:
            continue
        found[name] = _limit(name, value, float(getattr(usual, name)))
        lines.append(f"{name}: {found[name]:.4g}; the largest measured value was {value:.4g}")
    speeds = [record.samples_per_s for record in records if record.samples_per_s]
    return MeasuredLimits(usual.model_copy(update=found), tuple(lines), min(speeds, default=None))


def _limit(name: str, value: float, usual: float) -> float:
    """A limit above the measurements, at least half of the default: otherwise a calm run would get a tight limit."""
    if name == "memory_share":  # half of what is left
        return round(min(0.99, (1 + value) / 2), 4)
    limit = max(FACTOR * value, usual / 2)
    return float(f"{min(limit, 0.9) if name == 'input_wait_share' else limit:.3g}")


def _largest(series: Sequence[Values], measure: Callable[[Values, Values], Values]) -> float | None:
    """Highest level that a streak of values reached in any run, for as long as an alert needs; None if all runs are too
    short."""
    found = [one for values in series for one in _in_a_row(values[np.isfinite(values)], measure)]
    return max(found, default=None)


def _in_a_row(values: Values, measure: Callable[[Values, Values], Values]) -> list[float]:
    last = len(values) - IN_A_ROW
    looks = range(LEAST_POINTS, last + 1, max(1, last // MOST_CHECKS))
    return [float(measure(values[at : at + IN_A_ROW], values[max(0, at - LOOK_BACK) : at]).min()) for at in looks]
