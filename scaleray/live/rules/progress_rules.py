"""Rules for the progress of a run: hangs, lost workers, restarts and its end."""

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.metric import Metric, prometheus_name
from scaleray.config.alerts import AlertLimits
from scaleray.live.rules.promql import RUN, ended, grown, of_run, remembered
from scaleray.live.rules.rule import Match, Rule
from scaleray.live.rules.series_history import SeriesHistory

HOUR_S = 3600.0
BEGAN_AGAIN_S = 60.0
"""Seconds for which the loss of workers is reported if they restarted before it was noticed."""
LAST_STEP, STEP_TIME = prometheus_name(live.LAST_STEP_TIMESTAMP_S), prometheus_name(names.STEP_TIME_S)
LONG_PHASE, WORLD_SIZE = prometheus_name(live.LONG_PHASE_TIMESTAMP_S), prometheus_name(names.WORKERS)


def _no_progress_query(limits: AlertLimits) -> str:
    steps, others = prometheus_name(live.LAST_STEP_TIMESTAMP_S), prometheus_name(live.LONG_PHASE_TIMESTAMP_S)
    age = f"time() - max by ({RUN}) ({steps} or ({others} and on ({RUN}) {steps}))"
    usual = f"{age} <= {limits.no_progress_steps:g} * {of_run(names.STEP_TIME_S)}"
    return f"{age} > {limits.no_progress_s:g} unless {usual} unless ({ended()})"


def _no_progress(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    last = seen.last(LAST_STEP)
    if last is None or _has_ended(seen):
        return None
    age_s = seen.now - max(last, seen.last(LONG_PHASE) or last)
    limit_s = max(limits.no_progress_s, limits.no_progress_steps * (seen.last(STEP_TIME) or 0.0))
    return Match(age_s) if age_s > limit_s else None


def _worker_lost_query(limits: AlertLimits) -> str:
    last = prometheus_name(live.LAST_STEP_TIMESTAMP_S)
    telling = f"count by ({RUN}) (count by ({RUN}, rank) ({last}))"
    all_gone = f"{remembered(names.WORKERS)} and {remembered(live.LAST_STEP_TIMESTAMP_S)} unless {telling}"
    missing = f"{of_run(names.WORKERS)} - {telling} > 0"
    began_again = f"{grown(live.RESTARTS, BEGAN_AGAIN_S, known_by=live.STEPS)} > 0"
    return f"(({missing}) or ({all_gone}) or ({began_again})) unless ({ended()})"


def _worker_lost(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    known, telling = len(seen.series.get(LAST_STEP, {})), len(seen.newest(LAST_STEP))
    if not known or _has_ended(seen):
        return None
    missing = (seen.last(WORLD_SIZE) or known) - telling
    if missing <= 0 and seen.knows_since(prometheus_name(live.STEPS), BEGAN_AGAIN_S):
        missing = grown_in(seen, live.RESTARTS, BEGAN_AGAIN_S)
    return Match(missing) if missing > 0 else None


def _restarts(seen: SeriesHistory, limits: AlertLimits) -> Match | None:
    count = grown_in(seen, live.RESTARTS, HOUR_S)
    return Match(count) if count >= limits.restarts_an_hour else None


def grown_in(seen: SeriesHistory, metric: Metric, last_s: float) -> float:
    """Growth of a counter in the last seconds. Before its first point, its value was 0."""
    points = list(seen.series.get(prometheus_name(metric), {}).get("", ()))
    before = [value for at, value in points if at <= seen.now - last_s]
    return points[-1][1] - (before[-1] if before else 0.0) if points else 0.0


def _has_ended(seen: SeriesHistory) -> bool:
    steps, planned = seen.last(prometheus_name(live.STEPS)), seen.last(prometheus_name(live.STEPS_PLANNED))
    is_over = any(seen.last(prometheus_name(metric)) for metric in (live.RUN_FINISHED, live.RUN_FAILED))
    return is_over or (steps is not None and planned is not None and steps >= planned)


def _said(metric: Metric) -> tuple[str, str]:
    return prometheus_name(metric), f"max by ({RUN}) (max_over_time({prometheus_name(metric)}[300s])) == 1"


FINISHED, _FINISHED_QUERY = _said(live.RUN_FINISHED)
FAILED, _FAILED_QUERY = _said(live.RUN_FAILED)

RULES = (
    Rule(
        "no_progress",
        "critical",
        "no step has finished for {value}",
        "seconds",
        "All workers are idle but still cost their full price.",
        "Read hangs/ in the run folder: it shows each rank's source line and names the rank that the others wait for. "
        "Raise alerts.long_phase_s if an evaluation or a checkpoint takes longer.",
        ("run", "Time since the last step"),
        _no_progress_query,
        _no_progress,
    ),
    Rule(
        "worker_lost",
        "critical",
        "{value} of the run's workers are lost, or were a minute ago",
        "count",
        "The others wait until their collectives fail; then the run restarts from its newest checkpoint, or ends.",
        "Check the events of the run and the logs of the node for memory, preemption or a lost machine. If it happens "
        "repeatedly, checkpoint.every_minutes determines the cost.",
        ("ranks", "Workers that report"),
        _worker_lost_query,
        _worker_lost,
        for_s=10,
    ),
    Rule(
        "restarts",
        "critical",
        "workers were restarted {value} times within an hour",
        "count",
        "Each restart costs the launch and the steps since the last checkpoint; a recurring fault ends the run.",
        "Read the reason for each restart in the run's events. If it is always the same rank or node, exclude that "
        "node (scale.label_selector).",
        ("run", "Restarts"),
        lambda limits: f"{grown(live.RESTARTS, HOUR_S)} >= {limits.restarts_an_hour}",
        _restarts,
    ),
    Rule(
        "run_failed",
        "critical",
        "the run has failed",
        "count",
        "Its workers are idle, and nothing is trained.",
        "Read the verdict in MLflow or record.json; scaleray train --resume RUN_FOLDER continues from the newest "
        "checkpoint.",
        ("run", "State"),
        lambda limits: _FAILED_QUERY,
        lambda seen, limits: Match(1.0) if seen.last(FAILED) else None,
    ),
    Rule(
        "run_finished",
        "info",
        "the run has ended, or its user has stopped it",
        "count",
        "Nothing.",
        "Read its record: scaleray report RUN.",
        ("run", "State"),
        lambda limits: _FINISHED_QUERY,
        lambda seen, limits: Match(1.0) if seen.last(FINISHED) else None,
    ),
)
