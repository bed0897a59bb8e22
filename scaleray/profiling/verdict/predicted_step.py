"""Replay of steps without one cause: every step takes the slowest rank's own work plus the link's time.

Ranks of a synchronous training wait for each other in collectives. The last one to arrive waits only for the link, so
the shortest wait of a step is the link's time, and any longer wait is for the slowest rank. Without X, a step takes as
long as the slowest rank without X. That is the true cost of X, even if a rank's excess is hidden in the others' waits.
Source of the idea: Lin et al. 2025, arXiv:2505.05713 (what-if simulation of steps without stragglers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scaleray.profiling.verdict.signals import Seconds, Signals
from scaleray.records.phases import Phase

Times = npt.NDArray[np.float64]
"""Times of steps, (steps,)."""
PAUSED = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""Parts from which a pause is subtracted: the garbage collector runs where Python creates objects, allocator retries
occur where tensors are created."""


@dataclass(frozen=True)
class Replay:
    """Input of a replay: the ranks' own work and the link's time."""

    parts: Mapping[Phase, Seconds]
    link: Times

    @property
    def own(self) -> Seconds:
        """Seconds of each rank's own work in each step."""
        return np.asarray(np.sum(list(self.parts.values()), axis=0))

    def times(self, *, without: Iterable[Phase] = ()) -> Times:
        """Time of each step without the given parts."""
        left = [values for name, values in self.parts.items() if name not in set(without)]
        own = np.sum(left, axis=0) if left else np.zeros_like(self.own)
        return np.asarray(own.max(axis=0) + self.link)

    def with_parts(self, changed: Mapping[Phase, Seconds]) -> Replay:
        """The same steps with other values of some parts."""
        return Replay({**self.parts, **changed}, self.link)


def replay_of(signals: Signals) -> Replay:
    """Return the replay of these signals. If waits were not measured, the link takes no time."""
    waits = signals.waits
    return Replay(signals.parts, np.zeros(signals.num_columns) if waits is None else waits.min(axis=0))


def moved_to_host(parts: Mapping[Phase, Seconds], pauses: Seconds) -> dict[Phase, Seconds]:
    """Move pauses from the passes in which they occurred to the time of the host; the step keeps its length."""
    left = taken_out(parts, pauses)
    moved = np.sum([parts[name] - left[name] for name in PAUSED if name in parts], axis=0)
    return {**left, Phase.HOST: parts.get(Phase.HOST, np.zeros_like(pauses)) + moved}


def taken_out(parts: Mapping[Phase, Seconds], pauses: Seconds) -> dict[Phase, Seconds]:
    """Subtract pauses from the passes in which they occurred; a pause is limited to the duration of the passes."""
    found, left = dict(parts), pauses.copy()
    for name in PAUSED:
        if name in found:
            taken = np.minimum(left, found[name])
            found[name], left = found[name] - taken, left - taken
    return found
