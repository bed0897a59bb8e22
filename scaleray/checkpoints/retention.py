"""Policy on which checkpoints of a run stay: the last ones, the best ones, and one every so many steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scaleray.checkpoints.manifest import Manifest


@dataclass(frozen=True)
class Retention:
    """Policy on which checkpoints stay. keep_every: keep also one every so many steps. best: a metric of the run, such
    as val/loss, which counts for a checkpoint only if it was measured at that step."""

    keep_last: int = 2
    keep_best: int = 0
    best: str | None = None
    is_higher_better: bool = False
    keep_every: int | None = None

    def kept(self, manifests: Iterable[Manifest]) -> set[int]:
        """Steps of the checkpoints that stay."""
        ordered = sorted(manifests, key=lambda m: m.step)
        kept = {m.step for m in ordered[max(0, len(ordered) - self.keep_last) :]}
        kept |= set(self.best_of({m.step: m.own_metrics for m in ordered}))
        if self.keep_every is not None:
            kept |= {m.step for m in ordered if m.step % self.keep_every == 0}
        return kept

    def best_of(self, measured: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The `keep_best` best steps by the metrics that were measured on them, best first; of equal ones the older.
        Steps without a finite value of `best` are none of them."""
        if self.best is None:
            return []
        sign = -1 if self.is_higher_better else 1
        values = {step: sign * metrics.get(self.best, math.nan) for step, metrics in measured.items()}
        finite = [step for step, value in values.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (values[step], step))[: self.keep_best]
