"""Uncertainty of a prediction: an interval from the planner's errors on published measurements, and the reasons for its
width.

The interval is the spread of the logarithm of measured over predicted step time: its 5 and 95 % quantiles, with equal
weight for each source, so that about 90 % of measurements are inside. Predictions from data sheets share one spread. A
prediction from a measured point has a narrow spread near that point; each difference from the point is a reason that
widens it, and widths are added in quadrature, as independent errors. To validate, run `python -m jobs.planner_evidence
validate DATA --transfers`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.planner.cost.layout import Layout
from scaleray.records.study_record import Estimate


@dataclass(frozen=True)
class Spread:
    """Quantiles of log(measured / predicted): 90 % of the measurements of a class are between `low` and `high`."""

    low: float
    high: float
    num_rows: int


# class: spread. `python -m jobs.planner_evidence fit DATA --leave-out --rounds 2` prints this table: every row is
# predicted with constants fitted without its source
SPREADS: dict[str, Spread] = {
    "unmeasured": Spread(-0.237, 0.501, 2756),
    # within 1.5 doublings of the measured point; without any of the `reasons`, 199 rows are between -0.15 and 0.18
    "anchored": Spread(-0.163, 0.236, 191),
    # the 104 rows used to make the formulas are between -0.06 and 0.15, together with 28 of other runs and recipes,
    # which were not used
    "memory": Spread(-0.15, 0.21, 132),
}

# Additional width of an anchored interval for each difference from the measured point, as logarithms down and up;
# `python -m jobs.planner_evidence validate DATA --transfers` validates them.
NEAR_DOUBLINGS = 1.5
"""Doublings of the GPUs within which a question counts as near its measured point."""
OF_A_DOUBLING = (0.04, 0.10)
"""Width for each doubling of the GPUs beyond `NEAR_DOUBLINGS`; measured steps are more often slower than predicted than
faster."""
OF_A_NETWORK = 2.0
"""Possible error factor of the time of collectives on an unmeasured network: sources differ by 1.5 (`calibration`),
taken as a standard deviation. It applies to the share of the step that waits for them."""
OF_A_LAYOUT = (0.20, 0.25)
"""Width for a tensor, pipeline, context or expert parallel degree, recomputation or sharding that differs from the
measured one."""
OF_A_MICRO_BATCH = (0.25, 0.30)
"""Width for each doubling or halving of the micro-batch beyond the first: launches limit small micro-batches,
arithmetic large ones."""
OF_A_GPU = (0.45, 0.50)
"""Width for a point measured on another type of GPU, which is wider than from data sheets alone, since it includes the
errors of both types."""

WIDER = 1.5
"""Factor of an interval's logarithm if a layout differs from the measurements behind it; estimated, not measured."""
SEEN_GPUS = frozenset({
    "t4", "p100", "v100", "v100-32", "v100-pcie", "quadro-rtx-6000", "a100-40", "a100-80", "h100", "h100-96", "h200",
    "rtx-a6000", "rtx-4090",
})  # fmt: skip
"""GPUs of the published measurements."""


@dataclass(frozen=True)
class Anchor:
    """The measured point on which a prediction was calibrated. gpu: type of its GPUs; network: between its nodes, None
    for one node."""

    layout: Layout
    gpu: str
    network: str | None = None

    @property
    def num_gpus(self) -> int:
        """Number of GPUs on which the step ran."""
        return self.layout.num_gpus


@dataclass(frozen=True)
class Reason:
    """Reason why an interval is wider than the narrowest of its kind, with the widths that it adds below and above, as
    logarithms."""

    words: str
    low: float
    high: float


def reasons(anchor: Anchor | None, layout: Layout, cluster: Cluster, *, exposed_share: float) -> tuple[Reason, ...]:
    """Differences between a question and the measured point. `exposed_share`: share of the predicted step that waits
    for communication."""
    if anchor is None:
        return ()
    found = [
        _scale(anchor, layout),
        _network(anchor, layout, cluster, exposed_share),
        _layout(anchor.layout, layout),
        _micro_batch(anchor.layout, layout),
    ]
    if anchor.gpu != cluster.gpu.name:
        found.append(Reason(f"measured on {anchor.gpu}, not on {cluster.gpu.name}", *OF_A_GPU))
    return tuple(one for one in found if one is not None)


