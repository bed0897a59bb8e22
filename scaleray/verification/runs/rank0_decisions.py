"""Decisions of rank 0, which compares alone and whose decisions all ranks follow, and errors that all ranks share."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from scaleray.training.setup.rank_context import RankContext

Result = TypeVar("Result")
OTHERS_FAIL_WITHIN = timedelta(seconds=5)
"""Seconds within which other ranks may have the same error."""


def on_first(place: RankContext, decide: Callable[[], Result]) -> Result:
    """Let rank 0 decide, and return its decision or raise its error on every rank. Collective."""
    if place.world_size == 1:
        return decide()
    answer: list[Any] = [None, None]
    if place.rank == 0:
        try:
            answer[0] = decide()
        except Exception as exc:  # the others would wait for it
            answer[1] = exc
    dist.broadcast_object_list(answer, src=0, device=torch.device("cpu"))
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


class Failures:
    """Tells whether an error of a training occurred on all ranks of a group, which may then continue with the next
    training, or only on this rank, while the others wait for it in a collective. name: unique in this group."""

    def __init__(self, place: RankContext, name: str = "training") -> None:
        self._place, self._name, self._number = place, name, 0

    def is_shared(self) -> bool:
        """Whether every rank reaches this call within some seconds. Uses the group's store, since a collective would
        hang."""
        if self._place.world_size == 1:
            return True
        self._number += 1
        store, name = _get_default_store(), f"failure {self._number} of {self._name}"
        if store.add(name, 1) == self._place.world_size:
            store.set(f"{name}, on all", "yes")
        try:
            store.wait([f"{name}, on all"], OTHERS_FAIL_WITHIN)
        except dist.DistError:
            return False
        return True
