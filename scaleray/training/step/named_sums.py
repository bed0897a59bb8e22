"""Sums over all workers of values by name, where the names that a worker has may depend on its rows."""

from __future__ import annotations

from collections.abc import Mapping

from scaleray.training.setup.place import Place


class NamedSums:
    """Sum of sums and counts over all workers. It takes one all-reduce, unless a name appears for the first time."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._known: tuple[str, ...] = ()  # the same on all workers

    def __call__(self, own: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """(sum, count) over all workers, of every name that at least one of them has now. Collective."""
        if self.place.world_size == 1:
            return {name: own[name] for name in sorted(own)}
        while True:
            has_new = bool(own.keys() - set(self._known))
            values = [(*own[name], 1.0) if name in own else (0.0, 0.0, 0.0) for name in self._known]
            any_new, *summed = self.place.all_reduce([float(has_new), *(value for three in values for value in three)])
            if not any_new:
                break
            everyone = self.place.gathered(sorted(own))
            self._known = tuple(sorted({*self._known, *(name for theirs in everyone for name in theirs)}))
        three = zip(self._known, summed[::3], summed[1::3], summed[2::3], strict=True)
        return {name: (total, count) for name, total, count, holders in three if holders}
