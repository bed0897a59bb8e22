"""Mistakes planted into the training, as somebody might make them: how one is entered, and what it is made with.

A mistake strikes while several workers train, not in the single process beside them. `planted_mistakes` has them all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from small_runs import Classify
from torch import nn
from verified import many

from scaleray.strategies import STRATEGIES

ROWS = 48 * 22 + 2
"""So that an epoch ends in step 23, as that of jobs/digits.yaml does."""
CLASSES = {
    "count": "loss normalisation",
    "sync": "missing gradient synchronisation",
    "double": "double gradient synchronisation",
    "accumulation": "gradient accumulation",
    "clip": "clipping on a local norm",
    "rows": "data order",
    "random": "dropout or random numbers",
    "norm": "BatchNorm statistics",
    "schedule": "schedule or learning-rate step count",
    "dtype": "dtype",
    "parameters": "missing parameter synchronisation",
    "averaging": "averaging of replicas",
    "compression": "gradient compression",
    "evaluation": "evaluation",
    "resume": "state after a resume",
    "weights": "final weights",
    "update": "optimizer's update",
}
"""What verify calls each class."""


@dataclasses.dataclass(frozen=True)
class Planted:
    """A mistake: where it is made, what it does, and the class that verify should name."""

    name: str
    where: str
    what: str
    cause: str
    plant: Callable[[], Any]
    strategy: str = "ddp"
    world_size: int = 2
    workload: Callable[[], Any] = Classify
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    strikes_alone: bool = False
    """One worker makes it as well."""
    misnamed: str = ""
    """What verify calls it, where that is another class; "-" where it finds nothing."""

    @property
    def expected(self) -> str:
        """The class by the name that verify should give it."""
        return CLASSES[self.cause]

    @property
    def said(self) -> str:
        """The class that verify names."""
        return self.misnamed or self.expected


PLANTED: dict[str, Planted] = {}


def planted(where: str, what: str, cause: str, **more: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enter a mistake into the table; the function is a context manager's, and its name is the mistake's."""

    def enter(plant: Callable[[], Any]) -> Callable[[], Any]:
        name = plant.__name__.replace("_", " ")
        PLANTED[name] = Planted(name, where, what, cause, contextlib.contextmanager(plant), **more)
        return plant

    return enter


# tools of the mistakes


@contextlib.contextmanager
def spoiled(strategy: str, change: Callable[..., Any]) -> Iterator[None]:
    """The strategy gives `change(parallel, model=..., mesh=..., config=...)` of what it gave before."""
    apply = STRATEGIES[strategy]

    def broken(model: nn.Module, mesh: Any, config: Any, workload: Any) -> Any:
        return change(apply(model, mesh, config, workload), model=model, mesh=mesh, config=config)

    with mock.patch.dict(STRATEGIES, {strategy: broken}):
        yield


@contextlib.contextmanager
def instead(target: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """While several workers train, `make(original)` stands in the place of a function."""
    original = getattr(target, name)
    changed = make(original)

    def either(*args: Any, **kwargs: Any) -> Any:
        return (changed if many() else original)(*args, **kwargs)

    replacement = staticmethod(either) if isinstance(target.__dict__.get(name), staticmethod) else either
    with mock.patch.object(target, name, replacement):
        yield
