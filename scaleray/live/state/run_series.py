"""Series with one value per run, from its state, and series of ranks that the ranks do not publish themselves."""

from collections.abc import Callable, Mapping, Sequence

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.metric import Metric
from scaleray.live.state.rank_series import rank_series
from scaleray.live.state.run_state import RunState
from scaleray.live.state.series import Series, run_labels, series_of
from scaleray.records.phases import Phase
from scaleray.records.published import PublishedFacts
from scaleray.records.run_record import Heartbeat

LONG_PHASES = (Phase.EVALUATION, Phase.CHECKPOINT, Phase.COMPILING, Phase.END)
"""Phases that may take longer than many steps; that no step ends during them is not a hang."""


class LongPhases:
    """Tracks the first worker's long phases. longest_s: seconds after which a phase counts as a hang."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s
        self._phase, self._seen_at = "", 0.0

    def update(self, beats: Sequence[Heartbeat], now: float) -> None:
        """Note the first worker's activity. now: wall clock."""
        first = beats[0] if beats else None
        if first is not None and first.phase in LONG_PHASES and first.since_s + first.silent_s < self.longest_s:
            self._phase, self._seen_at = str(first.phase), now - first.silent_s

    def series(self, *, run_name: str, run_id: str) -> list[Series]:
        """Time at which such a phase was last observed; nothing before the first one."""
        seen_at = self._seen_at if self._phase else None
        return series_of(live.LONG_PHASE_TIMESTAMP_S, run_labels(run_name, run_id), seen_at, phase=self._phase)


LINKS_KEPT_S = 660.0
"""Seconds for which measured links are valid; slow links are measured every ten minutes."""


