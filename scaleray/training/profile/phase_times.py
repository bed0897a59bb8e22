"""Time of each step on this rank by phase. Each phase begins with a timestamp, and the time between two timestamps is a
part of the step."""

import gc
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from scaleray.common.watchers import Guard, Watcher
from scaleray.profiling.run_profile import CLOSES_WITHIN, PAUSES, STEP
from scaleray.records.phases import PARTS, Enter, Phase
from scaleray.records.profile_record import MOST_BUCKETS, MemoryNumbers, RankMeasurements
from scaleray.records.run_record import Emit, EventRecord
from scaleray.training.observer import Observer
from scaleray.training.profile.marks import DeviceMarks, HostMarks, Marks
from scaleray.training.profile.memory_curve import MemoryCurve
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext

MOST_ROWS = 2000
"""Maximum number of stored rows of single steps: enough for a median within 2 %, and 96 KB per rank."""


class StepRows:
    """Table with one row per step, whose older rows are thinned out evenly. Totals and sums cover all steps."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self.num_steps = 0
        self.every, self.bucket_width = 1, 1
        self.totals = np.zeros(len(columns))
        self._rows = np.empty((0, len(columns)), dtype=np.float32)
        self._sums = np.zeros((MOST_BUCKETS, len(columns)))

    @property
    def rows(self) -> np.ndarray:
        """Rows (rows, columns) of steps 0, `every`, 2 `every`, ..."""
        return self._rows

    @property
    def series(self) -> np.ndarray:
        """Sums over `bucket_width` steps each (buckets, columns); the last bucket may have fewer steps."""
        return self._sums[: -(-self.num_steps // self.bucket_width)]

    def add(self, values: np.ndarray) -> None:
        """Add the next steps (steps, columns), in order."""
        numbers = np.arange(self.num_steps, self.num_steps + len(values))
        self.num_steps += len(values)
        self.totals += values.sum(axis=0)
        while self.num_steps > self.bucket_width * MOST_BUCKETS:
            half = MOST_BUCKETS // 2
            self._sums[:half] = self._sums[0::2] + self._sums[1::2]
            self._sums[half:] = 0.0
            self.bucket_width *= 2
        np.add.at(self._sums, numbers // self.bucket_width, values)
        self._rows = np.concatenate([self._rows, values[numbers % self.every == 0].astype(np.float32)])
        while len(self._rows) > MOST_ROWS:
            self._rows = self._rows[::2].copy()
            self.every *= 2


class Pauses:
    """Seconds spent in garbage collection by any thread of this process; each collection holds the interpreter."""

    def __init__(self) -> None:
        self._total_s, self._told_s, self._begun = 0.0, 0.0, 0.0
        gc.callbacks.append(self._note)

    def since_last(self) -> float:
        """Seconds since the last call."""
        before, self._told_s = self._told_s, self._total_s
        return self._total_s - before

    def close(self) -> None:
        """Stop watching. May be called twice."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self._total_s += time.perf_counter() - self._begun


CHUNK = 64
"""Number of steps added to the table at a time, because numpy's calls take longer than a step's marks."""
COLUMNS = (STEP, *PARTS, PAUSES)


