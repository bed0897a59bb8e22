"""State of the last complete step in a worker's memory, from which it continues when another worker is lost."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scaleray.checkpoints.manifest import Manifest, Tensor
from scaleray.common.equal_models import dense_buffers
from scaleray.common.printed import quantity
from scaleray.common.seeding import random_state
from scaleray.records.run_record import Emit, EvaluationRecord, EventRecord, RepeatedMessages, StepRecord
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.items import RANDOM, Tensors
from scaleray.training.state.training_state import TrainState

RECENT_MESSAGES = 1000
"""Rank 0's messages that every worker keeps, since those that a lost rank 0 has not sent would be lost with it."""

Position = tuple[int, bool]
"""Number of steps taken, and whether the evaluation and checkpoint after the last one have been completed."""


@dataclass(frozen=True)
class _Kept:
    """State after a step. manifest: its values, and the names, types and shapes of its tensors. signals: the step's
    signals, summed over all ranks."""

    manifest: Manifest
    signals: tuple[float, ...]
    is_complete: bool
    messages: tuple[StepRecord | EvaluationRecord, ...] = ()

    @property
    def position(self) -> Position:
        return self.manifest.step, self.is_complete


class LiveState:
    """State of this worker after its last complete step. It outlives the groups to which the worker belongs."""

    def __init__(self, send_random: Callable[[int, int, Tensors], None]) -> None:
        """send_random: sends the random state of a rank in a step to a place that outlives this worker."""
        self.send_random = send_random
        self.kept: _Kept | None = None
        self.is_continued = False
        """Whether this group continues from a state in memory."""
        self._random: Mapping[int, Tensors] = {}
        self._lost: Sequence[str] = ()
        self._broken_at, self._grows = 0.0, False
        self._size: int | None = None
        self._rank: int | None = None
        self._is_moved = False  # in this group, from another rank
        self._is_new = False  # in this group, with the state of another member
        self._is_resized = False  # in this group
        self._is_changing = False  # between the first change of a step and its last one, which may communicate
        self._tensors: Tensors = {}
        self._messages: deque[StepRecord | EvaluationRecord] = deque(maxlen=RECENT_MESSAGES)

    def begin_group(
        self, random: Mapping[int, Tensors], lost: Sequence[str], broken_at: float, *, grows: bool = False
    ) -> None:
        """Record why the next group is formed. random: last random states of this worker's rank, by step, as sent by
        the worker that had this rank. lost: workers lost since the last group. broken_at: wall-clock time at the end
        of that group. grows: whether a worker joins a smaller group."""
        self._random, self._lost, self._broken_at, self._grows = random, lost, broken_at, grows

    @property
    def follows(self) -> bool:
        """Whether this group follows another one of the same training."""
        return self._broken_at > 0

    def after_forward(self, place: RankContext, step: int) -> None:
        """Send this rank's random state before the rank contributes to the sums of `step`. Others need these sums to
        complete the step, so a worker that takes this rank can always continue after it."""
        self.send_random(place.rank, step, random_state(place.device))

    def before_update(self, module: nn.Module) -> None:
        """Take over the buffers of rank 0, as the next forward pass would, so that they outlive rank 0. Collective."""
        for buffer in dense_buffers(module):
            dist.broadcast(buffer, src=0)
        self._is_changing = True

    def add(self, message: StepRecord | EvaluationRecord) -> None:
        """Store a message that rank 0 sends."""
        self._messages.append(message)

    def keep(
        self, state: TrainState, job: TrainJob, step: int, signals: tuple[float, ...], *, is_complete: bool
    ) -> None:
        """Store the state after `step`: references to what only an update changes, and copies of everything else."""
        tensors, volatile, own_values = state.capture()
        # callbacks with a state are refused; other ranks' attributes are assumed to equal this rank's
        place = state.place
        is_partitioned = state.setup.parallel.is_partitioned
        values = state.combined(own_values, place.gathered if is_partitioned else lambda own: [own] * place.world_size)
        self._tensors = {name: t.detach().clone() if name in volatile else t for name, t in tensors.items()}
        about = {name: Tensor(str(t.dtype)[6:], tuple(t.shape), ()) for name, t in tensors.items()}
        manifest = Manifest(step, state.place.world_size, job.recipe.strategy, time.time(), about, values, {})
        self.kept, self._is_changing = _Kept(manifest, signals, is_complete), False
        if is_complete:
            self.after_forward(state.place, step)  # an evaluation may have drawn numbers

    def share(self, place: RankContext) -> Manifest | None:
        """Bring all ranks to the most advanced state that one of them has, and return it; None if none of them has any.
        Collective."""
        if self._is_changing:  # the kept tensors are those of the model, which has begun its next update
            self.kept, self._is_changing = None, False
        before, self._size = self._size, place.world_size
        self._is_moved, self._rank = self._rank not in (None, place.rank), place.rank
        everyone = place.gathered((before, self.kept.position if self.kept is not None else None))
        self._is_resized = any(size not in (None, place.world_size) for size, _ in everyone)
        positions = [position for _, position in everyone]
        self.is_continued = any(positions)
        if not self.is_continued:
            return None
        furthest = max(filter(None, positions))
        source = positions.index(furthest)
        box: list[Any] = [None]
        if place.rank == source:
            assert self.kept is not None
            box = [dataclasses.replace(self.kept, messages=tuple(self._messages))]
        dist.broadcast_object_list(box, src=source)
        shared: _Kept = box[0]
        self._is_new = positions[place.rank] != furthest
        if self._is_new:
            self.kept = None  # if the transfer is interrupted, the tensors are of two steps
        for rank in [rank for rank, position in enumerate(positions) if position != furthest]:
            if place.rank in (source, rank):
                self._transfer(shared.manifest, place, source, rank)
        if self._is_new:
            self._messages = deque(shared.messages, maxlen=RECENT_MESSAGES)
            self.kept = dataclasses.replace(shared, manifest=self._own(shared.manifest, place))
        assert self.kept is not None
        return self.kept.manifest

    def load(self, targets: Tensors) -> None:
        """Copy stored values into tensors, by name."""
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(self._tensors[name])

    def unfinished(self) -> tuple[float, ...] | None:
        """Signals of the last step if its evaluation and checkpoint may not have been completed, otherwise None."""
        is_half = self.is_continued and self.kept is not None and not self.kept.is_complete
        return self.kept.signals if is_half and self.kept is not None else None

    def report(self, emit: Emit, place: RankContext, step: int) -> None:
        """Report on rank 0 how the training continues after `step`. If this worker took over from another one, it first
        sends that worker's last messages again; the recorder drops those that it already has."""
        if not self.is_continued or place.rank != 0:
            return
        if self._is_new or self._is_moved:
            emit(RepeatedMessages(tuple(self._messages)))
        ends = "with the same samples, and results equal within rounding" if self._is_resized else "and no step is lost"
        emit(EventRecord(f"after step {step}: {self.why()}, {ends}", kind="resumed", step=step))

    def why(self) -> str:
        """Reason for forming this group, with the time since the last one; empty for the first group."""
        if not self._broken_at:
            return ""
        what = f"{' and '.join(self._lost) or 'a connection'} {'were' if len(self._lost) > 1 else 'was'} lost"
        if self._grows and not self._lost:
            what = "a worker joined"
        took_over = f"{quantity(self._size or 1, 'worker')} continue" if self._is_resized else "other workers took over"
        return f"{what}; {took_over} after {time.time() - self._broken_at:.1f} s"

    def _transfer(self, manifest: Manifest, place: RankContext, source: int, to: int) -> None:
        """Send the tensors that all ranks share from one rank to another."""
        for name, about in manifest.tensors.items():
            if name.startswith(f"{RANDOM}."):
                continue
            if place.rank == source:
                dist.send(self._tensors[name].detach().cpu().contiguous(), dst=to)
            else:
                self._tensors[name] = torch.empty(about.shape, dtype=getattr(torch, about.dtype))
                dist.recv(self._tensors[name], src=source)

    def _own(self, manifest: Manifest, place: RankContext) -> Manifest:
        """State of another rank with the random numbers of this rank."""
        known = [step for step in self._random if step <= manifest.step]
        state = self._random[max(known)] if known else {}
        own = {f"{RANDOM}.{place.rank}.{name}": value for name, value in state.items()}
        self._tensors = {n: t for n, t in self._tensors.items() if not n.startswith(f"{RANDOM}.")} | own
        about = {name: Tensor(str(t.dtype)[6:], tuple(t.shape), ()) for name, t in self._tensors.items()}
        return dataclasses.replace(manifest, tensors=about)
