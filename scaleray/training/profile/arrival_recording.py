"""Times at which this rank arrives at the collectives of each step, used to compare ranks after the run.

Nothing is sent: each rank stores its own timestamps, and `profiling/lateness.py` matches those of all ranks. On a GPU a
timestamp is an event in a stream; that code has been reviewed but not run."""

import dataclasses
import math
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from scaleray.common.watchers import Guard, Watcher
from scaleray.records.phases import Phase
from scaleray.records.profile_record import CollectiveRow, Places, RankArrivals, RankMeasurements
from scaleray.strategies.contract.arrivals import ArrivalSource, Moments
from scaleray.training.observer import Observer
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext

MOST_ROWS = 500
"""Number of stored steps: enough to tell a steady delay from chance, and few enough for a thousand ranks."""
MOST_RECENT = 64
"""Maximum number of steps covered by one sample of the running training."""
CHUNK = 64
"""Steps added to the table at a time."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ArrivalTimes(Observer):
    """Records when this rank arrives at the collectives of a step, when its last backward pass begins, and when the
    wait after that ends. at_phase: called when a phase begins."""

    def __init__(self, at_phase: dict[Phase, Callable[[], None]], place: RankContext, guard: Guard) -> None:
        self.at_phase, self.place, self.guard = at_phase, place, guard
        self._stamps: HostStamps | DeviceStamps = DeviceStamps() if place.device.type == "cuda" else HostStamps()
        self._moments = Moments(self._stamps.now)
        self._source: ArrivalSource | None = None
        self._places: Places | None = None
        self._number = self._num_steps = 0
        self._is_before, self._has_begun = True, False
        """Whether the backward pass of a micro-batch has yet to begin, and whether one has begun in this step."""
        self._begun: Any = None
        self._met: Any = None
        self._kept: list[Any] = []
        """Times of the previous forward pass."""
        self._never: list[Any] = []
        self._earlier: list[Pass] = []
        self._steps: list[tuple[Any, ...]] = []
        """Steps that have not been added to the table yet."""
        self._rows, self._every, self._chunk = np.empty((0, 0)), 1, array("d")
        self._recent: deque[list[float]] = deque(maxlen=MOST_RECENT)

    def begin(self, setup: Setup) -> None:
        """Find the strategy's collectives."""
        self._parallel = setup.parallel
        self._source = setup.parallel.arrivals if self.place.world_size > 1 else None

    def during_step(self, number: int) -> None:
        self._number = number

    def after_launch(self) -> None:
        """Store the times of the step, or let the strategy look for the collectives until they are known."""
        if self._places is None:
            if self._source is not None:
                self.guard(Watcher.FIGURES, self._settle, None, part="arrivals")
        elif self._has_begun:
            # no more than a list, as all code has to be fetched again after the passes of a large model
            came = self._kept + self._moments.now[len(self._kept) :]
            self._steps.append((self._number, self._begun, self._met, came, self._earlier))
            has_many, self._earlier, self._has_begun = bool(self._earlier), [], False
            if has_many or len(self._steps) >= self._stamps.at_a_time:
                self.guard(Watcher.FIGURES, self._take_known, None, part="arrivals")

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source = None  # and the model with it

    def measurements(self) -> RankArrivals | None:
        """Measured arrivals; None if there were no collectives. Waits for the device."""
        if self._places is None:
            return None
        self._stamps.wait()
        self._take_known()
        self._fold()
        rows = self._rows
        if not len(rows):
            return None
        return RankArrivals(
            rank=self.place.rank,
            clock=self._stamps.clock(self.place.rank),
            places=self._places,
            num_steps=self._num_steps,
            steps=rows[:, 0].astype(np.int64),
            begun=rows[:, 1].copy(),
            came=rows[:, 3:].astype(np.float32),
            met=rows[:, 2].astype(np.float32),
        )

    def take_recent(self) -> list[list[float]]:
        """Rows of the steps since the last call: number, beginning, and seconds until the end and each collective."""
        self._take_known()
        rows = list(self._recent)
        self._recent.clear()
        return rows

    def added_to(self, measured: RankMeasurements) -> RankMeasurements:
        """Return measurements of this rank, extended by its arrivals and the strategy's own count of collectives. Call
        it once."""
        look = partial(self.guard, Watcher.FIGURES)
        none: list[CollectiveRow] = []
        collectives = look(self._parallel.collectives, none, part="collectives")
        arrivals = look(self.measurements, None, part="arrivals")
        why = "" if arrivals is not None or self.place.world_size == 1 else self._why_not()
        notes = (f"lateness of ranks at collectives: not measurable, because {why}",) if why else ()
        # what marks the phases knows this object: the model would stay until Python looks for circles
        del self._parallel
        return dataclasses.replace(
            measured, arrivals=arrivals, collectives=collectives, notes=(*measured.notes, *notes)
        )

    def _why_not(self) -> str:
        """Reason why this rank's arrivals at collectives are unknown."""
        if self._parallel.no_arrivals or self._parallel.arrivals is None:
            return self._parallel.no_arrivals or "the strategy does not report when it communicates"
        return "finding the collectives takes some steps, and the training ended before that"

    def _settle(self) -> None:
        assert self._source is not None
        places = self._source.settle(self._moments)
        if places is not None:
            self._never = [math.nan] * (len(places.forward) + len(places.backward))
            self._moments.now[:] = self._never
            self._num_forward, self._adds_passes = len(places.forward), places.meets_once
            self._rows = np.empty((0, 3 + len(self._never)))
            self._places = places
            self.at_phase[Phase.FORWARD] = self._at_forward
            self.at_phase[Phase.BACKWARD] = self._at_backward
            self.at_phase[Phase.OPTIMIZER] = self._at_optimizer

    def _at_forward(self) -> None:
        if self._adds_passes and not self._is_before and self._has_begun:
            self._earlier.append((self._begun, self._moments.stamp(), self._moments.now.copy()))
        self._is_before = True

    def _at_backward(self) -> None:
        if self._is_before:  # and not when a wait within the pass has ended
            self._begun, self._is_before, self._has_begun = self._moments.stamp(), False, True
            # FSDP gathers again in the backward pass, and passes of other micro-batches came by the same places
            self._kept = self._moments.now[: self._num_forward]
            self._moments.now[:] = self._never

    def _at_optimizer(self) -> None:
        self._met = self._moments.stamp()

    def _take_known(self) -> None:
        steps, self._steps = self._steps, []
        for step in steps:
            self._stamps.add(StepMoments(*step))
        while (row := self._stamps.next_known()) is not None:
            self._chunk.extend(row)
            self._recent.append(row)
            self._num_steps += 1
        if len(self._chunk) >= CHUNK * self._rows.shape[1]:
            self._fold()

    def _fold(self) -> None:
        """Add the last steps to the table, whose older rows are thinned out evenly and identically on all ranks."""
        if not self._chunk:
            return
        values = np.array(self._chunk).reshape(-1, self._rows.shape[1])
        self._chunk = array("d")
        values[:, 2:] -= values[:, 1:2]
        first = self._num_steps - len(values)
        numbers = np.arange(first, self._num_steps)
        self._rows = np.concatenate([self._rows, values[numbers % self._every == 0]])
        while len(self._rows) > MOST_ROWS:
            self._rows = self._rows[::2].copy()
            self._every *= 2


