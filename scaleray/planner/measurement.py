"""What was measured on a GPU or a few: the step that a plan's compute is scaled to.

Read from a study's record (its smallest point) or a run's, or given by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaleray.errors import ConfigError, UsageError
from scaleray.parsing import load_json
from scaleray.planner.calibration import calibrate, calibrate_link
from scaleray.planner.hardware import Catalogue, Cluster
from scaleray.planner.layout import Layout, Sharding
from scaleray.planner.profile import ModelProfile
from scaleray.planner.step_time import Measured
from scaleray.planner.uncertainty import Anchor

SHARDINGS: dict[str, Sharding] = {"zero1": "zero1", "fsdp": "zero3"}


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A step time with the layout it was measured with; its precision is set to the plan's."""

    step_time_s: float
    num_gpus: int
    layout: Layout
    gpu: str | None = None
    """Driver's name of what it was measured on; None where the record does not say."""
    larger: Measurement | None = None
    """The next larger point of the same study, which tells the link."""


def read_measurement(path: Path) -> Measurement | None:
    """The smallest point of a study's record, or a run's record; of a folder, its record.json. None for a sweep, whose trials share
    their workers with each other.

    Raises UsageError for a file that is neither, or holds no step time.
    """
    path = path / "record.json" if path.is_dir() else path
    try:
        record = load_json(path.read_text())
        if isinstance(record, dict) and "trials" in record:
            return None
        points = (
            [one["point"] for curve in record.get("curves", ()) for one in curve["points"]]
            if isinstance(record, dict)
            else []
        )
        if points:
            ordered = sorted(points, key=lambda point: point["workers"])
            next_one = next((point for point in ordered if point["workers"] > ordered[0]["workers"]), None)
            return replace(_of_point(ordered[0]), gpu=_gpu_of(record), larger=_of_point(next_one) if next_one else None)
        return replace(_of_run(record), gpu=_gpu_of(record))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError(
            "--from-run", str(path), f"it is no record of a study or run: {type(exc).__name__} {exc}"
        ) from exc


def measurement_of(
    found: Measurement, model: ModelProfile, cluster: Cluster, *, precision: str, fused_attention: bool
) -> tuple[Measured, Cluster]:
    """The scale of the compute, and the cluster with its link as the next larger point on the same node shows it.

    The measurement must have been made on GPUs of the cluster's kind. Raises ConfigError where it cannot have been.
    """
    if found.num_gpus > cluster.gpus_per_node:
        raise ConfigError(
            "--from-run",
            f"{found.num_gpus} workers",
            f"a measurement must fit on one node of {cluster.gpus_per_node} GPUs",
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
    """The measured point for the intervals; on the cluster's kind of GPU where the record does not say, or names one that nobody knows."""
    gpu = cluster.gpu.name
    if found.gpu is not None:
        try:
            gpu = catalogue.find_gpu(found.gpu).name
        except UsageError:
            gpu = found.gpu
    return Anchor(found.layout, gpu)


def _gpu_of(record: dict[str, Any]) -> str | None:
    """What a run's environment or a study's conditions say; None for an old record, and for processors."""
    about = record.get("environment") or (record.get("conditions") or {}).get("environment") or {}
    names = (about.get("accelerators") or {}).get("names") or ()
    return str(names[0]) if names else None


def _of_point(point: dict[str, Any]) -> Measurement:
    return Measurement(
        step_time_s=float(point["step_time_s"]["value"]), num_gpus=int(point["workers"]),
        layout=_layout(point["strategy"], int(point["workers"]), int(point["micro_batch_size"]), int(point["accumulation_steps"])),
    )  # fmt: skip


def _of_run(record: dict[str, Any]) -> Measurement:
    derived = record["derived"]
    if not record["step_time_s"]:
        raise ValueError("the run was too short for a steady step time")
    workers = int(record["workers"])
    micro = int(derived["micro_batch_size"])
    passes = max(1, round(int(derived["global_batch_size"]) / (workers * micro)))
    return Measurement(
        step_time_s=float(record["step_time_s"]),
        num_gpus=workers,
        layout=_layout(record["strategy"], workers, micro, passes),
    )


def _layout(strategy: str, workers: int, micro_batch: int, passes: int) -> Layout:
    sharding = SHARDINGS.get(strategy, "none")
    return Layout(
        data=workers,
        shard=workers if sharding == "zero3" else 1,
        micro_batch=micro_batch,
        accumulation=passes,
        sharding=sharding,
    )
