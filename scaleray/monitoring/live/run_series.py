"""Series that a run has once, from what its recorder hears; and those of its ranks, where they do not publish them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scaleray import live_metrics as live
from scaleray import metric_names as names
from scaleray.metric import Metric
from scaleray.monitoring.live.rank_series import ComparedRanks, rank_series
from scaleray.monitoring.live.series import Series, run_labels, series_of
from scaleray.records.phases import Phase
from scaleray.records.profile import Goodput
from scaleray.records.published import CountedFlops, LinksMeasured, PublishedFacts, RankSample
from scaleray.records.run import CheckpointRecord, EvaluationRecord, EventRecord, Heartbeat, StepRecord, WorkerMessage


class CheckpointAge:
    """Hears of steps, checkpoints and evaluations. facts: how often checkpoints are made."""

    def __init__(self, facts: PublishedFacts) -> None:
        self.every_steps, self.every_s = facts.checkpoint_every_steps, facts.checkpoint_every_s
        self.duration_s: float | None = None
        """Seconds that the newest checkpoint took to be written."""
        self._since: float | None = None
        self._last_step_at = 0.0
        self._evaluations: list[tuple[float, float]] = []

    def hear(self, message: WorkerMessage) -> None:
        """Take what moves the age of the newest checkpoint, and ignore everything else."""
        if isinstance(message, StepRecord):
            self._last_step_at = message.recorded_at
            self._since = self._since or message.recorded_at
        elif isinstance(message, EvaluationRecord):
            self._evaluations.append((message.recorded_at, message.duration_s))
        elif isinstance(message, CheckpointRecord):
            self.duration_s = message.duration_s
            self._begin(message.recorded_at - message.duration_s)
        elif isinstance(message, EventRecord) and message.kind == "resumed":
            self._begin(message.recorded_at)  # the checkpoint that it goes on from is all that it has

    def age_s(self, beats: Sequence[Heartbeat], now: float) -> float | None:
        """Seconds of training since the newest checkpoint began; None where none are made.

        They end with the last step, as an evaluation, a hang or a restart adds nothing that could be lost; while the
        first worker waits for a checkpoint they continue. beats: the last signs of life, by rank.
        """
        if (self.every_steps is None and self.every_s is None) or self._since is None:
            return None
        saves = bool(beats) and beats[0].phase == Phase.CHECKPOINT
        until = now if saves else self._last_step_at
        return max(0.0, until - self._since - sum(seconds for _, seconds in self._evaluations))

    def interval_s(self, step_s: float | None) -> float | None:
        """Seconds from one checkpoint to the next, as configured. step_s: time of a step now."""
        if self._since is None:
            return None
        by_steps = self.every_steps * step_s if self.every_steps is not None and step_s is not None else None
        return min((one for one in (self.every_s, by_steps) if one is not None), default=None)

    def _begin(self, at: float) -> None:
        self._since = at
        self._evaluations = [(ended, seconds) for ended, seconds in self._evaluations if ended - seconds >= at]


# Phases that may take longer than many steps, and the time at which a run was last in one: no step ends meanwhile,
# and nothing hangs.

LONG_PHASES = (Phase.EVALUATION, Phase.CHECKPOINT, Phase.COMPILING, Phase.END)


class LongPhases:
    """Looks at the first worker's signs of life. longest_s: how long a phase may last before it counts as a hang."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._phase, self._seen_at = "", 0.0

    def look(self, beats: Sequence[Heartbeat], now: float) -> None:
        """Take note of what the first worker does. now: wall clock."""
        first = beats[0] if beats else None
        if first is not None and first.phase in LONG_PHASES and first.since_s + first.silent_s < self.longest_s:
            self._phase, self._seen_at = str(first.phase), now - first.silent_s

    def series(self, *, run_name: str, run_id: str) -> list[Series]:
        """When such a phase was last seen; nothing before the first one."""
        seen_at = self._seen_at if self._phase else None
        return series_of(live.LONG_PHASE_TIMESTAMP_S, run_labels(run_name, run_id), seen_at, phase=self._phase)


WINDOW_S = 30.0
"""Rates are means over the last steps, of so many seconds."""
MOST_STEPS = 1000
LINKS_KEPT_S = 660.0
"""Seconds for which measured links say something of the run: slow ones are measured every ten minutes."""


