"""Conclusions from a study's points in addition to curves: notes, and the planner's model as a law."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scaleray.common.printed import quantity
from scaleray.config import RunConfig
from scaleray.config.hardware.catalogue import CATALOGUE
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.config.strategy_traits import TRAITS
from scaleray.errors import UsageError, first_line
from scaleray.planner.answers.curve_law import Size, predicted_throughput
from scaleray.planner.cost.layout import Layout
from scaleray.planner.models.flop_count_as_model import from_workload
from scaleray.records.run_record import EMULATED
from scaleray.records.study_record import Curve, Point, StudyRecord
from scaleray.records.workload_profile import WorkloadProfile
from scaleray.studies import noise as study_noise
from scaleray.studies.curves.curves import GivenLaw
from scaleray.studies.curves.paired_rounds import launch_of
from scaleray.studies.curves.steady_state import LEAST_STEPS
from scaleray.studies.hardware import OVERSUBSCRIBED, RELAUNCHED
from scaleray.studies.point import NOT_STEADY
from scaleray.studies.study_options import MODES

KNOWN = tuple(name for name, traits in TRAITS.items() if not traits.trains_apart and not traits.splits_replica)
"""Strategies that the planner models as scaleray implements them."""
GRADIENT_BYTES = {"none": 4.0, "fp16": 2.0, "bf16": 2.0}
STATE_BYTES = {"sgd": 4, "lars": 4}


def planner_law(
    config: RunConfig,
    profile: WorkloadProfile | str,
    points: Sequence[Point],
    hardware: Sequence[Mapping[str, Any]],
    *,
    workers_per_node: int,
) -> GivenLaw:
    """The planner's law for a curve of these points, at least two.

    profile: of the model, or the reason for its absence. hardware: of the workers. Raises UsageError if there is no
    law."""
    base, *_, largest = sorted(points, key=lambda point: point.workers)
    _check(config, points)
    sizes = [_size(point) for point in points]
    if (beyond := _doubled(largest)) is not None:
        sizes.append(beyond)
    layout = Layout(
        sharding=TRAITS[largest.strategy].sharding,
        precision=_precision(config),
        is_mixed=config.precision.dtype != "fp32",
        data=config.degrees(largest.workers).replicate,
        gradient_bytes=GRADIENT_BYTES[config.compression.name],
        gather_bits=16 if config.gathered_dtype in ("bf16", "fp16") else 32,
        reduces_every_micro_batch=config.fsdp.accumulate == "sharded" and largest.strategy == "fsdp",
        optimizer_bytes=STATE_BYTES.get(config.optimizer.name, 8),
        compiled=config.compilation.what != "nothing",
    )
    if isinstance(profile, str) or not profile.flops:
        why = profile if isinstance(profile, str) else "it has no matrix product"
        raise UsageError.problem("The model's operations", f"were not counted: {why}")
    model = from_workload(profile, name=config.workload.name)
    node = _node(config, hardware, workers_per_node, most_workers=sizes[-1].workers)
    if node.network is None and largest.workers <= workers_per_node < sizes[-1].workers:
        # nothing is predicted beyond the node; the curve is drawn on as if it were larger, like those of the other laws
        node = dataclasses.replace(node, gpus_per_node=sizes[-1].workers)
    return GivenLaw("planner", predicted_throughput(model, layout, node, sizes, measured_step_s=base.step_time_s.value))


def _check(config: RunConfig, points: Sequence[Point]) -> None:
    marks = {mark for point in points for mark in point.marks}
    if EMULATED in marks:
        raise UsageError.problem("The model", "is emulated: its steps sleep instead of computing")
    if OVERSUBSCRIBED in marks:
        raise UsageError.problem("Workers", "share cores: the planner assumes separate cores for each")
    for strategy in (point.strategy for point in points):
        if strategy not in KNOWN:
            raise UsageError("strategy", strategy, f"the planner supports only {', '.join(KNOWN)}")
    if config.compression.name not in GRADIENT_BYTES:
        raise UsageError("compression.name", config.compression.name, "the cost of compression is unknown")
    if config.fine_tuning.lora_rank or config.fine_tuning.freeze:
        raise UsageError.problem("fine_tuning", "freezes parameters: the planner counts a gradient for every parameter")


def _size(point: Point) -> Size:
    return Size(
        workers=point.workers,
        global_batch_size=point.global_batch_size,
        micro_batch_size=point.micro_batch_size,
        accumulation_steps=point.accumulation_steps,
    )


def _doubled(largest: Point) -> Size | None:
    """Twice the workers of the largest point; None if a strong curve's batch cannot be divided among them."""
    workers, batch, micro = 2 * largest.workers, largest.global_batch_size, largest.micro_batch_size
    if largest.mode == "weak":
        return Size(
            workers=workers,
            global_batch_size=2 * batch,
            micro_batch_size=micro,
            accumulation_steps=largest.accumulation_steps,
        )
    if batch % workers:
        return None
    micro = min(micro, batch // workers)
    passes = -(-(batch // workers) // micro)
    return Size(workers=workers, global_batch_size=batch, micro_batch_size=micro, accumulation_steps=passes)


def _node(
    config: RunConfig, hardware: Sequence[Mapping[str, Any]], workers_per_node: int, *, most_workers: int
) -> Cluster:
    """One node of the workers' hardware, from the catalogue."""
    name = "cpu"
    if config.scale.gpus:
        names = [n for kind in hardware for n in (kind.get("accelerators") or {}).get("names", ())]
        if not names:
            raise UsageError.problem("The names of the workers' GPUs", "were not reported")
        name = names[0]
    gpu = CATALOGUE.find_gpu(name)
    network = CATALOGUE.find_network(gpu.network) if most_workers > workers_per_node and gpu.network else None
    return Cluster(
        gpu=gpu, gpus_per_node=workers_per_node, num_nodes=1, link=CATALOGUE.find_link(gpu.link), network=network
    )


def _precision(config: RunConfig) -> str:
    return "tf32" if config.precision.tf32 and config.precision.dtype == "fp32" else config.precision.dtype


def points_of_others(more: Iterable[StudyRecord], own: Sequence[Point], modes: Sequence[str]) -> list[Point]:
    """Points of other studies on curves of these modes that this study lacks; the first if there are several."""
    found = {(point.mode, point.workers): point for point in own}
    for other in more:
        for point in (at.point for curve in other.curves for at in curve.points if curve.mode in modes):
            reused = dataclasses.replace(point, reused_from=point.reused_from or other.name)
            found.setdefault((point.mode, point.workers), reused)
    return list(found.values())[len(own) :]


def planner_laws(
    config: RunConfig,
    profile: WorkloadProfile | str,
    points: Sequence[Point],
    hardware: Sequence[Mapping[str, Any]],
    *,
    workers_per_node: int,
) -> tuple[list[GivenLaw], str]:
    """The planner's model as a law for these points, or a note on why it cannot be used. See `planner_law`."""
    if len(points) < 2:
        return [], ""
    try:
        return [planner_law(config, profile, points, hardware, workers_per_node=workers_per_node)], ""
    except UsageError as exc:
        return [], f"The planner's model is not used as a law: {first_line(exc).rstrip('.')}."


def words_of(curves: Sequence[Curve], points: Sequence[Point], target: str, notes: Iterable[str]) -> list[str]:
    """Verdict of every curve, and further notes. notes: more sentences; empty ones are ignored."""
    noisy = study_noise.surest(points)
    return [
        *(curve.verdict for curve in curves if curve.verdict),
        *about_target(target, points),
        *about_launches(points),
        *about_steadiness(points),
        *([study_noise.sentence(noisy)] if noisy else []),
        *(note for note in dict.fromkeys(notes) if note),
    ]


def about_target(target: str, points: Sequence[Point]) -> list[str]:
    """Sentence on trainings that missed the target, if any."""
    trained = [(point, point.to_target) for point in points if point.to_target is not None]
    missed = [(point, result) for point, result in trained if not result.is_reached]
    if not missed:
        return []
    sign = 1 if "<=" in target else -1
    point, nearest = min(missed, key=lambda pair: sign * pair[1].value if math.isfinite(pair[1].value) else math.inf)
    workers = quantity(point.workers, "worker")
    last = f"{nearest.metric} {nearest.value:.4g} after {nearest.samples} samples on {workers}"
    if len(missed) == len(trained):
        return [
            f"The target {target} was never reached; the closest result is {last}. Train longer (stop.after), or lower "
            f"the target."
        ]
    names = ", ".join(
        f"{point.mode} {quantity(point.workers, 'worker')} (batch {point.global_batch_size})" for point, _ in missed
    )
    return [f"The target {target} was missed on {names}; the closest result is {last}."]


def about_launches(points: Sequence[Point]) -> list[str]:
    """Sentence on points of one curve from different launches, if any."""
    apart: list[str] = []
    for mode in MODES:
        own = [(point, {launch_of(name) for name in point.rounds} - {""}) for point in points if point.mode == mode]
        known = [launches for point, launches in own if launches or RELAUNCHED in point.marks]
        if len(known) > 1 and not set.intersection(*known):
            apart.append(mode)
    if not apart:
        return []
    return [
        f"Sizes of the {' and the '.join(apart)} curve were measured by different launches, and the intervals do not "
        "include differences between launches: to compare them, measure all in one (--force, without --relaunch)."
    ]


def about_steadiness(points: Sequence[Point]) -> list[str]:
    """Sentence that explains the mark of points that are not steady, if any."""
    unsteady = [f"{point.mode} {quantity(point.workers, 'worker')}" for point in points if NOT_STEADY in point.marks]
    if not unsteady:
        return []
    return [
        f"Not steady ({', '.join(unsteady)}): in at least half of the measurements, steps became slower or faster, or "
        f"fewer than {LEAST_STEPS} followed the warm-up. End other programs, or give more --steps."
    ]
