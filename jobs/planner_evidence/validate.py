"""How well the planner predicts what other people measured, row by row, beside the model that knows nothing.

Each row is predicted twice: from data sheets alone, and with compute and communication calibrated on the smallest point
of its own series, which is what a user can measure on one GPU or node. The trivial model says that throughput per GPU
stays what it is at that smallest point.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jobs.planner_evidence.pollux import NUM_PARAMETERS, PolluxModel, fit_pollux
from jobs.planner_evidence.published.rows import Observation
from scaleray.planner.answers.calibration import calibrate
from scaleray.planner.cost.block_pass import Measured
from scaleray.planner.cost.constants import DEFAULT, Constants
from scaleray.planner.cost.memory import HEADROOM, memory
from scaleray.planner.cost.step_time import StepTime, step_time
from scaleray.planner.cost.uncertainty import Anchor, Reason, doubts, interval, reasons
from scaleray.records.text.units import GIB


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A row with its predictions.

    Times in seconds, memory in bytes; None where a prediction cannot be made or compared.
    """

    seen: Observation
    from_sheets_s: float | None
    anchored_s: float | None
    """Predicted step time, calibrated on the anchor; None for the row that is the anchor itself."""
    trivial_s: float | None
    pollux_s: float | None
    is_pollux_fitted: bool
    """Whether the row was among those that Pollux's model was fitted to."""
    efficiency: float | None
    """Measured efficiency against the anchor, as a share: throughput per GPU over the anchor's."""
    anchored_efficiency: float | None
    memory_bytes: float | None
    spare_share: float | None
    """Share of the card's memory that the prediction leaves over; negative where it does not fit, None where nothing is
    known."""
    reasons: tuple[Reason, ...]
    """Why the interval of the prediction with the anchor is wider than the narrowest."""
    parts: StepTime | None = None


def log_error(predicted: float, measured: float) -> float:
    """log(measured / predicted): 0.1 is about 10 % slower than predicted."""
    return math.log(measured / predicted)


def judge(
    seen: Sequence[Observation], constants: Constants = DEFAULT, *, with_pollux: bool = True, with_memory: bool = True
) -> list[Judged]:
    """Every observation with its predictions, in the order given."""
    groups: dict[tuple[str, ...], list[Observation]] = defaultdict(list)
    for one in seen:
        groups[one.series].append(one)
    judged: dict[int, Judged] = {}
    for group in groups.values():
        pollux = _pollux(group) if with_pollux else None
        anchored: dict[int, Measured] = {}
        for one in group:
            judged[id(one)] = _judge(one, _anchor(one, group), anchored, pollux, constants, with_memory)
    return [judged[id(one)] for one in seen]


def _judge(
    one: Observation,
    anchor: Observation | None,
    anchored: dict[int, Measured],
    pollux: tuple[PolluxModel, int] | None,
    constants: Constants,
    with_memory: bool,
) -> Judged:
    sheets = _predict(one, None, constants) if one.model.has_flops and one.step_time_s else None
    with_anchor = trivial = efficiency = predicted_efficiency = pollux_s = None
    if anchor is not None and anchor is not one and one.step_time_s and anchor.step_time_s:
        if id(anchor) not in anchored:
            anchored[id(anchor)] = calibrate(
                anchor.model,
                anchor.layout,
                anchor.cluster,
                anchor.step_time_s,
                fused_attention=anchor.fused_attention,
                constants=constants,
            )
        with_anchor = _predict(one, anchored[id(anchor)], constants)
        rate = anchor.layout.global_batch / anchor.step_time_s / anchor.num_gpus
        trivial = one.layout.global_batch / (rate * one.num_gpus)
        efficiency = trivial / one.step_time_s
        predicted_efficiency = trivial / with_anchor.total_s
    if pollux is not None and one.step_time_s:
        pollux_s = pollux[0].step_time_s(one.cluster.num_nodes, one.num_gpus, one.layout.micro_batch)
    best = with_anchor or sheets
    share = best.exposed_comm_s / best.total_s if best else 0.0
    needed = memory(one.model, one.layout) if with_memory and one.model.has_flops else None
    needed_bytes = None
    if needed is not None:
        needed_bytes = {
            "allocated": needed.allocated_bytes,
            "reserved": needed.reserved_bytes,
            "device": needed.device_bytes,
        }[one.memory_kind]
    return Judged(
        seen=one,
        from_sheets_s=sheets.total_s if sheets else None,
        anchored_s=with_anchor.total_s if with_anchor else None,
        trivial_s=trivial,
        pollux_s=pollux_s,
        is_pollux_fitted=pollux is not None and one.num_gpus <= pollux[1],
        efficiency=efficiency,
        anchored_efficiency=predicted_efficiency,
        memory_bytes=needed_bytes if one.memory_bytes or one.out_of_memory else None,
        spare_share=None
        if needed is None
        else needed.spare_bytes(one.cluster.gpu) / (one.cluster.gpu.memory_gib * GIB),
        parts=best,
        reasons=reasons(anchor_of(anchor), one.layout, one.cluster, exposed_share=share)
        if with_anchor and anchor
        else (),
    )


