"""Record of each trial, made from Ray Tune's reports during the sweep."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray import tune

from scaleray.records.sweep_record import Trial
from scaleray.sweeps.search_space import LEARNING_RATE, Settings
from scaleray.sweeps.sweep_plan import SweepPlan
from scaleray.sweeps.trial import DETAIL, EVALUATION, NUMBER, SAMPLES, SECONDS, SETTINGS, STATUS, VALUE
from scaleray.sweeps.trial_records import make_trial

EARLY = "stopped early"
LONGEST_ERROR = 2000


@dataclass
class _Progress:
    """Progress of a running trial.

    points: (samples, seconds, value, wall clock). total_s: seconds during which it had workers.
    """

    points: list[tuple[int, float, float, float]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    earlier_s: float = 0.0
    began_at: float = 0.0
    mutations: list[str] = field(default_factory=list)
    rate: float | None = None


class TrialCollector(tune.Callback):
    """Collects Ray Tune's reports, and passes on each trial's record when it ends.

    settings: settings of trials that are not in the plan's list, by number.
    """

    def __init__(self, plan: SweepPlan, on_trial: Callable[[Trial], None]) -> None:
        self.plan, self.on_trial = plan, on_trial
        self.done: set[int] = set()
        self._open: dict[int, _Progress] = {}
        self._numbers: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps a copy to restore from, which a sweep does not need

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Record an evaluation, or the trial's end."""
        progress = self._open.setdefault(self._number(trial), _Progress())
        detail = result[DETAIL]
        rate = detail["settings"][LEARNING_RATE]
        if progress.rate is not None and rate != progress.rate:
            at = result[EVALUATION]
            progress.mutations.append(f"learning rate {progress.rate:.4g} -> {rate:.4g} before evaluation {at}")
        progress.rate = rate
        points = [(n, s, v, at) for n, s, v, at in detail["points"] if v is not None]
        if points:  # a trial that copied another's state continues from that one's history
            progress.points = [p for p in progress.points if p[0] < points[0][0]] + points
        if detail["began_at"] != progress.began_at:
            progress.earlier_s += progress.last.get("part_s", 0.0)
            progress.began_at = detail["began_at"]
        progress.last = {**result, "part_s": detail["now"] - detail["began_at"]}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record each time that a trial starts or resumes."""
        self._number(trial)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record that the trial ended on its own, or that its scheduler stopped it."""
        number = self._number(trial)
        progress = self._open.pop(number, _Progress())
        status = progress.last.get(STATUS) or EARLY
        self._end(number, status, progress, progress.last.get(DETAIL, {}).get("error", ""))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record that the trial's process was lost."""
        number = self._number(trial)
        progress = self._open.pop(number, _Progress())
        if number in self.done:
            return
        self._end(
            number, "failed", progress, _in_a_line(str(trial.get_error() or "its process was lost")), trial.config
        )

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Record that the trial restarts, or resumes from its last state."""
        if trial.checkpoint is None:
            self._open.pop(self._number(trial), None)

    def _number(self, trial: Any) -> int:
        # the original number: a population copies the whole config of the better trial
        return self._numbers.setdefault(trial.trial_id, trial.config[NUMBER])

    def _end(
        self, number: int, status: str, progress: _Progress, error: str, config: Mapping[str, Any] | None = None
    ) -> None:
        detail = progress.last.get(DETAIL, {})
        settings = detail.get("settings") or self._planned(number, config or {})
        self.done.add(number)
        self.on_trial(
            make_trial(
                self.plan,
                number,
                settings,
                status=status,
                points=[p[:3] for p in progress.points],
                recorded_at=[p[3] for p in progress.points],
                error=error[:LONGEST_ERROR],
                value=progress.last.get(VALUE),
                samples=progress.last.get(SAMPLES, 0),
                seconds=progress.last.get(SECONDS, 0.0),
                total_s=progress.earlier_s + progress.last.get("part_s", 0.0),
                samples_per_s=detail.get("samples_per_s"),
                noise_scale=detail.get("noise_scale"),
                noise_interval=detail.get("noise_interval"),
                mutations=progress.mutations,
                ended_at=detail.get("now"),
            )
        )

    def _planned(self, number: int, config: Mapping[str, Any]) -> Settings:
        return json.loads(config[SETTINGS]) if SETTINGS in config else self.plan.candidates[number]


def _in_a_line(text: str) -> str:
    """Return the line that describes the failure, from a traceback or from Ray's text on a lost process."""
    if found := re.search(
        r"Worker exit type: (\w+) Worker exit detail: (.*?)\.?( Some common causes|$)", text, re.DOTALL
    ):
        return f"its process ended ({found[1]}: {found[2]})"
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: ", line)]
    return (named or lines or ["its process was lost"])[-1].partition("Error: ")[2] or (named or lines)[-1]
