"""A step measured on a few GPUs, to which a plan's compute is scaled.

It comes from the record of a study (its smallest point) or a run, or is given directly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.config.hardware.lookup import Catalogue
from scaleray.config.strategy_traits import traits_of
from scaleray.errors import ConfigError, UsageError
from scaleray.planner.answers.calibration import calibrate, calibrate_link
from scaleray.planner.cost.block_pass import Measured
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.uncertainty import Anchor
from scaleray.planner.models.block_counts import ModelProfile
from scaleray.records.read import read_record
from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import Point, StudyRecord
from scaleray.records.sweep_record import SweepRecord


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measured step time with its layout, whose precision is set to the plan's."""

    step_time_s: float
    num_gpus: int
    layout: Layout
    gpu: str | None = None
    """Driver's name of the GPU used; None if not recorded."""
    larger: Measurement | None = None
    """The next larger point of the same study, which determines the link."""


def read_measurement(path: Path) -> Measurement | None:
    """Read the smallest point of a study's record, or a run's record; a folder means its record.json. None for a sweep,
    whose trials share machines.

    Raises UsageError if the file is not a record, or has no step time.
    """
    try:
        record = read_record(path)
        if isinstance(record, SweepRecord):
            return None
        if isinstance(record, StudyRecord):
            found = _of_study(record)
            about = record.conditions.environment
        else:
            found, about = _of_run(record), record.environment
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError.problem(
            "--from-run", f"{path} is not a record of a study or run: {type(exc).__name__} {exc}"
        ) from exc
    names = (about.get("accelerators") or {}).get("names") or ()
    # missing in an old record, and in one of processors
    return replace(found, gpu=str(names[0]) if names else None)


def measurement_of(
    found: Measurement, model: ModelProfile, cluster: Cluster, *, precision: str, fused_attention: bool
) -> tuple[Measured, Cluster]:
    """Return the scale of the compute, and the cluster with its link as measured by the next larger point on a node.

    Raises ConfigError unless the measurement ran on GPUs of the cluster's type.
    """
    if found.num_gpus > cluster.gpus_per_node:
        raise ConfigError.problem(
            "--from-run",
            f"was measured on {found.num_gpus} workers: a measurement must fit on one node of "
            f"{cluster.gpus_per_node} GPUs",
        )

    def part(one: Measurement) -> tuple[Layout, Cluster]:
        layout = replace(one.layout, precision=precision, is_mixed=precision not in ("fp32", "tf32"), gradient_bytes=4)
        board = cluster.board_gpus or cluster.gpus_per_node
        return layout, replace(cluster, gpus_per_node=one.num_gpus, num_nodes=1, network=None, board_gpus=board)

    measured = calibrate(model, *part(found), found.step_time_s, fused_attention=fused_attention)
    larger = found.larger
    if larger is None or larger.num_gpus > cluster.gpus_per_node:
        return measured, cluster
    link = calibrate_link(model, *part(larger), larger.step_time_s, measured=measured, fused_attention=fused_attention)
    return measured, replace(cluster, link=link)


def anchor_of(found: Measurement, cluster: Cluster, catalogue: Catalogue) -> Anchor:
    """Return the measured point for the intervals, assuming the cluster's type of GPU if the record has none.

    A GPU that is not in the catalogue keeps the name from the record."""
    gpu = cluster.gpu.name
    if found.gpu is not None:
        try:
            gpu = catalogue.find_gpu(found.gpu).name
        except UsageError:
            gpu = found.gpu
    return Anchor(found.layout, gpu)


def _of_study(record: StudyRecord) -> Measurement:
    points = sorted((at.point for curve in record.curves for at in curve.points), key=lambda point: point.workers)
    if not points:
        raise ValueError("the study has no points")
    smallest = points[0]
    larger = next((point for point in points if point.workers > smallest.workers), None)
    return replace(_of_point(smallest), larger=_of_point(larger) if larger else None)


def _of_point(point: Point) -> Measurement:
    layout = _layout(point.strategy, point.workers, point.micro_batch_size, point.accumulation_steps)
    return Measurement(step_time_s=point.step_time_s.value, num_gpus=point.workers, layout=layout)


def _of_run(record: RunRecord) -> Measurement:
    if not record.step_time_s:
        raise ValueError("the run was too short for a steady step time")
    micro = int(record.derived["micro_batch_size"])
    passes = max(1, round(int(record.derived["global_batch_size"]) / (record.workers * micro)))
    return Measurement(
        step_time_s=record.step_time_s,
        num_gpus=record.workers,
        layout=_layout(record.strategy, record.workers, micro, passes),
    )


def _layout(strategy: str, workers: int, micro_batch: int, passes: int) -> Layout:
    sharding = traits_of(strategy).sharding
    return Layout(
        data=workers,
        shard=workers if sharding == "zero3" else 1,
        micro_batch=micro_batch,
        accumulation=passes,
        sharding=sharding,
    )
