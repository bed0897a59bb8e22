"""How far a prediction may be off: intervals from what the planner got wrong on published measurements.

The spread of the logarithm of measured over predicted step time, by how much was known: nothing but data sheets, or a measured point; and by
how far the question lies from that point. 5 and 95 % quantiles with as many votes for each source, so that about 90 % of rows lie inside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scaleray.planner.hardware import Cluster
from scaleray.planner.layout import Layout
from scaleray.study_records import Estimate


@dataclass(frozen=True)
class Spread:
    """Quantiles of log(measured / predicted): `low` and `high` hold 90 % of the rows of its class."""

    low: float
    high: float
    num_rows: int


# class: spread. `plan fit DATA --leave-out --rounds 2` prints this table: every row is judged with constants fitted without its source
SPREADS: dict[str, Spread] = {
    "unmeasured": Spread(-0.237, 0.501, 2756),
    "anchored near": Spread(-0.163, 0.236, 191),
    "anchored far": Spread(-0.104, 0.288, 1821),
    "anchored slow network": Spread(-0.171, 0.274, 647),
    # the 104 rows that the formulas were made with lie within -0.06 and 0.15; with 28 of other runs and recipes, which were not
    "memory": Spread(-0.15, 0.21, 132),
}


WIDER = 1.5
"""Of an interval's logarithm where a layout is unlike the rows it comes from; judged, not measured."""
SEEN_GPUS = frozenset({
    "t4", "p100", "v100", "v100-32", "v100-pcie", "quadro-rtx-6000", "a100-40", "a100-80", "h100", "h100-96", "h200", "rtx-a6000", "rtx-4090",
})  # fmt: skip
"""GPUs of the published rows."""


def spread_class(layout: Layout, cluster: Cluster, *, is_anchored: bool, doublings: float, exposed_share: float) -> str:
    """Which rows a prediction resembles. `doublings`: from the measured point; `exposed_share`: of the step, waited for communication."""
    if not is_anchored:
        return "unmeasured"
    if exposed_share > 0.25:
        return "anchored slow network"
    return "anchored far" if doublings > 1.5 or layout.tensor * layout.pipeline > 1 else "anchored near"


def doubts(layout: Layout, cluster: Cluster) -> tuple[str, ...]:
    """In what a layout is unlike all rows, or all but a few, that the intervals come from."""
    found = {
        f"tensor parallel over {layout.tensor} leaves the node": layout.tensor > cluster.gpus_per_node,
        f"a pipeline of {layout.pipeline} stages": layout.pipeline > 16,
        f"{layout.data} replicas": layout.data > 512,
        "state in the host's memory": layout.offloads,
        "8- or 4-bit products": layout.precision in ("fp8", "fp4"),
        "experts spread over GPUs": layout.expert > 1,
        "context parallel": layout.context > 1,
        f"no published row used {cluster.gpu.name}": cluster.gpu.name not in SEEN_GPUS,
    }
    return tuple(words for words, is_so in found.items() if is_so)


def interval(step_time_s: float, kind: str, *, doubted: bool = False) -> Estimate:
    """The step time with the interval that holds 90 % of rows like it; wider where none is."""
    spread = SPREADS[kind]
    factor = WIDER if doubted else 1.0
    low, high = (step_time_s * math.exp(factor * bound) for bound in (spread.low, spread.high))
    return Estimate(step_time_s, low, high)


def is_trusted(kind: str, *, doubted: bool = False) -> bool:
    """False where the interval is wider than a factor of two: the order of layouts may still be right, the figures not."""
    spread = SPREADS[kind]
    return (spread.high - spread.low) * (WIDER if doubted else 1.0) < math.log(2.0)