Pass = tuple[Any, Any, list[Any]]
"""An earlier backward pass of a step: its beginning, its end, and the times of its collectives."""


class StepMoments(NamedTuple):
    """Recorded times of a step; NaN for a collective that was not reached."""

    number: int
    begun: Any
    met: Any
    came: list[Any]
    earlier: list[Pass]

    def row(self, seconds: Callable[[Any, Any], float], met_at: float) -> list[float]:
        """Number of the step, the beginning of its backward passes and their end, and the arrival time at each
        collective. seconds: returns the time between two timestamps. met_at: time of the end.

        The times of earlier micro-batches, in which no rank waits, are added to the last one part by part, so that a
        delay in some layers shows there."""
        earlier_s, before = 0.0, [0.0] * len(self.came)
        for begun, end, came in self.earlier:
            earlier_s += seconds(begun, end)
            passed = 0.0
            for place, moment in enumerate(came):
                if not isinstance(moment, float) or moment == moment:
                    passed = seconds(begun, moment)
                before[place] += passed
        begun_at = met_at - earlier_s - seconds(self.begun, self.met)
        came_at = [
            begun_at + seconds(self.begun, moment) + own
            if not isinstance(moment, float) or moment == moment
            else math.nan
            for moment, own in zip(self.came, before, strict=True)
        ]
        return [self.number, begun_at, met_at, *came_at]


class HostStamps:
    """Times on the clock that all processes of a host share."""

    at_a_time = CHUNK
    """Number of steps that are added to the table together."""

    def __init__(self) -> None:
        self.now: Callable[[], Any] = time.perf_counter
        self._known: deque[list[float]] = deque()

    def clock(self, rank: int) -> str:
        """Identity of the clock: that of the running kernel, which containers share."""
        return BOOT_ID.read_text().strip() if BOOT_ID.exists() else f"rank {rank}"

    def add(self, step: StepMoments) -> None:
        """Store the times of a step."""
        if step.earlier:
            self._known.append(step.row(lambda begin, end: end - begin, step.met))
        else:
            self._known.append([step.number, step.begun, step.met, *step.came])

    def next_known(self) -> list[float] | None:
        """The row of the next step in order; None until it is known."""
        return self._known.popleft() if self._known else None

    def wait(self) -> None:
        """Wait until all times are known."""


class DeviceStamps:
    """Times on a device, recorded as events. The end of a step is time 0, since ranks share no clock."""

    at_a_time = 1
    """See `HostStamps`: events are read and reused as soon as the device has passed them."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._under_way: deque[StepMoments] = deque()
        self._free: list[Any] = []

    def now(self) -> Any:
        """Let the current stream record an event."""
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event

    def clock(self, rank: int) -> str:
        """Identity of the clock: each rank has its own."""
        return f"device of rank {rank}"

    def add(self, step: StepMoments) -> None:
        """See `HostStamps`."""
        self._under_way.append(step)

    def next_known(self) -> list[float] | None:
        """See `HostStamps`."""
        if not self._under_way or not self._under_way[0].met.query():
            return None
        step = self._under_way.popleft()
        row = step.row(lambda begin, end: begin.elapsed_time(end) / 1e3, 0.0)
        used = [step.begun, step.met, *step.came]
        for begun, end, came in step.earlier:
            used += [begun, end, *came]
        self._free.extend(event for event in used if not isinstance(event, float))
        return row

    def wait(self) -> None:
        """See `HostStamps`."""
        for step in self._under_way:
            step.met.synchronize()
