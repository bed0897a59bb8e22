"""Ranks that the others wait for, and the phase in which they fall behind."""

from dataclasses import dataclass

import numpy as np

from scaleray.profiling.verdict.predicted_step import Replay
from scaleray.profiling.verdict.signals import Seconds
from scaleray.records.phases import Phase

LEAST_EXCESS = 0.01
"""Share of a step above which a rank's mean excess in a part is attributed to the rank rather than to chance."""
ALIKE = 0.5
"""Share of the worst excess above which another rank also counts as a straggler, as a slow node has many ranks."""

APART = (Phase.INPUT,)
"""Parts in which the rank that waits longest is not a straggler: rows of the others may be just as late, which is
hidden because they wait for that rank.
"""


@dataclass(frozen=True)
class Stragglers:
    """Ranks that fall behind, slowest first, the phase with the largest delay, and the steps without the delay."""

    ranks: tuple[int, ...]
    phase: Phase
    excess_s: float
    """Mean seconds by which the slowest rank is behind the others."""
    evened: Replay


def stragglers_of(replay: Replay) -> Stragglers | None:
    """Ranks that take longer than the others on average; None if there are none.

    A rank's excess in a part is its time beyond the median of the others, and is replaced by their median.
    """
    parts = {name: values for name, values in replay.parts.items() if values.shape[0] > 1 and name not in APART}
    if not parts:
        return None
    step_s = replay.times().mean()
    usual = {name: _of_the_others(values) for name, values in parts.items()}
    excess = {name: (values - usual[name]).mean(axis=1) for name, values in parts.items()}
    # a rank may make up in one part for its delay in another: then no rank waits for it
    whole = np.sum(list(excess.values()), axis=0)
    worst = int(whole.argmax())
    if whole[worst] < LEAST_EXCESS * step_s:
        return None
    order = [int(rank) for rank in np.argsort(-whole, kind="stable")]
    slow = [rank for rank in order if whole[rank] >= max(ALIKE * whole[worst], LEAST_EXCESS * step_s)]
    if 2 * len(slow) > len(whole):  # more than half cannot be behind the others
        slow = slow[: max(1, len(whole) // 2)]
    changed = {}
    for name, values in parts.items():
        late = [rank for rank in slow if abs(excess[name][rank]) >= LEAST_EXCESS * step_s]
        if late:
            changed[name] = values.copy()
            changed[name][late] = usual[name][late]
    phase = max(parts, key=lambda name: excess[name][worst])
    return Stragglers(tuple(slow), phase, float(whole[worst]), replay.with_parts(changed))


def _of_the_others(values: Seconds) -> Seconds:
    """Median over the other ranks; over all ranks if there are many, as a single rank then hardly changes it."""
    num_ranks = values.shape[0]
    if num_ranks > 8:
        return np.broadcast_to(np.median(values, axis=0), values.shape)
    others = [np.median(np.delete(values, rank, axis=0), axis=0) for rank in range(num_ranks)]
    return np.asarray(others)
