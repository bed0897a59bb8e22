"""Measurements of a run's time, combined in one observer of the loop."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from scaleray.common.watchers import Guard, Watcher
from scaleray.profiling.links import slow_link, slowest, to_text, why_not
from scaleray.records.live_state import RecentSteps
from scaleray.records.phases import Phase
from scaleray.records.profile_record import RankMeasurements
from scaleray.records.published import LinksMeasured
from scaleray.records.run_record import Emit, EventRecord, StepRecord
from scaleray.training.observer import Observer
from scaleray.training.profile.arrival_recording import ArrivalTimes
from scaleray.training.profile.link_probe import probe_links
from scaleray.training.profile.phase_times import PhaseTimes
from scaleray.training.profile.rank_samples import RankSamples
from scaleray.training.profile.trace_recording import Tells, tracers
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext

LONGEST_S = 10.0
"""Seconds after which no further pair of ranks is measured."""
LEAST_FREE_BYTES = 2**30
"""Bytes that must be free on a GPU, since NCCL takes some for every new pair."""


class AsksForLinks(Protocol):
    """Source of requests to the workers, such as to measure their links."""

    def asks_for_links(self, signals: Sequence[float]) -> bool: ...


class LinkWatch(Observer):
    """Measures the links of each pair of ranks on request, within seconds, after a step on which all ranks agree. A
    collective cannot show which link is slow, since all ranks end it together. emit: receives the messages of rank 0.
    """

    def __init__(self, place: RankContext, asks: AsksForLinks | None, *, emit: Emit, guard: Guard) -> None:
        self.place, self.asks, self._emit, self._guard = place, asks, emit, guard

    def after_step(self, taken: StepRecord) -> None:
        """Measure the links if all ranks received the request with this step; collective in that case."""
        if self.asks is None or self.place.world_size == 1 or not self.asks.asks_for_links(taken.signals):
            return
        self._guard(Watcher.FIGURES, lambda: self._measure(taken.step), None, part="links")

    def _measure(self, step: int) -> None:
        if self.place.all_reduce_max([float(_is_full(self.place.device))])[0] > 0:
            return self._say(
                step, "not measured: a GPU has less than 1 GiB free for connections between pairs", "warning"
            )
        rows = [row for of_rank in self.place.gathered(probe_links(self.place, limit_s=LONGEST_S)) for row in of_rank]
        if self.place.rank != 0:
            return
        found = slow_link(rows)
        self._emit(LinksMeasured(step, *slowest(rows)))
        text = to_text(found) if found else f"the slow link is not known: {why_not(rows, self.place.world_size)}"
        self._say(step, f"measured after step {step}: {text}", "warning" if found else "info")

    def _say(self, step: int, text: str, kind: str) -> None:
        if self.place.rank == 0:
            self._emit(EventRecord(f"links between workers, {text}", kind=kind, step=step))


def _is_full(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < LEAST_FREE_BYTES


class Emits(Tells, Protocol):
    """Receiver of a worker's messages."""

    emit: Emit


class Enters(Protocol):
    """Object that is notified of the phases that the training enters."""

    on_enter: Callable[[Phase], None]

    def enter(self, phase: Phase) -> Phase: ...

    def on_recent_steps(self, recent: RecentSteps) -> None: ...


class Profile(Observer):
    """Phases, memory and arrivals of this rank, samples of them, and traces if requested. progress: reports phases of
    the training. asks: source of requests to measure the links. The training's clock calls `start` and `cut`, see
    `PhaseTimes`."""

    def __init__(
        self,
        job: TrainJob,
        place: RankContext,
        first_step: int,
        progress: Enters,
        tells: Emits,
        asks: AsksForLinks | None = None,
    ) -> None:
        self.phases = PhaseTimes(
            place, first_step, started_at=job.started_at, enter=progress.enter, emit=tells.emit, guard=tells.guard
        )
        self._progress, self._on_enter = progress, progress.on_enter
        progress.on_enter = self.phases.marks.mark
        self.arrivals = ArrivalTimes(self.phases.at_phase, place, tells.guard)
        self.start, self.cut = self.phases.start, self.phases.cut
        self._place, self._guard = place, tells.guard
        self._probes_links = job.probes_links and place.world_size > 1
        samples = RankSamples(
            place,
            self.phases,
            self.arrivals,
            every_s=job.config.monitoring.every_s,
            tell=progress.on_recent_steps,
            emit=tells.emit,
            guard=tells.guard,
        )
        links = LinkWatch(place, asks, emit=tells.emit, guard=tells.guard)
        self._parts: list[Observer] = [*tracers(job, place, tells), self.phases, self.arrivals, samples, links]

    @property
    def observers(self) -> list[Observer]:
        """All observers of the training, including this one. Not stored, since this would form a reference cycle."""
        return [*self._parts, self]

    def close(self) -> None:
        """Release the object that reports phases. A strategy's hooks on gradients refer to it, and the model refers to
        the hooks, so everything that it refers to, including the whole training, would never be freed."""
        self._progress.on_enter = self._on_enter

    def measurements(self) -> RankMeasurements:
        """The measured profile, see `RunProfile`. Waits for the device; collective if links are measured."""
        measured = self.arrivals.added_to(self.phases.measurements())
        if not self._probes_links:
            return measured
        links = self._guard(Watcher.FIGURES, partial(probe_links, self._place), [], part="links")
        return dataclasses.replace(measured, links=links)
