"""A team's own measured steps, from which the planner learns: the counted costs of each model, and a point for each
measured number of workers."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.config.hardware.lookup import Catalogue
from scaleray.config.strategy_traits import TRAITS, traits_of
from scaleray.errors import UsageError, first_line
from scaleray.planner.cost.layout import Layout
from scaleray.planner.models.block_counts import ModelProfile
from scaleray.planner.models.flop_count_as_model import from_workload
from scaleray.records.study_record import Point, StudyRecord
from scaleray.records.workload_profile import WorkloadProfile

STATE_BYTES = {"sgd": 4, "lars": 4}
"""Bytes of optimizer state per parameter, if not Adam's 8."""


@dataclass(frozen=True, kw_only=True)
class TeamPoint:
    """One measured step. study: name of the study that measured it; points of the same study were measured together."""

    study: str
    model: str
    """Key of the model's costs."""
    gpu: str
    """Name in the planner's catalogue."""
    workers: int
    workers_per_node: int
    strategy: str
    micro_batch: int
    accumulation: int
    precision: str
    optimizer: str = "adamw"
    compiled: bool = False
    step_time_s: float
    measured_at: float
    run_id: str = ""

    @property
    def layout(self) -> Layout:
        """Layout of the model."""
        sharding = traits_of(self.strategy).sharding
        return Layout(
            data=self.workers,
            shard=self.workers if sharding == "zero3" else 1,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            sharding=sharding,
            precision=self.precision,
            is_mixed=self.precision not in ("fp32", "tf32"),
            gradient_bytes=4,
            optimizer_bytes=STATE_BYTES.get(self.optimizer, 8),
            compiled=self.compiled,
        )

    def cluster(self, catalogue: Catalogue = CATALOGUE) -> Cluster:
        """Hardware of a point, assumed to be the usual machine with this GPU. Raises UsageError for an unknown GPU, and
        for several nodes with an unknown network.
        """
        gpu = catalogue.find_gpu(self.gpu)
        num_nodes = math.ceil(self.workers / self.workers_per_node)
        if num_nodes > 1 and not gpu.network:
            raise UsageError.problem("The network between nodes", f"is unknown: {gpu.name} has no usual one")
        return Cluster(
            gpu=gpu,
            gpus_per_node=min(self.workers, self.workers_per_node),
            num_nodes=num_nodes,
            link=catalogue.find_link(gpu.link),
            network=catalogue.find_network(gpu.network) if num_nodes > 1 else None,
            board_gpus=max(self.workers_per_node, gpu.gpus_per_node),
        )


@dataclass(frozen=True)
class TeamPoints:
    """Points, with the costs of their models by key. skipped: unusable measurements, with reasons."""

    points: tuple[TeamPoint, ...]
    models: Mapping[str, WorkloadProfile]
    skipped: tuple[str, ...] = field(default=(), compare=False)

    def profile(self, key: str) -> ModelProfile:
        """The model with this key, in the planner's form."""
        return from_workload(self.models[key], name=key)


def points_of(records: Sequence[StudyRecord]) -> TeamPoints:
    """Return these studies' points for the planner, each measured point once, with its model's costs if counted."""
    points: dict[str, TeamPoint] = {}
    models: dict[str, WorkloadProfile] = {}
    skipped: list[str] = []
    for record in records:
        try:
            key = model_key(record.config)
            if record.model_profile is None:
                raise UsageError.problem("The model's operations", "were not counted")
            models.setdefault(key, TypeAdapter(WorkloadProfile).validate_python(record.model_profile))
            _check_config(record.config)
            for point in (at.point for curve in record.curves for at in curve.points):
                if point.reused_from:  # it belongs to the study that measured it
                    continue
                if why := _why_not(point):
                    skipped.append(f"{record.name}, {point.workers} workers: {why}")
                    continue
                found = _point(record, point, key)
                points.setdefault(f"{found.study} {found.workers} {found.layout}", found)
        except (UsageError, ValueError, KeyError, TypeError) as exc:
            skipped.append(f"{record.name}: {first_line(exc)}")
    kept = {key: profile for key, profile in models.items() if any(p.model == key for p in points.values())}
    return TeamPoints(tuple(points.values()), kept, tuple(skipped))


def model_key(config: Mapping[str, Any]) -> str:
    """Key shared by configs that train the same model: the workload with its arguments."""
    workload = config.get("workload") or {}
    args = json.dumps(workload.get("args") or {}, sort_keys=True)
    return f"{str(workload.get('name')).rpartition('/')[2]} {args}"


def precision_of(config: Mapping[str, Any]) -> str:
    """The planner's name for a config's precision."""
    precision = config.get("precision") or {}
    dtype = str(precision.get("dtype", "fp32"))
    return "tf32" if precision.get("tf32") and dtype == "fp32" else dtype


def _check_config(config: Mapping[str, Any]) -> None:
    method = (config.get("compression") or {}).get("name", "none")
    if method != "none":
        raise UsageError("compression.name", method, "the cost of compression is unknown")
    tuning = config.get("fine_tuning") or {}
    if tuning.get("lora_rank") or tuning.get("freeze"):
        raise UsageError.problem(
            "fine_tuning", "freezes parameters, but the planner counts a gradient for each of them"
        )


def _why_not(point: Point) -> str:
    traits = TRAITS.get(point.strategy)
    if point.marks:
        return f"it is {', '.join(point.marks)}"
    if traits is None or traits.trains_apart or traits.splits_replica:
        return f"the planner does not model the steps of {point.strategy}"
    return ""


def _point(record: StudyRecord, point: Point, key: str) -> TeamPoint:
    config, topology = record.config, record.conditions.topology
    has_gpus = bool((config.get("scale") or {}).get("gpus_per_worker"))
    kinds = [kind for kind in topology.get("workers") or () if isinstance(kind, Mapping)]
    names = [str(n) for kind in kinds for n in (kind.get("accelerators") or {}).get("names") or ()]
    if has_gpus and not names:
        raise UsageError.problem("The names of the workers' GPUs", "were not recorded")
    resource = "gpus" if has_gpus else "cpus"
    per_node = max((int(node.get(resource) or 0) for node in topology.get("nodes") or ()), default=0)
    gpu = CATALOGUE.find_gpu(names[0] if has_gpus else "cpu")
    return TeamPoint(
        study=record.name,
        model=key,
        gpu=gpu.name,
        workers=point.workers,
        workers_per_node=max(1, per_node),
        strategy=point.strategy,
        micro_batch=point.micro_batch_size,
        accumulation=point.accumulation_steps,
        precision=precision_of(config),
        optimizer=str((config.get("optimizer") or {}).get("name", "adamw")),
        compiled=(config.get("compilation") or {}).get("what", "nothing") != "nothing",
        step_time_s=point.step_time_s.value,
        measured_at=point.measured_at,
        run_id=point.run_id,
    )
