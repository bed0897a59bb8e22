"""Retention policy for the checkpoints of a run: the last ones, the best ones, and further ones at fixed intervals."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scaleray.checkpoints.manifest import Manifest


@dataclass(frozen=True)
class Retention:
    """Retention policy. keep_every: interval in steps between further retained checkpoints. best: a metric of the run,
    such as val/loss, which counts for a checkpoint only if it was measured at that step."""

    keep_last: int = 2
    keep_best: int = 0
    best: str | None = None
    is_higher_better: bool = False
    keep_every: int | None = None

    def kept(self, manifests: Iterable[Manifest]) -> set[int]:
        """Steps of the checkpoints to retain."""
        ordered = sorted(manifests, key=lambda m: m.step)
        kept = {m.step for m in ordered[max(0, len(ordered) - self.keep_last) :]}
        kept |= set(self.best_of({m.step: m.own_metrics for m in ordered}))
        if self.keep_every is not None:
            kept |= {m.step for m in ordered if m.step % self.keep_every == 0}
        return kept

    def best_of(self, measured: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The `keep_best` best steps by the metrics measured at them, best first; ties go to the older one. Steps
        without a finite value of `best` are excluded."""
        if self.best is None:
            return []
        sign = -1 if self.is_higher_better else 1
        values = {step: sign * metrics.get(self.best, math.nan) for step, metrics in measured.items()}
        finite = [step for step, value in values.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (values[step], step))[: self.keep_best]
