"""Make the planner's question from the options of `scaleray plan`: model, cluster, batch and measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scaleray.common.options import words_of
from scaleray.config import RunConfig, load_config
from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.cluster_file import is_cluster_file, read_cluster_file
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.config.hardware.hardware_file import read_hardware_file
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.config.hardware.lookup import Catalogue
from scaleray.config.hardware.measured_collectives import read_measured_tables
from scaleray.config.loading import without_degrees
from scaleray.errors import ConfigError, UsageError
from scaleray.planner.answers.measurement import Measurement, anchor_of, measurement_of, read_measurement
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.ask.plan_options import LayoutOptions
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.uncertainty import Anchor
from scaleray.planner.models.block_counts import ModelProfile
from scaleray.planner.models.names import find_model

if TYPE_CHECKING:
    from scaleray.planner.answers.learned_constants import Lesson
    from scaleray.planner.answers.team_points import TeamPoints
    from scaleray.planner.cost.block_pass import Measured

OPTIMIZER_BYTES = {"adam": 8, "adamw": 8, "lamb": 8, "sgd": 0, "momentum": 4, "lars": 4}
TRACKING = "tracking"
"""Value of --learn for the MLflow in which scaleray records by default."""
USUAL_TOKENS = 4_000_000
"""Default tokens of a step for transformers by name, as for Llama 2 (Touvron et al. 2023, arXiv:2307.09288, section 2).
"""
USUAL_SAMPLES = 32
"""Default samples of a step per GPU for other models by name: 256 on 8, as in Goyal et al. 2017, arXiv:1706.02677."""


def question_of(
    options: LayoutOptions,
    *,
    rank_by: str = "throughput",
    config: Path | None = None,
    overrides: Sequence[str] = (),
    cluster: Cluster | None = None,
) -> Question:
    """Return the question to the planner. cluster: None for that of the options. Raises ConfigError or UsageError if an
    input is missing, unknown or impossible."""
    if overrides and config is None:
        raise ConfigError.problem(
            overrides[0],
            "is not an option of scaleray plan; config keys require -c",
            "scaleray plan --help lists the options",
        )
    resolved = load_config(config, flags=overrides, planned=without_degrees) if config else None
    own = read_hardware_file(Path(options.hardware)) if options.hardware else None
    catalogue = CATALOGUE.with_entries(own) if own is not None else CATALOGUE
    target = cluster or _cluster(options, catalogue)
    if options.collectives is not None:
        target = dataclasses.replace(target, measured=read_measured_tables(Path(options.collectives)))
    shape = _model(options, resolved, config, overrides)
    batch = options.global_batch
    if batch is None:
        batch = _batch_of(resolved, shape, target.num_gpus)
        if resolved is None:
            note = f"{batch} samples per step, since --global-batch was not given"
            target = dataclasses.replace(target, notes=(*target.notes, note))
    wanted = options.precision or _precision_of(resolved) or ("bf16" if "bf16" in target.gpu.peak_tflops else "fp16")
    target.gpu.peak_flops(wanted)  # raises for an unknown precision
    is_fused = "bf16" in target.gpu.peak_tflops and wanted not in ("fp32", "tf32")
    found, scaled, anchor, lesson = _measurement(options), None, None, None
    if found is not None:
        scaled, target = measurement_of(found, shape, target, precision=wanted, fused_attention=is_fused)
        anchor = anchor_of(found, target, catalogue)
    if options.learn is not None:
        if found is not None:
            raise ConfigError.problem("--learn", "cannot be combined with a measured step", "omit one of them")
        lesson = _lesson(options.learn, shape, target, config=resolved, catalogue=catalogue)
        scaled, anchor = _used(lesson)
    named = options.optimizer or (resolved.optimizer.name if resolved is not None else "adam")
    return Question(
        model=shape,
        cluster=target,
        global_batch=batch,
        precision=wanted,
        strategies=tuple(words_of(options.strategies)) or Question.strategies,
        optimizer_bytes=OPTIMIZER_BYTES.get(named, 8),
        fused_attention=is_fused,
        compiled=options.compiled or bool(resolved and resolved.compilation.what != "nothing"),
        measured=scaled,
        anchor=anchor,
        learned=tuple(lesson.lines()) if lesson is not None else (),
        input_samples_per_s=options.input_rate,
        config=resolved,
        rank_by=rank_by,
    )


def _measurement(options: LayoutOptions) -> Measurement | None:
    if options.from_run is not None:
        return read_measurement(Path(options.from_run))
    step_time, micro_batch = options.step_time, options.micro_batch
    if step_time is None:
        return None
    if not step_time > 0 or not micro_batch or micro_batch < 1:
        raise ConfigError.problem(
            "--step-time and --micro-batch", "must both be given and positive, since they describe one step on one GPU"
        )
    return Measurement(step_time_s=step_time, num_gpus=1, layout=Layout(micro_batch=micro_batch))


def _cluster(options: LayoutOptions, catalogue: Catalogue) -> Cluster:
    text, here, address, network = options.cluster, options.here, options.address, options.network
    if address is not None and not here:
        raise ConfigError("--address", address, "it applies only with --here", "add --here")
    if network is not None and address is None:
        raise ConfigError(
            "--network", network, "it needs --here and --address", "--cluster takes net=, as in h100:8x16,net=8x400G"
        )
    if here and text is not None:
        raise ConfigError.problem("--cluster", "cannot be combined with --here", "omit one of them")
    if here:
        from scaleray.planner.ask.this_machine import ray_cluster, this_machine

        return this_machine(catalogue) if address is None else ray_cluster(address, catalogue, network=network)
    if text is None:
        raise ConfigError("--cluster", None, "", "for example --cluster h100:8x16, or --here for this machine")
    return read_cluster_file(Path(text), catalogue) if is_cluster_file(text) else parse_cluster(text, catalogue)


def _model(
    options: LayoutOptions, config: RunConfig | None, path: Path | None, overrides: Sequence[str]
) -> ModelProfile:
    if options.profile is not None:
        from scaleray.planner.models.flop_count_as_model import read_profile

        return read_profile(Path(options.profile))
    if options.model is not None:
        return find_model(options.model, sequence=options.sequence)
    if config is None or path is None:
        raise ConfigError("--model", None, "", "for example --model llama-3-8b, or -c FILE, whose workload is counted")
    from scaleray.planner.ask.flop_count_cache import counted

    return counted(config, path, overrides)


def _batch_of(config: RunConfig | None, model: ModelProfile, num_gpus: int) -> int:
    """Samples of a step: the config's, or by default a multiple of the GPUs near USUAL_TOKENS, or USUAL_SAMPLES per
    GPU."""
    if config is None:
        each = USUAL_TOKENS / model.tokens_per_sample / num_gpus if model.tokens_per_sample > 1 else USUAL_SAMPLES
        return max(1, round(each)) * num_gpus
    if config.batch.unit == "tokens":
        return max(1, config.batch.global_size // model.tokens_per_sample)
    return config.batch.global_size


def _precision_of(config: RunConfig | None) -> str | None:
    if config is None:
        return None
    return "tf32" if config.precision.tf32 else {"fp64": "fp32"}.get(config.precision.dtype, config.precision.dtype)


def _lesson(
    where: str, model: ModelProfile, cluster: Cluster, *, config: RunConfig | None, catalogue: Catalogue
) -> Lesson:
    """Return the corrections for this question from the available points. config: of the planned workload; None for a
    model by name. Raises UsageError if there are none for this type of GPU.
    """
    from scaleray.planner.answers.learned_constants import learn  # imports scipy
    from scaleray.planner.answers.team_points import model_key

    key = None if config is None else model_key(config.to_dict())
    return learn(_team_points(where), model, cluster, key=key, catalogue=catalogue)


def _used(lesson: Lesson) -> tuple[Measured | None, Anchor | None]:
    """Return the factors for the plan, and its model's nearest point, if any, to narrow the intervals; None if they do
    not predict better than data sheets."""
    if not lesson.is_used:
        return None, None
    nearest = lesson.nearest
    return lesson.measured, Anchor(nearest.layout, nearest.gpu) if lesson.is_of_model else None


def _team_points(where: str) -> TeamPoints:
    if where != TRACKING and "://" not in where:
        raise UsageError("--learn", where, f"it must be {TRACKING}, or MLflow's URI such as sqlite:////runs/mlflow.db")
    from scaleray.planner.ask.team_points_in_mlflow import points_in_mlflow

    return points_in_mlflow(None if where == TRACKING else where)