class PhaseTimes(Observer):
    """Times of the phases that `marks.mark` records. The first step of the process is left out, since it compiles and
    fills caches. enter: enters a phase inside a pass, which only the strategy can observe. The training's clock calls
    `start` and `cut` at the ends of its own steps, so that the parts of a step can be compared with its measured time.
    """

    def __init__(
        self,
        place: RankContext,
        first_step: int,
        *,
        started_at: float,
        enter: Enter,
        emit: Emit,
        guard: Guard,
        marks: Marks | None = None,
    ) -> None:
        self.place, self.first_step, self._enter = place, first_step, enter
        self._emit, self._guard = emit, guard
        self.memory = MemoryCurve(place.device, started_at, first_step)
        self.marks = marks or (DeviceMarks() if place.device.type == "cuda" else HostMarks())
        self._table, self._chunk, self._pauses = StepRows(COLUMNS), array("d"), Pauses()
        self._paused: deque[float] = deque()
        """Pauses in the steps whose times are not known yet."""
        self.at_phase: dict[Phase, Callable[[], None]] = {}
        """Function called when a phase begins, in addition to the mark."""
        self._also_looking = {phase: partial(self._look_at_phase, phase) for phase in Phase}
        self.marks.listeners = self._also_looking
        self._is_warm, self._outside_s, self._num_steps = False, 0.0, 0
        self._misses_s, self._worst_gap = 0.0, 0.0

    def begin(self, setup: Setup) -> None:
        """Let the strategy report phases inside its passes."""
        setup.parallel.tell_phases(self._enter)

    def after_launch(self) -> None:
        """Sample the memory if it is due, at the point where all memory of the step is in use."""
        self._num_steps += 1
        if self.memory.is_due():
            self._look(lambda: self.memory.end_step(self.first_step + self._num_steps))
            self.marks.listeners = self._also_looking if self.memory.is_looking else self.at_phase

    def start(self, now: float) -> None:
        """Start timing at `now` on the training's clock. The time since the last step counts as an evaluation."""
        self._outside_s += self.marks.as_evaluation(now)

    def cut(self, step_s: float, now: float) -> None:
        """End a step that took `step_s` until `now` on the training's clock, and begin the next one."""
        self.marks.end_step(step_s + self._outside_s, now)
        self._outside_s = 0.0
        self._paused.append(self._pauses.since_last())
        if len(self._paused) >= self.marks.at_a_time:
            self._take_known()

    def close(self) -> None:
        """Restore the garbage collector."""
        self._pauses.close()

    @property
    def num_known(self) -> int:
        """Steps whose parts are known so far."""
        self._take_known()
        return self._table.num_steps + len(self._chunk) // len(COLUMNS)

    def totals(self) -> tuple[tuple[str, ...], int, np.ndarray]:
        """Names of the columns, number of steps whose parts are known, and the total seconds in each column."""
        self._take_known()
        self._fold()
        return COLUMNS, self._table.num_steps, self._table.totals.copy()

    def measurements(self) -> RankMeasurements:
        """Measured times. Waits for the device."""
        self.marks.wait()
        self._take_known()
        self._fold()
        table, whole_s = self._table, float(self._table.totals[0])
        gap = self._misses_s / whole_s if whole_s > 0 else None
        if gap is not None and gap > CLOSES_WITHIN:
            text = f"rank {self.place.rank}: parts of its steps are off by {gap:.1%}, more than {CLOSES_WITHIN:.0%}"
            self._emit(EventRecord(f"{text}: its breakdown of time is unreliable", kind="warning"))
        return RankMeasurements(
            rank=self.place.rank,
            node=self.place.node,
            device=self.place.device.type,
            first_step=self.first_step + 2,
            num_steps=table.num_steps,
            columns=table.columns,
            every=table.every,
            rows=table.rows,
            totals=table.totals,
            series=table.series,
            bucket_width=table.bucket_width,
            worst_gap=self._worst_gap if table.num_steps else None,
            gap=gap,
            memory=self._guard(Watcher.MEMORY, self._memory_numbers, MemoryNumbers(), part="over time"),
        )

    def _look_at_phase(self, phase: Phase) -> None:
        if phase in self.at_phase:
            self.at_phase[phase]()
        self._look(lambda: self.memory.mark(phase))

    def _memory_numbers(self) -> MemoryNumbers:
        table = self._table
        return self.memory.numbers(first_step=self.first_step + 2, width=table.bucket_width, count=len(table.series))

    def _look(self, look: Callable[[], None]) -> None:
        self._guard(Watcher.MEMORY, look, None, part="over time")

    def _take_known(self) -> None:
        while (known := self.marks.next_known()) is not None:
            pauses_s = self._paused.popleft()
            if self._is_warm:
                self._chunk.append(known[0])
                self._chunk.extend(known[1])
                self._chunk.append(pauses_s)
            self._is_warm = True
        if len(self._chunk) >= CHUNK * len(COLUMNS):
            self._fold()

    def _fold(self) -> None:
        """Add the last steps to the table, and compare the sums of their parts with their measured times."""
        if not self._chunk:
            return
        values = np.array(self._chunk).reshape(-1, len(COLUMNS))
        self._chunk = array("d")
        steps = values[:, 0]
        misses = np.abs(values[:, 1 : 1 + len(PARTS)].sum(axis=1) - steps)
        self._misses_s += float(misses.sum())
        self._worst_gap = max(self._worst_gap, float((misses / np.maximum(steps, 1e-9)).max()))
        self._table.add(values)
