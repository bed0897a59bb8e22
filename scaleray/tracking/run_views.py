"""The chart page of an experiment's trainings: a table whose columns tell runs apart, and the loss before all else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from scaleray import metric_names as names
from scaleray.tracking import saved_views
from scaleray.tracking.saved_views import Chart, View
from scaleray.tracking.store import experiment_link

KEY = "scaleray-trainings"
"""One view for each experiment."""
MOST_METRICS = 6
"""Largest number of evaluation metrics in the table."""
PARAMS = ("topology.workers", "derived.global_batch_size", "derived.learning_rate", "derived.strategy")
FOLDED = ("train", "perf", "point", "system", "checkpoint", "compression")


def trainings_view(metrics: Sequence[str]) -> View:
    """Trainings side by side. metrics: those of evaluations, `split/metric`."""
    training = [Chart("LINE", "Training, by step", [metric.name]) for metric in (names.LOSS, names.LEARNING_RATE)]
    quality = [Chart("LINE", "Evaluations, by step", [name]) for name in metrics]
    speed = [Chart("LINE", "Speed, by step", [metric.name]) for metric in (names.SAMPLES_PER_S, names.STEP_TIME_S)]
    whole = [
        Chart("BAR", "Whole runs", [metric.name]) for metric in (names.POINT_SAMPLES_PER_S, names.PEAK_MEMORY_BYTES)
    ]
    shown = [*metrics, names.LOSS.name, names.POINT_SAMPLES_PER_S.name]
    return View(
        "Trainings",
        "tags.`scaleray.kind` = 'train'",
        "",  # newest first
        [training[0], *quality, training[1], *speed, *whole],
        [*(f"params.`{name}`" for name in PARAMS), *(f"metrics.`{name}`" for name in shown), "attributes.`User`"],
        is_ascending=False,
        folded=list(dict.fromkeys([*(name.partition("/")[0] for name in metrics), *FOLDED])),
    )


def save(client: Any, experiment_id: str, metrics: Iterable[str]) -> None:
    """Keep the view with the experiment, with these metrics beside those that earlier runs had."""
    tags = client.get_experiment(experiment_id).tags
    kept = tags.get(f"{saved_views.TAG}{KEY}")
    columns = saved_views.state_of(kept)["selectedColumns"] if kept else []
    others = {names.LOSS.name, names.POINT_SAMPLES_PER_S.name}
    before = [name for column in columns if (name := column[9:-1]) not in others and column.startswith("metrics.")]
    known = list(dict.fromkeys([*before, *sorted(metrics)]))[:MOST_METRICS]
    if known != before or not kept:
        client.set_experiment_tag(experiment_id, *saved_views.tag(KEY, trainings_view(known)))


def link(uri: str, experiment_id: str) -> str:
    """Where a browser shows the table of the experiment's trainings, whose charts are one click away."""
    return f"{experiment_link(uri, experiment_id)}&viewStateShareKey={KEY}"
