"""Slow links of a running training: its pairs of ranks are measured on request.

A collective cannot show which link is slow, since all ranks end it together. The measurement follows a step that all
ranks agree on and takes some seconds at most; the training waits meanwhile, and its numbers stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from scaleray.common.watchers import Guard, Watcher
from scaleray.profiling.links import in_words, slow_link, slowest, why_not
from scaleray.records.published import LinksMeasured
from scaleray.records.run_record import Emit, EventRecord, StepRecord
from scaleray.training.observer import Observer
from scaleray.training.profile.link_probe import probe_links
from scaleray.training.setup.rank_context import RankContext

LONGEST_S = 10.0
"""Seconds after which no further pair is measured."""
LEAST_FREE_BYTES = 2**30
"""Free memory of a GPU that is needed: NCCL takes some for every new pair."""


class AsksForLinks(Protocol):
    """Source of the requests to the workers."""

    def asks_for_links(self, signals: Sequence[float]) -> bool: ...


class LinkWatch(Observer):
    """Measures the links after a step on request. emit: receives rank 0's messages about it."""

    def __init__(self, place: RankContext, asks: AsksForLinks | None, *, emit: Emit, guard: Guard) -> None:
        self.place, self.asks, self._emit, self._guard = place, asks, emit, guard

    def after_step(self, taken: StepRecord) -> None:
        """Measure if all ranks received the request with this step; then collective."""
        if self.asks is None or self.place.world_size == 1 or not self.asks.asks_for_links(taken.signals):
            return
        self._guard(Watcher.FIGURES, lambda: self._measure(taken.step), None, part="links")

    def _measure(self, step: int) -> None:
        if self.place.all_reduce_max([float(_is_full(self.place.device))])[0] > 0:
            return self._say(
                step, "not measured: a GPU has less than 1 GiB free for the connections of pairs", "warning"
            )
        rows = [row for of_rank in self.place.gathered(probe_links(self.place, limit_s=LONGEST_S)) for row in of_rank]
        if self.place.rank != 0:
            return
        found = slow_link(rows)
        self._emit(LinksMeasured(step, *slowest(rows)))
        text = in_words(found) if found else f"the slow one is not known: {why_not(rows, self.place.world_size)}"
        self._say(step, f"measured after step {step}: {text}", "warning" if found else "info")

    def _say(self, step: int, text: str, kind: str) -> None:
        if self.place.rank == 0:
            self._emit(EventRecord(f"links between workers, {text}", kind=kind, step=step))


def _is_full(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < LEAST_FREE_BYTES