@dataclass(frozen=True)
class Beside:
    """Facts that the recorder has in addition to the messages, at the time of reading. None: not known."""

    now: float
    goodput: Goodput | None = None
    nonfinite_steps: int = 0
    spooled_points: int | None = None
    disk_free: float | None = None
    links: Mapping[str, str] = field(default_factory=dict)
    """Addresses of the run\'s pages: `mlflow_run`, `report`."""
    beats: Sequence[Heartbeat] = ()
    """The last sign of life of every rank."""
    status: str = ""
    """Status in MLflow's words of a run that has ended."""


class RunSeries:
    """Hears a run's messages and gives its series. Not for several threads at once.

    peak_of: gives the peak of a device in FLOP/s by its name, where the facts have none. long_phase_s: see
    `LongPhases`.
    """

    def __init__(
        self,
        facts: PublishedFacts,
        *,
        run_name: str,
        run_id: str,
        strategy: str = "",
        total_steps: int | None = None,
        tokens_per_sample: int | None = None,
        peak_of: Callable[[str], float | None] = lambda device: None,
        long_phase_s: float = 600.0,
    ) -> None:
        self.facts, self.tokens_per_sample, self._peak_of = facts, tokens_per_sample, peak_of
        self.strategy, self.total_steps = strategy, total_steps
        self.named = {"run_name": run_name, "run_id": run_id}
        self.ranks = ComparedRanks()
        self._long_phases = LongPhases(long_phase_s)
        self._steps: deque[StepRecord] = deque(maxlen=MOST_STEPS)
        self._last: StepRecord | None = None
        self._newest_step = 0
        self._grad_norm: float | None = None
        self._sent_bytes = 0.0
        self._metrics: dict[str, float] = {}
        self._checkpoints = CheckpointAge(facts)
        self._links: LinksMeasured | None = None
        self._flops_per_sample = facts.flops_per_sample

    def hear(self, message: WorkerMessage) -> None:
        """Take what says something of the run now, and ignore everything else."""
        self._checkpoints.hear(message)
        if isinstance(message, RankSample):
            self.ranks.hear(message)
        elif isinstance(message, CountedFlops):
            self._flops_per_sample = message.flops_per_sample
        elif isinstance(message, LinksMeasured):
            self._links = message
        elif isinstance(message, StepRecord):
            self._hear_step(message)
        elif isinstance(message, EvaluationRecord):
            self._metrics.update(message.metrics)
        elif isinstance(message, EventRecord) and message.kind == "resumed":
            self._steps.clear()
            self.ranks.forget()
            self._newest_step = max(self._newest_step, message.step or 0)

    def of_ranks(self) -> list[Series]:
        """Series of the ranks on themselves."""
        return [one for sample in self.ranks.samples.values() for one in rank_series(sample, **self.named)]

    def of_run(self, beside: Beside) -> list[Series]:
        """Series that exist once a run, and those that only a comparison of its ranks shows."""
        self._long_phases.look(beside.beats, beside.now)
        return [
            *self._of_steps(),
            *self._of_speed(),
            *self._of_course(beside),
            *self._of_end(beside),
            *self._of_links(beside.now),
            *self._long_phases.series(**self.named),
            *self.ranks.series(**self.named),
        ]

    def _hear_step(self, record: StepRecord) -> None:
        if self._last is not None and record.step == self._last.step:
            return  # a message that came twice
        self._last = record
        self._newest_step = max(self._newest_step, record.step)
        self._steps.append(record)
        while len(self._steps) > 1 and record.recorded_at - self._steps[0].recorded_at > WINDOW_S:
            self._steps.popleft()
        if record.grad_norm is not None:
            self._grad_norm = record.grad_norm
        self._sent_bytes += record.sent_bytes

    def _one(self, metric: Metric, value: float | None, /, **labels: object) -> list[Series]:
        return series_of(metric, run_labels(**self.named), value, **labels)

    def _of_steps(self) -> list[Series]:
        last = self._last
        found: list[Series] = []
        if last is not None:
            found += self._one(names.LOSS, last.loss)
            found += self._one(names.LEARNING_RATE, last.learning_rate)
            found += self._one(names.LOSS_SCALE, last.loss_scale)
            found += self._one(names.EPOCH, last.epoch)
            found += self._one(names.WORKERS, last.world_size)
            found += self._one(live.SENT_BYTES_TOTAL, self._sent_bytes)
        found += self._one(names.GRAD_NORM, self._grad_norm)
        for name, value in self._metrics.items():
            split, _, metric = name.partition("/")
            found += self._one(live.EVAL, value, split=split, metric=metric)
        return found

    def _of_speed(self) -> list[Series]:
        seconds = sum(record.step_time_s for record in self._steps)
        rate = sum(record.num_samples for record in self._steps) / seconds if seconds > 0 else None
        tokens = rate * self.tokens_per_sample if rate is not None and self.tokens_per_sample else None
        waited = sum(record.input_wait_s for record in self._steps) / seconds if seconds > 0 else None
        expected = self.facts.expected_samples_per_s
        return [
            *self._one(names.SAMPLES_PER_S, rate),
            *self._one(names.TOKENS_PER_S, tokens),
            *self._one(names.INPUT_WAIT_SHARE, waited),
            *self._one(live.EXPOSED_COMMUNICATION_SHARE, self.ranks.exposed_share()),
            *self._one(live.MFU, self._mfu(rate)),
            *self._one(live.EXPECTED_SAMPLES_PER_S, expected),
            *self._one(live.EFFICIENCY_OVER_PREDICTION, rate / expected if rate is not None and expected else None),
        ]

    def _mfu(self, samples_per_s: float | None) -> float | None:
        flops, peak = self._flops_per_sample, self.facts.peak_flops_per_s
        device = next((sample.device for sample in self.ranks.samples.values()), "")
        peak = peak or (self._peak_of(device) if device else None)
        if samples_per_s is None or not flops or not peak or self._last is None:
            return None
        return samples_per_s * flops / (peak * self._last.world_size)

    def _of_course(self, beside: Beside) -> list[Series]:
        goodput, share = beside.goodput, None
        if goodput is not None and goodput.elapsed_s > 0:
            share = goodput.seconds["productive"] / goodput.elapsed_s
        return [
            *self._one(live.STEPS, self._newest_step),
            *self._one(live.STEPS_REPEATED, goodput.repeated_steps if goodput else None),
            *self._one(live.STEPS_PLANNED, self.total_steps),
            *self._one(live.RESTARTS, goodput.attempts - 1 if goodput else None),
            *self._one(names.NONFINITE_STEPS, beside.nonfinite_steps),
            *self._one(names.GOODPUT, share),
            *self._of_checkpoints(beside),
            *self._one(live.RECORDER_SPOOLED_POINTS, beside.spooled_points),
            *self._one(live.DISK_FREE, beside.disk_free),
        ]

    def _of_checkpoints(self, beside: Beside) -> list[Series]:
        known = self._checkpoints
        step_s = sum(record.step_time_s for record in self._steps) / len(self._steps) if self._steps else None
        return [
            *self._one(live.CHECKPOINT_AGE_S, known.age_s(beside.beats, beside.now)),
            *self._one(live.CHECKPOINT_INTERVAL_S, known.interval_s(step_s)),
            *self._one(names.CHECKPOINT_DURATION_S, known.duration_s),
        ]

    def _of_links(self, now: float) -> list[Series]:
        links = self._links
        if links is None or now - links.recorded_at > LINKS_KEPT_S:
            return []
        ratio = links.bytes_per_s / links.usual_bytes_per_s if links.usual_bytes_per_s else None
        ends = {"source": links.source, "to": links.to}
        return [
            *self._one(live.SLOWEST_LINK_BYTES_PER_S, links.bytes_per_s, **ends),
            *self._one(live.SLOWEST_LINK, ratio, **ends),
        ]

    def _of_end(self, beside: Beside) -> list[Series]:
        links = {"mlflow_run": "", "report": "", **beside.links}
        return [
            *self._one(live.RUN_INFO, 1.0, **links, strategy=self.strategy, job=self.facts.job),
            *self._one(live.RUN_FINISHED, beside.status in ("FINISHED", "KILLED")),
            *self._one(live.RUN_FAILED, beside.status == "FAILED"),
        ]
