"""Cache results that many layouts share: a cost declares its inputs, and is computed once for all layouts with equal
inputs. A survey of 16,384 GPUs has tens of thousands of layouts, which differ in only a degree or two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from scaleray.planner.cost.layout import Layout

MOST = 2**14
"""Maximum cached results per function, more than one survey needs."""

Others = TypeVarTuple("Others")
T = TypeVar("T")


def remembered(*fields: str) -> Callable[[Callable[[Layout, *Others], T]], Callable[[Layout, *Others], T]]:
    """Cache the results of a pure function of a layout and other objects, by these fields and the objects.

    The function must read no other field. The other objects are distinguished by identity: they must be long-lived,
    such as a block or a GPU, not numbers. `forget`, an attribute of the new function, clears the cache."""
    read = attrgetter(*fields)

    def with_memory(function: Callable[[Layout, *Others], T]) -> Callable[[Layout, *Others], T]:
        known: dict[tuple[Any, ...], tuple[T, Any]] = {}

        @functools.wraps(function)
        def cost(layout: Layout, *others: *Others) -> T:
            key = (read(layout), *map(id, others))
            found = known.get(key)
            if found is None:
                if len(known) >= MOST:
                    known.clear()
                # the others are stored with the result, so that no new object can have the identity of one of them
                found = known[key] = (function(layout, *others), others)
            return found[0]

        cost.forget = known.clear  # type: ignore[attr-defined]
        return cost

    return with_memory
