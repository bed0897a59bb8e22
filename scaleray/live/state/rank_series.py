"""Series of each rank, from its own samples or from a comparison of all ranks."""

import math
from collections.abc import Mapping, Sequence

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.live.state.series import Series, common_labels, run_labels, series_of
from scaleray.records.phases import Phase
from scaleray.records.published import RankSample

LEAST_TRANSFER_S, LEAST_TRANSFER_SHARE = 0.001, 0.2
"""Shortest transfer that is reported, in seconds and as a share of a step; shorter ones are mostly scheduling noise."""


def rank_series(sample: RankSample, *, run_name: str, run_id: str) -> list[Series]:
    """Series from the samples of one rank. With Ray, each rank publishes them; without Ray, the recorder does."""
    common = common_labels(run_name, run_id, sample.rank, sample.node)
    found = [
        *series_of(names.STEP_TIME_S, common, sample.step_time_s),
        *series_of(live.MEMORY_LIMIT_BYTES, common, sample.memory_limit_bytes),
        *series_of(live.LAST_STEP_TIMESTAMP_S, common, sample.step_at),
    ]
    for phase, seconds in sample.phases.items():
        found += series_of(live.PHASE_S, common, seconds, phase=phase)
    for kind, num_bytes in sample.memory.items():
        found += series_of(live.MEMORY_BYTES, common, num_bytes, kind=kind)
    return found


class ComparedRanks:
    """Series that compare the newest samples of all ranks: lateness, the rate of their links, and waiting times."""

    def __init__(self) -> None:
        self.samples: dict[int, RankSample] = {}
        self._best_transfer_s = math.inf
        """Shortest transfer of this group of ranks in this run."""

    def take_sample(self, sample: RankSample) -> None:
        """Store the newest sample of a rank. A sample from a group of another size discards all others."""
        if self.samples and next(iter(self.samples.values())).world_size != sample.world_size:
            self.samples, self._best_transfer_s = {}, math.inf
        self.samples = {**self.samples, sample.rank: sample}
        if (transfer_s := transfer_s_of(self._compared())) is not None:
            self._best_transfer_s = min(self._best_transfer_s, transfer_s)

    def forget(self) -> None:
        """Discard the samples of lost workers."""
        self.samples = {}

    def series(self, *, run_name: str, run_id: str) -> list[Series]:
        """Lateness of each rank, and the rate of the links between ranks."""
        compared, found = self._compared(), []
        late_s, transfer_s = lateness_s(compared), transfer_s_of(compared)
        steps_s = [sample.step_time_s for sample in compared if sample.step_time_s]
        least_s = max(LEAST_TRANSFER_S, LEAST_TRANSFER_SHARE * max(steps_s, default=0.0))
        for sample in compared:
            common = common_labels(run_name, run_id, sample.rank, sample.node)
            found += series_of(live.LATENESS_S, common, late_s.get(sample.rank))
        if transfer_s is not None:
            ratio = max(least_s, self._best_transfer_s) / max(least_s, transfer_s)
            found += series_of(live.LINK_RATIO, run_labels(run_name, run_id), ratio)
        return found

    def exposed_share(self) -> float | None:
        """Mean share of step time in which ranks waited for communication; None if unknown."""
        shares = [
            sample.phases[Phase.COMMUNICATION] / sample.step_time_s
            for sample in self.samples.values()
            if sample.step_time_s and Phase.COMMUNICATION in sample.phases
        ]
        return sum(shares) / len(shares) if shares else None

    def _compared(self) -> list[RankSample]:
        """Samples of all ranks if all have reached the same points of a step; otherwise none."""
        found = [sample for _, sample in sorted(self.samples.items()) if sample.ahead_s]
        is_whole = len(found) == (found[0].world_size if found else 0) > 1
        return found if is_whole and len({len(sample.ahead_s) for sample in found}) == 1 else []


def lateness_s(samples: Sequence[RankSample]) -> Mapping[int, float]:
    """Seconds by which each rank arrived after the first one, at the worst point of a step.

    A collective ends on all ranks at once, so a rank that arrived less time before its end was later. This does not
    depend on synchronised clocks."""
    late = dict.fromkeys((sample.rank for sample in samples), 0.0)
    for ahead in zip(*(sample.ahead_s for sample in samples), strict=True):
        if all(map(math.isfinite, ahead)):
            for sample, own in zip(samples, ahead, strict=True):
                late[sample.rank] = max(late[sample.rank], max(ahead) - own)
    return late


def transfer_s_of(samples: Sequence[RankSample]) -> float | None:
    """Seconds from the arrival of the last rank at the last collective of a step to its end, in which all ranks wait
    only for the link. None if unknown."""
    last = [sample.ahead_s[-1] for sample in samples]
    return max(0.0, min(last)) if last and all(map(math.isfinite, last)) else None
