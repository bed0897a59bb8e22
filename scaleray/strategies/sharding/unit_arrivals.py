"""When this rank comes to the collectives of the units of FSDP: their gathers in the forward pass, their gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from scaleray.profiling.layer_names import layer_range
from scaleray.records.profile import Places
from scaleray.strategies.contract.arrivals import Note, drawn_together, names_in
from scaleray.strategies.sharding.counted_collectives import CountedAllGather, CountedReduceScatter
from scaleray.strategies.sharding.fsdp_units import Units


class UnitArrivals:
    """Arrivals at the collectives of a model's units. distance: how many units are gathered ahead."""

    def __init__(self, model: nn.Module, units: Units, distance: int) -> None:
        self._model, self._units, self._distance = model, units, distance
        self._collectives: dict[nn.Module, tuple[CountedAllGather, CountedReduceScatter]] = {}
        names = [name for name, _ in model.named_parameters()]
        self._order = {name: place for place, name in enumerate(names)}
        inside = tuple(f"{name}." for name in units.names)
        self._names = [[name for name in names if name.startswith(prefix)] for prefix in inside]
        self._names_of_root = [name for name in names if not name.startswith(inside)] if inside else names

    def add(self, unit: Any, gather: CountedAllGather, scatter: CountedReduceScatter) -> None:
        """Take the collectives of a unit."""
        self._collectives[unit] = gather, scatter

    def settle(self, note: Note) -> Places:
        """See `ArrivalSource`. The places are known at once.

        A unit is gathered before the unit `distance` in front of it computes: whoever comes late to that has lost the
        time in the unit before. The gathers of the first units, and of the model's own parameters, mark the begin.
        """
        modules, ahead = self._units.modules, self._distance
        root = self._collectives[self._model]
        gathers = [(root[0] if self._names_of_root else self._collectives[modules[0]][0], [])]
        late = range(ahead + 1, len(modules))
        runs = drawn_together(len(late))
        before = names_in(runs, [self._names[number - ahead - 1] for number in late])
        for run, names in zip(runs, before, strict=True):
            gathers.append((self._collectives[modules[late[run[-1]]]][0], names))
        order = [(self._collectives[module][1], names) for module, names in zip(modules, self._names, strict=True)]
        scatters = order[::-1]
        if self._names_of_root:
            scatters.append((root[1], self._names_of_root))
        together = drawn_together(len(scatters))
        carried = names_in(together, [names for _, names in scatters])
        chosen = [*(gather for gather, _ in gathers), *(scatters[run[-1]][0] for run in together)]
        for place, collective in enumerate(chosen):
            collective.on_arrival = partial(note, place)
        rest = self._names[max(0, len(modules) - ahead - 1) :]
        return Places(
            forward=tuple(layer_range(names) for _, names in gathers),
            backward=tuple(layer_range(sorted(names, key=self._order.__getitem__)) for names in carried),
            meets_once=False,
            end_of_forward=layer_range([name for names in rest for name in names]),
        )

    def close(self) -> None:
        """See `ArrivalSource`."""
        for gather, scatter in self._collectives.values():
            gather.on_arrival = scatter.on_arrival = None
