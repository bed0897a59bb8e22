"""Patience: training ends after so many evaluations without a better one, alike on all ranks and after a resume."""

import math

import pytest
from small_runs import Classify, train, train_alone

from scaleray.config import load_config
from scaleray.errors import ConfigError
from scaleray.training.step.evaluation import Best

FLAGS = {
    "stop.after": "40 steps", "evaluation.every": "2 steps", "stop.patience": 3, "stop.watch": "val/accuracy max",
    "optimizer.learning_rate": 0.3,
}  # fmt: skip
WORKLOAD = Classify(num_val=10)


def watching(direction="max", patience=2):
    flags = {
        "workload.name": "m:W", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch",
        "evaluation.every": "1 epoch", "stop.patience": patience, "stop.watch": f"val/x {direction}",
    }  # fmt: skip
    return Best(load_config(flags=flags, environ={}))


@pytest.mark.parametrize(
    ("direction", "values", "ends_after", "best"),
    [
        ("max", [1, 2, 2, 1], 4, 2),
        ("min", [3, 2, 2, 3], 4, 2),
        ("max", [math.nan, 1, 2, math.nan, 3, 3, 3], 7, 3),
        ("min", [math.nan, math.nan], 2, math.nan),
        ("max", [1, 2, 1, 3, 1, 4], None, 4),
    ],
)
def test_it_ends_after_so_many_evaluations_that_are_no_better(direction, values, ends_after, best):
    watched, ended = watching(direction), None
    for number, value in enumerate(values, 1):
        watched.take(number, {"val/x": value})
        again = watching(direction)
        again.load_state(watched.state())
        assert repr(vars(again)) == repr(vars(watched))
        if watched.verdict():
            ended = number
            break
    assert ended == ends_after and (watched.value == best or math.isnan(best))


def test_all_ranks_end_after_the_same_step_and_so_does_a_resumed_run(gloo, tmp_path):
    alone = train_alone(WORKLOAD, FLAGS)
    accuracies = [e.metrics["val/accuracy"] for e in alone.evaluations]
    best = accuracies.index(max(accuracies))
    assert alone.summary.steps == 2 * (best + 1 + 3) < 40
    assert f"no better val/accuracy in 3 evaluations: the best was {max(accuracies):g}" in alone.summary.verdict
    assert alone.summary.best == {"metric": "val/accuracy", "value": max(accuracies), "step": 2 * (best + 1)}
    both = gloo.run(2, train, WORKLOAD, FLAGS)
    assert [(r.summary.steps, r.summary.verdict) for r in both] == [(alone.summary.steps, alone.summary.verdict)] * 2
    flags = {**FLAGS, "checkpoint.every": "1 steps", "checkpoint.best": "val/loss min"}
    train_alone(WORKLOAD, flags, folder=tmp_path, kill_at=alone.summary.steps - 3)
    for _ in range(2):  # the second time there is nothing to do
        again = train_alone(WORKLOAD, flags, folder=tmp_path)
        assert (again.summary.steps, again.summary.verdict) == (alone.summary.steps, alone.summary.verdict)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stop.watch": "val/f1 max"}, r"stop\.watch is 'val/f1'.*no evaluation measures this metric"),
        ({"stop.watch": "test/loss min"}, r"stop\.watch is 'test/loss'"),
        ({"stop.watch": None}, "it needs stop.watch or checkpoint.best"),
        ({"evaluation.every": None}, "it counts evaluations, so evaluation.every is needed"),
        ({"stop.watch": "val/loss"}, r"stop\.watch"),
    ],
)
def test_what_it_cannot_watch_is_one_clear_error(changes, text):
    with pytest.raises(ConfigError, match=text):
        train_alone(WORKLOAD, {**FLAGS, **changes})


def test_without_a_metric_of_its_own_it_watches_that_of_the_best_checkpoint():
    finished = train_alone(WORKLOAD, {**FLAGS, "stop.watch": None, "checkpoint.best": "val/accuracy max"})
    assert "no better val/accuracy" in finished.summary.verdict
