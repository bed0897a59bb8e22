"""Records of a run: its description before the start, its record at the end, in MLflow and in files."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.manifest import Incomplete, StoredFile
from scaleray.common import metric_names as names
from scaleray.common.fingerprint import environment_hash
from scaleray.config import RunConfig
from scaleray.config.base import without_password
from scaleray.config.idle_settings import used_settings
from scaleray.config.recipe.lr_rules import MOVED_BY_RULES
from scaleray.data import TRAIN
from scaleray.errors import CheckpointError
from scaleray.launch.session.alert_targets import alert_settings
from scaleray.launch.session.experiment import experiment_tags
from scaleray.launch.session.run_folder import RunFolder
from scaleray.profiling.run_profile import run_profile
from scaleray.profiling.verdict.findings import Limit
from scaleray.profiling.verdict.of_run import verdict_of_run
from scaleray.recording.provenance import cost_of, dataset, source_tags
from scaleray.records.conditions import start_key
from scaleray.records.json_record import leaves
from scaleray.records.published import RAYS_JOB, PublishedFacts
from scaleray.records.rows import Row
from scaleray.records.run_description import Recording, RunDescription, RunIdentity
from scaleray.records.run_record import EMULATED, RunRecord
from scaleray.records.start import steady_time
from scaleray.training.setup.job import TrainJob
from scaleray.workload import brings_optimizer, brings_schedule


def checkpoint_facts(
    name: str, config: RunConfig, data: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Facts of the run `name`. data: facts of each split. facts: the run's environment and topology."""
    return {
        "run": name,
        "config": config.to_dict(),
        "config_hash": config.hash(),
        "environment_hash": environment_hash({"environment": facts["environment"]}),
        "data": {split: about.get("sha256") for split, about in data.items()},
    }


class Stoppable(Protocol):
    """Interface of a recorder in this process or in an actor."""

    def stopped_by(self) -> str: ...


def why_stopped(recorder: Stoppable) -> str:
    """Text of the alert that stopped a run; empty if no alert did, or it is no longer known."""
    with contextlib.suppress(Exception):
        return recorder.stopped_by()
    return ""


EXPLAINED = (
    names.LOSS, names.LEARNING_RATE, names.GRAD_NORM, names.EPOCH, names.SAMPLES_PER_S, names.TOKENS_PER_S,
    names.STEP_TIME_S, names.INPUT_WAIT_SHARE, names.SENT_BYTES, names.POINT_SAMPLES_PER_S, names.TIME_TO_FIRST_STEP_S,
    names.PEAK_MEMORY_BYTES,
)  # fmt: skip
"""Metrics whose unit and meaning are in the run's description, since MLflow cannot show them next to a chart."""


def describe(
    job: TrainJob,
    *,
    data: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, Any],
    folder: RunFolder,
    tracking_uri: str,
    base_dir: Path | None,
    continues: Mapping[str, Any] | None,
    changes: Sequence[str],
    port: int | None = None,
    expected_samples_per_s: float | None = None,
) -> RunDescription:
    """Describe the run for the recorder. data: facts of each split. facts: environment and topology. continues:
    run.json of the interrupted run. changes: differences from that run, one per line. port: of its metrics, or None.
    expected_samples_per_s: prediction for its throughput."""
    config, recipe = job.config, job.recipe
    alerts, webhook = alert_settings(config.alerts)
    params: dict[str, Any] = dict(leaves(used_settings(config, recipe.strategy), of_lists=False))
    # what an optimizer or a schedule of the workload's own makes of them, its workers say
    whose = "optimizer()" if brings_optimizer(job.workload) else "schedule()"
    later = MOVED_BY_RULES if brings_optimizer(job.workload) or brings_schedule(job.workload) else ()
    params.update({f"derived.{k}": v for k, v in recipe.values().items() if k not in later})
    how = {k: f"{v}, for the workload's own {whose}" if k in later else v for k, v in recipe.explanations.items()}
    params.update({"topology.nodes": len(facts["topology"]), "topology.workers": str(config.scale.workers)})
    return RunDescription(
        tracking_uri=tracking_uri,
        experiment=config.tracking.experiment,
        run_name=folder.name,
        work_dir=folder.work_dir,
        every_steps=config.tracking.every_steps,
        params={k: v for k, v in params.items() if v is not None},
        tags=_start_tags(job, facts, folder, data),
        files={
            "config.yaml": as_yaml(config.to_dict()),
            "derived.yaml": as_yaml({"values": recipe.values(), "how": how}),
        },
        datasets=[dataset(name, of_split, workload=config.workload.name) for name, of_split in data.items()],
        tokens_per_sample=job.splits[TRAIN].tokens_per_row,
        started_at=job.started_at,
        run_path=folder.path,
        config=config.to_dict(),
        base_dir=str(base_dir) if base_dir else None,
        continues=continues,
        repeats=start_key(config.to_dict(), config.scale.max_workers, facts, data),
        alerts=alerts,
        webhook=webhook,
        changes=changes,
        strategy=recipe.strategy,
        total_steps=recipe.total_steps,
        published=_published_facts(job, port, expected_samples_per_s),
    )


