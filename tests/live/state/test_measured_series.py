"""What a study and a sweep publish of what they have measured so far."""

import pytest

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.live.state.measured_series import MOST_TRIALS, Measured, efficiency, measured_series
from scaleray.live.state.rank_series import ComparedRanks
from scaleray.records.published import RankSample
from scaleray.records.study_record import Estimate, Point
from scaleray.records.sweep_record import Trial


def point(workers, samples_per_s, mode="strong"):
    def known(value):
        return Estimate(value, value, value)

    return Point(
        mode=mode, workers=workers, strategy="ddp", global_batch_size=8, micro_batch_size=4, accumulation_steps=1,
        turns=[[0.1]], num_warmup_steps=0, step_time_s=known(8 / samples_per_s), samples_per_s=known(samples_per_s),
        compute_s=0.1, exposed_comm_s=0.0, input_wait_s=0.0, measured_at=0.0,
    )  # fmt: skip


def trial(number, **more):
    given = {"status": "finished", "batch_size": 8, "rule": "none", "learning_rate": 0.1, "optimizer": "sgd"}
    return Trial(number=number, warmup="", seed=0, workers=2, **{**given, **more})


def series(measured, ranks=None):
    return measured_series(measured, ranks or ComparedRanks(), run_name="study-a", run_id="1")


def values(found, metric, label):
    return {one.labels[label]: one.value for one in found if one.metric is metric}


def test_points_have_their_throughput_and_their_efficiency_beside_the_smallest_one_of_their_curve():
    points = [point(2, 180.0), point(1, 100.0), point(4, 200.0), point(2, 190.0, "weak")]
    found = series(Measured("study", 7, 12, points=points))
    strong = [one for one in found if one.labels.get("mode") == "strong"]
    assert values(strong, names.POINT_SAMPLES_PER_S, "workers") == {"2": 180, "1": 100, "4": 200}
    assert values(strong, names.POINT_EFFICIENCY, "workers") == pytest.approx({"2": 0.9, "1": 1.0, "4": 0.5})
    assert values(strong, names.WORLD_SIZE, "workers") == {"2": 2, "1": 1, "4": 4}
    assert efficiency(points[3], points) is None, "alone on its curve"
    assert values(found, live.MEASURED, "kind") == {"study": 7} and values(found, live.MEASURED_PLANNED, "kind") == {
        "study": 12
    }


def test_trials_have_what_they_came_to_and_only_the_newest_of_thousands_are_shown():
    trials = [trial(number, value=1.0 / (1 + number), samples_per_s=50.0) for number in range(MOST_TRIALS + 5)]
    found = series(Measured("sweep", 3, None, trials=trials, workers=2))
    shown = values(found, names.TRIAL_VALUE, "trial")
    assert len(shown) == MOST_TRIALS and "4" not in shown and shown["9"] == pytest.approx(0.1)
    assert [one.value for one in found if one.metric is names.WORKERS] == [2]
    assert not any(one.metric is live.MEASURED_PLANNED for one in found), "how many there will be is not known"
    assert values(series(Measured("sweep", 1, 1, trials=[trial(0, status="failed")])), names.TRIAL_VALUE, "trial") == {}


def test_ranks_of_a_study_are_compared_and_no_hang_is_seen_between_its_turns():
    ranks = ComparedRanks()
    for rank, ahead in enumerate((0.05, 0.01)):
        ranks.take_sample(RankSample(rank, "a", 2, 5, 1.0, 0.1, memory={"used": 9}, ahead_s=(ahead,)))
    found = series(Measured("study", 1, 2), ranks)
    assert values(found, live.LATENESS_S, "rank") == pytest.approx({"0": 0.0, "1": 0.04})
    assert values(found, live.MEMORY_BYTES, "rank") == {"0": 9, "1": 9}
    assert not any(one.metric is live.LAST_STEP_TIMESTAMP_S for one in found)


@pytest.mark.parametrize(
    ("status", "marks"), [("", (0, 0)), ("FINISHED", (1, 0)), ("KILLED", (1, 0)), ("FAILED", (0, 1))]
)
def test_the_end_is_marked_as_that_of_a_run(status, marks):
    found = {one.metric: one.value for one in series(Measured("study", 1, 1, status=status))}
    assert (found[live.RUN_FINISHED], found[live.RUN_FAILED]) == marks


def test_every_series_has_the_labels_of_the_table():
    found = series(Measured("sweep", 1, 2, points=[point(1, 9.0)], trials=[trial(0, value=1.0)], workers=1))
    assert [one.metric.name for one in found if set(one.labels) != set(one.metric.all_labels)] == []