def _predict(one: Observation, measured: Measured | None, constants: Constants) -> StepTime:
    return step_time(
        one.model, one.layout, one.cluster, measured=measured, fused_attention=one.fused_attention, constants=constants
    )


def _anchor(one: Observation, group: Sequence[Observation]) -> Observation | None:
    """The smallest point of the series, and of those the one whose recomputation, degrees and micro-batch are most like
    this row's.

    A row that is as small itself is asked from its neighbour of another layout: from one measured layout to the next.
    """
    timed = [other for other in group if other.step_time_s]
    if not timed:
        return None
    smallest = min(other.num_gpus for other in timed)
    candidates = [other for other in timed if other.num_gpus == smallest]
    if one.num_gpus == smallest:
        if one.is_trace:
            return None  # traces at one GPU are the profile
        candidates = [other for other in candidates if other.layout != one.layout]
    return nearest(one, candidates)


def nearest(one: Observation, candidates: Sequence[Observation]) -> Observation | None:
    """The candidate whose recomputation, degrees and micro-batch are most like those of `one`; None of none."""
    return min(
        candidates,
        default=None,
        key=lambda other: (
            other.layout.checkpointing != one.layout.checkpointing,
            abs(math.log(other.layout.pipeline / one.layout.pipeline))
            + abs(math.log(other.layout.tensor / one.layout.tensor)),
            abs(math.log(other.layout.micro_batch / one.layout.micro_batch)),
            abs(math.log(other.layout.accumulation / one.layout.accumulation)),
        ),
    )


def _pollux(group: Sequence[Observation]) -> tuple[PolluxModel, int] | None:
    """Pollux's model fitted to the points up to half of the largest, for traces only; None where these are too few for
    its parameters."""
    if not all(one.is_trace for one in group) or len(group) < 12:
        return None
    half = max(one.num_gpus for one in group) // 2
    points = [
        (one.cluster.num_nodes, one.num_gpus, float(one.layout.micro_batch), one.step_time_s or 0.0)
        for one in group
        if one.num_gpus <= half
    ]
    return (fit_pollux(points), half) if len(points) >= NUM_PARAMETERS else None


@dataclass(frozen=True, kw_only=True)
class Score:
    """A source's or family's line of the table.

    Errors are shares; efficiency in points; None where there are no such rows.
    """

    name: str
    num_rows: int
    num_sheets: int
    sheets_median: float | None
    sheets_p90: float | None
    num_anchored: int
    anchored_median: float | None
    anchored_p90: float | None
    trivial_median: float | None
    trivial_p90: float | None
    num_bending: int
    """Rows whose measured efficiency is under 0.8: the curve bends."""
    bending_mean: float | None
    bending_trivial_mean: float | None
    efficiency_median_points: float | None
    pollux_median: float | None
    anchored_where_pollux_median: float | None
    num_memory: int
    memory_median: float | None
    memory_p90: float | None
    num_out_of_memory: int
    num_out_of_memory_right: int
    inside_share: float | None
    sheets_inside_share: float | None
    rank_correlation: float | None
    regret: float | None


