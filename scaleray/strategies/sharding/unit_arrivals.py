"""Arrival of this rank at the collectives of FSDP's units: gathers in the forward pass, and gradients."""

from typing import Any

from torch import nn

from scaleray.profiling.collectives import layer_range
from scaleray.records.profile_record import Places
from scaleray.strategies.contract.arrivals import Moments, drawn_together
from scaleray.strategies.sharding.counted_collectives import CountedAllGather, CountedReduceScatter
from scaleray.strategies.sharding.fsdp_units import Units

Collective = CountedAllGather | CountedReduceScatter


class UnitArrivals:
    """Arrivals at the collectives of a model's units. distance: number of units gathered ahead."""

    def __init__(self, model: nn.Module, units: Units, distance: int) -> None:
        self._model, self._units, self._distance = model, units, distance
        self._collectives: dict[nn.Module, tuple[CountedAllGather, CountedReduceScatter]] = {}
        names = [name for name, _ in model.named_parameters()]
        self._order = {name: place for place, name in enumerate(names)}
        inside = tuple(f"{name}." for name in units.names)
        self._names = [[name for name in names if name.startswith(prefix)] for prefix in inside]
        self._names_of_root = [name for name in names if not name.startswith(inside)] if inside else names

    def add(self, unit: Any, gather: CountedAllGather, scatter: CountedReduceScatter) -> None:
        """Add the collectives of a unit."""
        self._collectives[unit] = gather, scatter

    def settle(self, moments: Moments) -> Places:
        """See `ArrivalSource`. The points are known immediately.

        In the forward pass a unit is gathered before the unit `distance` positions ahead of it computes, so a rank that
        arrives late there lost the time in the unit before. The first gather marks the start. In the backward pass
        ranks also synchronise before a unit computes, when the next one is gathered, and when its gradients are
        reduced."""
        modules, ahead = self._units.modules, self._distance
        chosen: list[Collective] = []
        first = self._model if self._names_of_root else modules[0]
        chosen.append(self._collectives[first][0])
        forward: list[list[str]] = [[]]
        late = range(ahead + 1, len(modules))
        runs = drawn_together(len(late))
        for run in runs:
            chosen.append(self._collectives[modules[late[run[-1]]]][0])
            forward.append([name for place in run for name in self._names[late[place] - ahead - 1]])
        backward: list[list[str]] = []
        buckets: list[int] = []
        parts = list(zip(modules, self._names, range(len(modules)), strict=True))[::-1]
        if self._names_of_root:
            parts.append((self._model, self._names_of_root, -1))
        for bucket, run in enumerate(drawn_together(len(parts))):
            names = sorted((name for place in run for name in parts[place][1]), key=self._order.__getitem__)
            module, _, number = parts[run[-1]]
            if number >= ahead:  # whose turn it is to gather the one that comes `distance` later
                chosen.append(self._collectives[modules[number - ahead]][0])
                backward.append(names)
                buckets.append(bucket)
            chosen.append(self._collectives[module][1])
            backward.append(names)
            buckets.append(bucket)
        for place, collective in enumerate(chosen):
            collective.on_arrival.append(moments.noting(place))
        rest = [name for names in self._names[max(0, len(modules) - ahead - 1) :] for name in names]
        return Places(
            forward=tuple(map(layer_range, forward)),
            backward=tuple(map(layer_range, backward)),
            buckets=tuple(buckets),
            bucket_layers=tuple(layer_range(backward[buckets.index(bucket)]) for bucket in sorted(set(buckets))),
            meets_once=False,
            end_of_forward=layer_range(rest),
        )

    def close(self) -> None:
        """See `ArrivalSource`."""
        for gather, scatter in self._collectives.values():
            gather.on_arrival.clear()
            scatter.on_arrival.clear()
