"""How often intervals hold where a planner is asked far from what it was calibrated on: another cluster, eight times
the GPUs, another layout.

Every published row is predicted from one other published row as `plan --from-run` would: compute and communication are
calibrated on that row and the step predicted with them. A transfer is judged by the share of rows inside the stated
interval, beside the share inside the interval of a near question, which is what would be stated if nothing were known
of the distance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jobs.planner_evidence.published.rows import Observation
from jobs.planner_evidence.validate import abs_error, anchor_of, nearest, quantile
from scaleray.planner.answers.calibration import calibrate
from scaleray.planner.cost.block_pass import Measured
from scaleray.planner.cost.constants import DEFAULT, Constants
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.step_time import step_time
from scaleray.planner.cost.uncertainty import NEAR_DOUBLINGS, Reason, doubts, interval, reasons

TRANSFERS = {
    "near": f"the same series and layout, at most {2**NEAR_DOUBLINGS:.1f} times the GPUs",
    "scale": "the same series, at least 8 times the GPUs",
    "layout": "the same series and GPUs, another layout",
    "cluster": "the same model and precision, another kind of GPU",
}
"""What is different between the row that was calibrated on and the one that is asked for."""
FAR = 8
"""Times the GPUs of the smallest point: a transfer to another scale."""
EVERY_TRACE = 5
"""One in so many rows of a trace is asked across clusters; there are thousands."""


@dataclass(frozen=True)
class Transferred:
    """A row predicted from another one.

    is_inside: in the stated interval; is_near_enough: in that of a near question.
    """

    transfer: str
    seen: Observation
    anchor: Observation
    predicted_s: float
    reasons: tuple[Reason, ...]
    is_inside: bool
    is_near_enough: bool
    width: float
    """Width of the stated interval: its upper end over its lower one."""


@dataclass(frozen=True, kw_only=True)
class TransferScore:
    """A transfer's line. Shares of rows; `by_source`: the mean over sources, each of which has as much say."""

    name: str
    words: str
    num_rows: int
    num_sources: int
    error_median: float | None
    inside_share: float | None
    inside_by_source: float | None
    near_share: float | None
    near_by_source: float | None
    width_median: float | None


def transferred(seen: Sequence[Observation], constants: Constants = DEFAULT) -> list[Transferred]:
    """Every row from every point that a transfer pairs it with."""
    known: dict[int, Measured] = {}
    found = []
    for name, anchor, one in pairs([one for one in seen if one.step_time_s]):
        if id(anchor) not in known:
            assert anchor.step_time_s
            known[id(anchor)] = calibrate(
                anchor.model,
                anchor.layout,
                anchor.cluster,
                anchor.step_time_s,
                fused_attention=anchor.fused_attention,
                constants=constants,
            )
        step = step_time(
            one.model,
            one.layout,
            one.cluster,
            measured=known[id(anchor)],
            fused_attention=one.fused_attention,
            constants=constants,
        )
        share = step.exposed_comm_s / step.total_s
        widened = reasons(anchor_of(anchor), one.layout, one.cluster, exposed_share=share)
        unlike = bool(doubts(one.layout, one.cluster))
        stated = interval(step.total_s, "anchored", widened=widened, doubted=unlike)
        near = interval(step.total_s, "anchored", doubted=unlike)
        measured = one.step_time_s or 0.0
        found.append(
            Transferred(
                name,
                one,
                anchor,
                step.total_s,
                widened,
                stated.low <= measured <= stated.high,
                near.low <= measured <= near.high,
                stated.high / stated.low,
            )
        )
    return found


def pairs(seen: Sequence[Observation]) -> Iterator[tuple[str, Observation, Observation]]:
    """(transfer, the row that is calibrated on, the row that is asked for)."""
    series: dict[tuple[str, ...], list[Observation]] = defaultdict(list)
    models: dict[tuple[str, float, str], list[Observation]] = defaultdict(list)
    for one in seen:
        series[one.series].append(one)
        models[_model(one)].append(one)
    for number, one in enumerate(seen):
        group = series[one.series]
        smallest = min(other.num_gpus for other in group)
        if one.num_gpus > smallest:
            anchor = nearest(one, [other for other in group if other.num_gpus == smallest])
            if anchor is not None and one.num_gpus >= FAR * smallest:
                yield "scale", anchor, one
            elif anchor is not None and one.num_gpus <= 2**NEAR_DOUBLINGS * smallest and _kind(anchor) == _kind(one):
                yield "near", anchor, one
        if not one.is_trace:
            same_size = [other for other in group if other.num_gpus == one.num_gpus and _kind(other) != _kind(one)]
            for kind in dict.fromkeys(map(_kind, same_size)):
                anchor = nearest(one, [other for other in same_size if _kind(other) == kind])
                assert anchor is not None
                yield "layout", anchor, one
        if not one.is_trace or number % EVERY_TRACE == 0:
            yield from (("cluster", anchor, one) for anchor in _elsewhere(one, models[_model(one)]))


def _elsewhere(one: Observation, alike: Sequence[Observation]) -> Iterator[Observation]:
    """The smallest point of the same model on each other kind of GPU, of each source."""
    places: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for other in alike:
        if other.cluster.gpu.name != one.cluster.gpu.name and other.num_gpus <= one.num_gpus:
            places[other.cluster.gpu.name, other.source].append(other)
    for others in places.values():
        smallest = min(other.num_gpus for other in others)
        anchor = nearest(one, [other for other in others if other.num_gpus == smallest])
        assert anchor is not None
        yield anchor


def _model(one: Observation) -> tuple[str, float, str]:
    return one.model.name, round(one.model.num_params), one.layout.precision


def _kind(one: Observation) -> tuple[object, ...]:
    layout: Layout = one.layout
    return layout.tensor, layout.pipeline, layout.context, layout.expert, layout.sharding, layout.checkpointing


def transfer_scores(found: Sequence[Transferred]) -> list[TransferScore]:
    """A line for each transfer, the near one first; None where it has no rows."""
    return [_score(name, words, [one for one in found if one.transfer == name]) for name, words in TRANSFERS.items()]


def _score(name: str, words: str, found: Sequence[Transferred]) -> TransferScore:
    sources: dict[str, list[Transferred]] = defaultdict(list)
    for one in found:
        sources[one.seen.source].append(one)

    def by_source(pick: str) -> float | None:
        return _mean([_mean([float(getattr(one, pick)) for one in rows]) or 0.0 for rows in sources.values()])

    return TransferScore(
        name=name,
        words=words,
        num_rows=len(found),
        num_sources=len(sources),
        error_median=quantile([abs_error(one.predicted_s, one.seen.step_time_s) for one in found], 0.5),
        inside_share=_mean([float(one.is_inside) for one in found]),
        inside_by_source=by_source("is_inside"),
        near_share=_mean([float(one.is_near_enough) for one in found]),
        near_by_source=by_source("is_near_enough"),
        width_median=quantile([one.width for one in found], 0.5),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
