"""Decisions of the first rank, which alone compares and which all ranks follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from scaleray.training.setup.place import Place

Result = TypeVar("Result")


def on_first(place: Place, decide: Callable[[], Result]) -> Result:
    """Let rank 0 decide, and give its decision, or its error, to every rank. Collective."""
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