class RunSeries:
    """Creates the series of a run from its state; safe in any thread.

    peak_of: returns the peak of a device in FLOP/s by name, if the facts have none. long_phase_s: see `LongPhases`."""

    def __init__(
        self,
        facts: PublishedFacts,
        state: RunState,
        *,
        run_name: str,
        run_id: str,
        strategy: str = "",
        total_steps: int | None = None,
        peak_of: Callable[[str], float | None] = lambda device: None,
        long_phase_s: float = 600.0,
    ) -> None:
        self.facts, self.state, self._peak_of = facts, state, peak_of
        self.strategy, self.total_steps = strategy, total_steps
        self.named = {"run_name": run_name, "run_id": run_id}
        self._long_phases = LongPhases(long_phase_s)

    def of_ranks(self) -> list[Series]:
        """Series of each rank alone."""
        return [one for sample in self.state.ranks.samples.values() for one in rank_series(sample, **self.named)]

    def of_run(
        self,
        now: float,
        *,
        nonfinite_steps: int = 0,
        spooled_points: int | None = None,
        disk_free: float | None = None,
        pages: Mapping[str, str] | None = None,
        beats: Sequence[Heartbeat] = (),
        status: str = "",
    ) -> list[Series]:
        """Series that a run has once, and those that compare its ranks. now: wall clock.

        The recorder's facts at that time, None if unknown: pages: addresses of the pages `mlflow_run` and `report`.
        beats: last heartbeat of each rank. status: status of an ended run, named as in MLflow."""
        links = {"mlflow_run": "", "report": "", **(pages or {})}
        with self.state.lock:
            self._long_phases.update(beats, now)
            return [
                *self._of_steps(),
                *self._of_speed(),
                *self._of_progress(nonfinite_steps),
                *self._of_checkpoints(now, beats),
                *self._one(live.RECORDER_SPOOLED_POINTS, spooled_points),
                *self._one(live.DISK_FREE, disk_free),
                *self._one(live.RUN_INFO, 1.0, **links, strategy=self.strategy, job=self.facts.job),
                *self._one(live.RUN_FINISHED, status in ("FINISHED", "KILLED")),
                *self._one(live.RUN_FAILED, status == "FAILED"),
                *self._of_links(now),
                *self._long_phases.series(**self.named),
                *self.state.ranks.series(**self.named),
            ]

    def _one(self, metric: Metric, value: float | None, /, **labels: object) -> list[Series]:
        return series_of(metric, run_labels(**self.named), value, **labels)

    def _of_steps(self) -> list[Series]:
        state, last = self.state, self.state.last
        found: list[Series] = []
        if last is not None:
            found += self._one(names.LOSS, last.loss)
            found += self._one(names.LEARNING_RATE, last.learning_rate)
            found += self._one(names.LOSS_SCALE, last.loss_scale)
            found += self._one(names.EPOCH, last.epoch)
            found += self._one(names.WORKERS, last.world_size)
            found += self._one(live.SENT_BYTES_TOTAL, state.sent_bytes)
        found += self._one(names.GRAD_NORM, state.grad_norm)
        for name, value in state.evaluated.items():
            split, _, metric = name.partition("/")
            found += self._one(live.EVAL, value, split=split, metric=metric)
        return found

    def _of_speed(self) -> list[Series]:
        rates = self.state.window.rates()
        rate = rates.get("samples_per_s")
        expected = self.facts.expected_samples_per_s
        return [
            *self._one(names.SAMPLES_PER_S, rate),
            *self._one(names.TOKENS_PER_S, rates.get("tokens_per_s")),
            *self._one(names.INPUT_WAIT_SHARE, rates.get("input_wait_share")),
            *self._one(live.EXPOSED_COMMUNICATION_SHARE, self.state.ranks.exposed_share()),
            *self._one(live.MFU, self._mfu(rate)),
            *self._one(live.EXPECTED_SAMPLES_PER_S, expected),
            *self._one(live.EFFICIENCY_OVER_PREDICTION, rate / expected if rate is not None and expected else None),
        ]

    def _mfu(self, samples_per_s: float | None) -> float | None:
        flops, peak = self.state.flops_per_sample, self.facts.peak_flops_per_s
        device = next((sample.device for sample in self.state.ranks.samples.values()), "")
        peak = peak or (self._peak_of(device) if device else None)
        if samples_per_s is None or not flops or not peak or self.state.last is None:
            return None
        return samples_per_s * flops / (peak * self.state.last.world_size)

    def _of_progress(self, nonfinite_steps: int) -> list[Series]:
        goodput, share = self.state.goodput(), None
        if goodput is not None and goodput.elapsed_s > 0:
            share = goodput.seconds["productive"] / goodput.elapsed_s
        return [
            *self._one(live.STEPS, self.state.newest_step),
            *self._one(live.STEPS_REPEATED, goodput.repeated_steps if goodput else None),
            *self._one(live.STEPS_PLANNED, self.total_steps),
            *self._one(live.RESTARTS, goodput.attempts - 1 if goodput else None),
            *self._one(names.NONFINITE_STEPS, nonfinite_steps),
            *self._one(names.GOODPUT, share),
        ]

    def _of_checkpoints(self, now: float, beats: Sequence[Heartbeat]) -> list[Series]:
        every_steps, every_s = self.facts.checkpoint_every_steps, self.facts.checkpoint_every_s
        step_s, newest = self.state.window.rates().get("step_time_s"), self.state.checkpoint
        saves = bool(beats) and beats[0].phase == Phase.CHECKPOINT
        age_s = self.state.unsaved_s(now if saves else None)
        by_steps = every_steps * step_s if every_steps is not None and step_s is not None else None
        interval_s = None if age_s is None else min((s for s in (every_s, by_steps) if s is not None), default=None)
        return [
            *self._one(live.CHECKPOINT_AGE_S, None if every_steps is None and every_s is None else age_s),
            *self._one(live.CHECKPOINT_INTERVAL_S, interval_s),
            *self._one(names.CHECKPOINT_DURATION_S, newest.duration_s if newest is not None else None),
        ]

    def _of_links(self, now: float) -> list[Series]:
        links = self.state.links
        if links is None or now - links.recorded_at > LINKS_KEPT_S:
            return []
        ratio = links.bytes_per_s / links.usual_bytes_per_s if links.usual_bytes_per_s else None
        ends = {"source": links.source, "to": links.to}
        return [
            *self._one(live.SLOWEST_LINK_BYTES_PER_S, links.bytes_per_s, **ends),
            *self._one(live.SLOWEST_LINK, ratio, **ends),
        ]
