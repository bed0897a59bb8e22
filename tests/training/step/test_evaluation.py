"""What an evaluation reads, and how often."""

import pytest
from small_runs import Classify, rows, train, train_alone

from scaleray.errors import ConfigError
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step.evaluation import KEPT_BYTES, Evaluator


@pytest.mark.parametrize(("rank_bytes", "times_read"), [(KEPT_BYTES, 1), (KEPT_BYTES + 1, 3)])
def test_a_small_split_is_read_once_and_kept_and_a_large_one_is_not(rank_bytes, times_read):
    opened = []

    def open_stream():
        opened.append(len(opened))
        return iter(["a", "b"])

    evaluator = Evaluator("val", None, None, RankContext(), open_stream, gives_tuples=False, rank_bytes=rank_bytes)
    for _ in range(3):
        assert list(evaluator._batches()) == ["a", "b"]
    assert len(opened) == times_read


class WithTest(Classify):
    def datasets(self):
        return {**super().datasets(), "test": rows(9, seed=2)}


AT_END = {"stop.after": "6 steps", "evaluation.every": "2 steps", "evaluation.test": "at_end"}


def measured(finished):
    """Splits by the step after which they were evaluated: every split once a step."""
    found = {}
    for evaluation in finished.evaluations:
        new = {name.partition("/")[0] for name in evaluation.metrics}
        assert found.get(evaluation.step, set()) <= new
        found[evaluation.step] = new
    return found


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {2: {"val"}, 4: {"val"}, 6: {"val", "test"}}),
        ({"evaluation.every": "4 steps"}, {4: {"val"}, 6: {"val", "test"}}),
        ({"evaluation.every": None}, {6: {"val", "test"}}),
        ({"stop.at": "val/loss <= 100"}, {2: {"val", "test"}}),
    ],
)
def test_the_test_split_is_evaluated_at_the_end_alone_wherever_that_is(flags, expected):
    with_others = train_alone(WithTest(num_val=10), {**AT_END, "evaluation.test": "with_others", **flags})
    at_end = train_alone(WithTest(num_val=10), {**AT_END, **flags})
    assert measured(at_end) == expected
    assert at_end.evaluations[-1].metrics == with_others.evaluations[-1].metrics


def test_all_ranks_evaluate_it_after_the_same_step_and_a_resumed_run_does_so_once(gloo, tmp_path):
    alone = train_alone(WithTest(num_val=10), AT_END)
    both = gloo.run(2, train, WithTest(num_val=10), AT_END)
    assert measured(both[0]) == measured(alone)
    assert both[0].evaluations[-1].metrics == pytest.approx(alone.evaluations[-1].metrics, rel=1e-6)
    flags = {**AT_END, "checkpoint.every": "1 steps"}
    train_alone(WithTest(num_val=10), flags, folder=tmp_path, kill_at=5)
    resumed = train_alone(WithTest(num_val=10), flags, folder=tmp_path)
    assert measured(resumed) == {6: {"val", "test"}}
    assert resumed.evaluations[-1].metrics == alone.evaluations[-1].metrics


@pytest.mark.parametrize(
    ("workload", "more", "message"),
    [
        (Classify(num_val=10), {}, r"evaluation\.test is 'at_end': the workload has no such split"),
        (
            WithTest(num_val=10),
            {"stop.at": "test/loss <= 0"},
            r"stop\.at is .*no evaluation measures this metric.*\n.*val/loss$",
        ),
        (WithTest(num_val=10), {"stop.patience": 2, "stop.watch": "test/loss min"}, r"stop\.watch is .*\n.*val/loss$"),
        (
            WithTest(num_val=10),
            {"checkpoint.best": "test/loss min", "checkpoint.keep_best": 1},
            r"checkpoint\.best is .*\n.*val/",
        ),
    ],
)
def test_no_decision_rests_on_a_split_that_is_evaluated_at_the_end(tmp_path, workload, more, message):
    with pytest.raises(ConfigError, match=message):
        train_alone(workload, {**AT_END, **more}, folder=tmp_path)