def _published_facts(job: TrainJob, port: int | None, expected_samples_per_s: float | None) -> PublishedFacts:
    config, minutes = job.config, job.config.checkpoint.every_minutes
    peak = config.study.peak_tflops
    return PublishedFacts(
        port=port,
        job=os.environ.get(RAYS_JOB, ""),
        checkpoint_every_steps=job.recipe.checkpoint_every_steps,
        checkpoint_every_s=60.0 * minutes if minutes is not None else None,
        expected_samples_per_s=expected_samples_per_s,
        flops_per_sample=config.monitoring.flops_per_sample,
        peak_flops_per_s=peak * 1e12 if peak is not None else None,
        precision="tf32" if config.precision.tf32 and config.precision.dtype == "fp32" else config.precision.dtype,
    )


def _start_tags(
    job: TrainJob, facts: Mapping[str, Any], folder: RunFolder, data: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    tags = {
        "scaleray.kind": "train",
        "scaleray.config_hash": job.config.hash(),
        "scaleray.strategy": job.recipe.strategy,
        "scaleray.run_dir": without_password(folder.path),
        **source_tags(job.config.workload.name, facts["environment"]["git"]),
        **experiment_tags(
            job.config,
            environment=facts["environment"],
            nodes=facts["topology"],
            data=data[TRAIN],
            workers=job.config.scale.max_workers,
            profiled=job.probes_links,
        ),
    }
    if job_id := os.environ.get(RAYS_JOB):
        tags["scaleray.ray_job_id"] = job_id
    return tags


def make_record(
    job: TrainJob,
    recording: Recording,
    identity: RunIdentity,
    *,
    status: str,
    verdict: str,
    data: dict[str, Any],
    facts: Mapping[str, Any],
    folder: RunFolder,
    tracking_uri: str,
    weights: Mapping[str, StoredFile],
) -> RunRecord:
    """Make the record of a finished run. verdict: reason for its end; if empty, the workers' reason. weights: files of
    the final weights."""
    config, summaries = job.config, recording.summaries
    summary = next((s for s in summaries if s.rank == 0), None)
    workers = [{"rank": s.rank, "node": s.node, "device": s.device, **s.hardware} for s in summaries]
    hardware = _distinct([s.hardware for s in summaries])
    first_step_s = summary.time_to_first_step_s if summary else math.nan
    return RunRecord(
        name=folder.name,
        status=status,
        verdict=verdict or (summary.verdict if summary else "done"),
        workers=config.scale.max_workers,
        strategy=job.recipe.strategy,
        steps=max(0, recording.last_step),
        final_loss=recording.final_loss,
        metrics=recording.metrics,
        samples_per_s=summary.samples_per_s if summary else None,
        tokens_per_s=summary.tokens_per_s if summary else None,
        step_time_s=summary.step_time_s if summary else None,
        input_wait_share=summary.input_wait_share if summary else None,
        time_to_first_step_s=None if math.isnan(first_step_s) else first_step_s,
        training_time_s=summary.training_time_s if summary else None,
        total_time_s=steady_time() - job.started_at,
        peak_memory_bytes=[s.peak_memory_bytes for s in summaries],
        nonfinite_steps=summary.nonfinite_steps if summary else 0,
        sample_order=job.sample_order,
        config=config.to_dict(),
        config_hash=config.hash(),
        derived=_plain({**job.recipe.values(), **recording.derived}),
        data=data,
        environment={**facts, "workers": workers},
        environment_hash=environment_hash({"environment": facts["environment"], "hardware": hardware}),
        tracking_uri=without_password(tracking_uri),
        experiment_id=identity.experiment_id,
        run_id=identity.run_id,
        mlflow_link=identity.link,
        run_dir=without_password(folder.path),
        events=recording.events,
        resumed_after=recording.resumed_after,
        compilation=summary.compilation if summary else {},
        noise=summary.noise if summary else {},
        memory=[s.memory for s in summaries],
        start=summary.start if summary else {},
        best=_best(summary.best, folder) if summary else {},
        profile=run_profile(
            [s.profile for s in summaries if s.profile is not None],
            goodput=recording.goodput,
            traced_steps=job.trace.num_steps if job.trace is not None else 0,
        ),
        alerts=[dataclasses.asdict(alert) for alert in recording.alerts],
        evaluations={name: [[*point] for point in points] for name, points in recording.evaluations.items()},
        weights={name: dataclasses.asdict(stored) for name, stored in weights.items()},
        checkpoints=_checkpoints(config, folder) if status == "FINISHED" else {},
        attributes=summary.model.get("attributes", {}) if summary else {},
        marks=[EMULATED] if summary and summary.model.get("is_emulated") else [],
    )


def _best(best: dict[str, Any], folder: RunFolder) -> dict[str, Any]:
    """The best evaluation, with its checkpoint, if one was saved."""
    if not best:
        return {}
    path = None
    with contextlib.suppress(OSError, CheckpointError, Incomplete):
        catalog = Catalog.of_run(folder.path)
        if best["step"] in catalog.steps():
            path = catalog.stores[0].path(catalog.read(best["step"]).name)
    return {**best, "checkpoint": path}


def _checkpoints(config: RunConfig, folder: RunFolder) -> dict[str, str]:
    with contextlib.suppress(OSError, CheckpointError):
        kept = Catalog.of_run(folder.path, config.checkpoint.copy_path).complete()
        return {manifest.name: str(manifest.sha256) for manifest in kept}
    return {}


def point_metrics(record: RunRecord) -> dict[str, float]:
    """Values of the whole run for MLflow, one per name."""
    shown = (names.POINT_SAMPLES_PER_S, names.POINT_TOKENS_PER_S, names.TIME_TO_FIRST_STEP_S, names.PEAK_MEMORY_BYTES)
    rows = [Row(names.WORLD_SIZE, record.workers), *(row for row in record.rows() if row.metric in shown)]
    found = {row.name: float(row.value) for row in rows if row.value is not None and math.isfinite(row.value)}
    price = (record.config.get("study") or {}).get("price_per_worker_hour")
    return {
        **found,
        **(record.profile.figures() if record.profile is not None else {}),
        **cost_of(record.workers * _elapsed_s(record), price_per_worker_hour=price),
    }


def _elapsed_s(record: RunRecord) -> float:
    """Seconds of a run over all its attempts, as far as known."""
    goodput = record.profile.goodput if record.profile is not None else None
    return goodput.elapsed_s if goodput is not None and goodput.elapsed_s else record.total_time_s


def end_tags(record: RunRecord) -> dict[str, str]:
    """MLflow tags that are known only at the end, including the run's description as Markdown."""
    where_time_goes = verdict_of_run(record)
    is_known = where_time_goes.limit is not Limit.INCOMPLETE
    rows = {
        **{name: f"{value:.4g}" for name, value in record.metrics.items()},
        "verdict": record.verdict.splitlines()[0] if record.verdict else "",
        **({"where the time goes": where_time_goes.sentence} if is_known else {}),
        "workers": f"{record.workers} ({record.strategy})",
        "steps": record.steps,
        "samples/s": f"{record.samples_per_s:.4g}" if record.samples_per_s else "",
        "input wait": f"{record.input_wait_share:.2%}" if record.input_wait_share is not None else "",
        "sample order": record.sample_order,
        **({"alerts": record.alerts_in_words()} if record.alerts else {}),
        "files": f"`{record.run_dir}`",
    }
    note = "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    note += "\n\n| metric | unit | meaning |\n|---|---|---|\n"
    note += "\n".join(f"| {metric.name} | {metric.unit} | {metric.help} |" for metric in EXPLAINED)
    return {
        "scaleray.environment_hash": record.environment_hash,
        "scaleray.verdict": record.verdict[:500],
        "scaleray.limit": str(where_time_goes.limit),
        "scaleray.where_time_goes": where_time_goes.sentence[:500],
        "mlflow.note.content": note,
    }


def as_yaml(value: Mapping[str, Any]) -> str:
    """The mapping as YAML for a file next to the record, in the given order."""
    return yaml.safe_dump(_plain(value), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _distinct(hardware: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Distinct kinds of nodes, without the number of workers, which belongs to the topology."""
    return [kind for number, kind in enumerate(hardware) if kind not in hardware[:number]]
