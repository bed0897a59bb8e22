"""Whether a layout fits a card: what is predicted of its memory, and how far such predictions were off.

Three verdicts. `does not fit`: less than the headroom would be left; published runs that failed are judged by the same
rule. `fits`: it would also do so if the prediction were as far too low as it was for the worst twentieth of published
rows. `may not fit`: between the two.
"""

from __future__ import annotations

import math
from typing import Literal

from scaleray.config.hardware.hardware_kinds import Gpu
from scaleray.planner.cost.memory import MemoryEstimate
from scaleray.planner.cost.uncertainty import SPREADS
from scaleray.records.study_record import Estimate
from scaleray.records.text.units import GIB

Verdict = Literal["fits", "may not fit", "does not fit"]
HEADROOM = 0.05
"""Share of the card's memory that is kept free. A published run failed that the planner's own figure says
would leave 3.8 %."""


def memory_interval(needed: MemoryEstimate) -> Estimate:
    """Bytes taken of the card, with the interval that holds 90 % of published rows."""
    spread = SPREADS["memory"]
    value = needed.device_bytes
    return Estimate(value, value * math.exp(spread.low), value * math.exp(spread.high))


def verdict(needed: MemoryEstimate, gpu: Gpu) -> Verdict:
    """The verdict on the prediction and its interval, against all of the card's memory that a process can have."""
    card = gpu.memory_gib * GIB
    if needed.spare_bytes(gpu) < HEADROOM * card:
        return "does not fit"
    return "fits" if memory_interval(needed).high <= card else "may not fit"