def scores(judged: Sequence[Judged], by: Callable[[Judged], str]) -> list[Score]:
    """One line for each value of `by`, in alphabetical order."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        groups[by(one)].append(one)
    return [score(name, groups[name]) for name in sorted(groups)]


def score(name: str, judged: Sequence[Judged]) -> Score:
    """All of `judged` in one line."""
    sheets = [
        (one, abs_error(one.from_sheets_s, one.seen.step_time_s))
        for one in judged
        if one.from_sheets_s and one.seen.step_time_s
    ]
    anchored = [
        (one, abs_error(one.anchored_s, one.seen.step_time_s))
        for one in judged
        if one.anchored_s and one.seen.step_time_s
    ]
    trivial = [abs_error(one.trivial_s, one.seen.step_time_s) for one, _ in anchored]
    bending = [one for one, _ in anchored if one.efficiency is not None and one.efficiency < 0.8]
    beyond = [one for one, _ in anchored if one.pollux_s and not one.is_pollux_fitted]
    memories = [
        abs_error(one.memory_bytes, one.seen.memory_bytes)
        for one in judged
        if one.memory_bytes and one.seen.memory_bytes and not one.seen.out_of_memory
    ]
    failed = [one for one in judged if one.seen.out_of_memory]
    correlation, regret = _choices(judged)
    return Score(
        name=name,
        num_rows=len(judged),
        num_sheets=len(sheets),
        sheets_median=_median([error for _, error in sheets]),
        sheets_p90=quantile([error for _, error in sheets], 0.9),
        num_anchored=len(anchored),
        anchored_median=_median([error for _, error in anchored]),
        anchored_p90=quantile([error for _, error in anchored], 0.9),
        trivial_median=_median(trivial),
        trivial_p90=quantile(trivial, 0.9),
        num_bending=len(bending),
        bending_mean=_mean(abs_error(one.anchored_s, one.seen.step_time_s) for one in bending),
        bending_trivial_mean=_mean(abs_error(one.trivial_s, one.seen.step_time_s) for one in bending),
        efficiency_median_points=_median(
            [100 * abs((one.efficiency or 0) - (one.anchored_efficiency or 0)) for one, _ in anchored]
        ),
        pollux_median=_median([abs_error(one.pollux_s, one.seen.step_time_s) for one in beyond]),
        anchored_where_pollux_median=_median([abs_error(one.anchored_s, one.seen.step_time_s) for one in beyond]),
        num_memory=len(memories),
        memory_median=_median(memories),
        memory_p90=quantile(memories, 0.9),
        num_out_of_memory=len(failed),
        num_out_of_memory_right=sum(one.spare_share is not None and one.spare_share <= HEADROOM for one in failed),
        inside_share=_share(is_inside(one, one.anchored_s, "anchored") for one, _ in anchored),
        sheets_inside_share=_share(is_inside(one, one.from_sheets_s, "unmeasured") for one, _ in sheets),
        rank_correlation=correlation,
        regret=regret,
    )


def abs_error(predicted: float | None, measured: float | None) -> float:
    """|predicted - measured| / measured."""
    assert predicted is not None and measured is not None
    return abs(predicted - measured) / measured


def _choices(judged: Sequence[Judged]) -> tuple[float | None, float | None]:
    """Mean rank correlation, and mean time lost by the planner's choice, over groups of layouts of one model on one
    number of GPUs."""
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for one in judged:
        predicted = one.from_sheets_s or one.anchored_s
        if predicted and one.seen.step_time_s and not one.seen.is_trace:
            samples = one.seen.layout.global_batch
            groups[(*one.seen.series[:5], one.seen.num_gpus)].append(
                (predicted / samples, one.seen.step_time_s / samples)
            )
    ranked = [group for group in groups.values() if len({measured for _, measured in group}) >= 3]
    if not ranked:
        return None, None
    from scipy.stats import spearmanr

    correlations = [
        float(spearmanr([p for p, _ in group], [m for _, m in group]).statistic)
        for group in ranked
        if len({p for p, _ in group}) > 1
    ]
    lost = [min(group)[1] / min(m for _, m in group) - 1 for group in ranked]
    return (statistics.fmean(correlations) if correlations else None), statistics.fmean(lost)


def anchor_of(one: Observation) -> Anchor:
    """An observation as the point that another is predicted from."""
    network = one.cluster.network.name if one.cluster.network and one.cluster.num_nodes > 1 else None
    return Anchor(one.layout, one.cluster.gpu.name, network)


def is_inside(one: Judged, predicted: float | None, kind: str) -> bool:
    """Whether the measured step lies in the interval that is stated for a prediction."""
    assert predicted and one.seen.step_time_s
    widened = one.reasons if kind == "anchored" else ()
    stated = interval(predicted, kind, widened=widened, doubted=bool(doubts(one.seen.layout, one.seen.cluster)))
    return stated.low <= one.seen.step_time_s <= stated.high


def quantile(values: Sequence[float], share: float) -> float | None:
    """Quantile, linear between order statistics; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _median(values: Sequence[float]) -> float | None:
    return quantile(values, 0.5)


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None


def _share(truths: Iterable[bool]) -> float | None:
    return _mean(float(truth) for truth in truths)