def _scale(anchor: Anchor, layout: Layout) -> Reason | None:
    far = abs(math.log2(layout.num_gpus / anchor.num_gpus)) - NEAR_DOUBLINGS
    if far <= 0:
        return None
    words = f"{layout.num_gpus} GPUs are {layout.num_gpus / anchor.num_gpus:.3g} times the measured number"
    return Reason(words, *(far * width for width in OF_A_DOUBLING))


def _network(anchor: Anchor, layout: Layout, cluster: Cluster, exposed_share: float) -> Reason | None:
    used = cluster.network if layout.num_gpus > cluster.gpus_per_node or cluster.num_nodes > 1 else None
    if used is None or used.name == anchor.network or any(table.num_nodes > 1 for table in cluster.measured):
        return None
    share = min(1.0, max(0.0, exposed_share))
    words = (
        f"the network {used.name} was not measured, "
        f"and {100 * share:.0f} % of the step waits for communication (--collectives narrows it)"
    )
    return Reason(words, -math.log(1 - share * (1 - 1 / OF_A_NETWORK)), math.log(1 + share * (OF_A_NETWORK - 1)))


def _layout(measured: Layout, asked: Layout) -> Reason | None:
    names = {
        "tensor": "tensor",
        "pipeline": "pipeline",
        "context": "context",
        "expert": "expert",
        "sharding": "sharding",
        "checkpointing": "recompute",
    }
    changed = [
        f"{words} {getattr(asked, name)} instead of {getattr(measured, name)}"
        for name, words in names.items()
        if getattr(asked, name) != getattr(measured, name)
    ]
    return Reason(f"another layout was measured: {', '.join(changed)}", *OF_A_LAYOUT) if changed else None


def _micro_batch(measured: Layout, asked: Layout) -> Reason | None:
    far = abs(math.log2(asked.micro_batch / measured.micro_batch)) - 1
    if far <= 0:
        return None
    words = f"micro-batches of {asked.micro_batch} instead of the measured {measured.micro_batch}"
    return Reason(words, *(far * width for width in OF_A_MICRO_BATCH))


def doubts(layout: Layout, cluster: Cluster, *, is_guessed: bool = False) -> tuple[str, ...]:
    """Differences between a question and nearly all measurements behind the intervals. is_guessed: whether the model's
    shape is a guess."""
    found = {
        f"tensor parallel over {layout.tensor} leaves the node": layout.tensor > cluster.gpus_per_node,
        f"a pipeline of {layout.pipeline} stages": layout.pipeline > 16,
        f"{layout.data} replicas": layout.data > 512,
        "state in the host's memory": layout.offloads,
        "8- or 4-bit products": layout.precision in ("fp8", "fp4"),
        "experts spread over GPUs": layout.expert > 1,
        "context parallel": layout.context > 1,
        f"no published row used {cluster.gpu.name}": cluster.gpu.name not in SEEN_GPUS,
        "only the size of the model is known": is_guessed,
    }
    return tuple(words for words, is_so in found.items() if is_so)


def interval(step_time_s: float, kind: str, *, widened: Sequence[Reason] = (), doubted: bool = False) -> Estimate:
    """The step time with the interval that holds 90 % of similar measurements, widened for each reason and if no
    measurement is similar."""
    low, high = _widths(kind, widened, doubted=doubted)
    return Estimate(step_time_s, step_time_s * math.exp(-low), step_time_s * math.exp(high))


def is_trusted(kind: str, *, widened: Sequence[Reason] = (), doubted: bool = False) -> bool:
    """Whether the interval is narrower than a factor of two; if not, the order of layouts may still be right, but the
    values are unreliable."""
    return sum(_widths(kind, widened, doubted=doubted)) < math.log(2.0)


def _widths(kind: str, widened: Sequence[Reason], *, doubted: bool) -> tuple[float, float]:
    """Widths of the interval below and above, as logarithms."""
    spread, factor = SPREADS[kind], WIDER if doubted else 1.0
    low = math.hypot(spread.low, *(one.low for one in widened))
    high = math.hypot(spread.high, *(one.high for one in widened))
    return factor * low, factor * high
