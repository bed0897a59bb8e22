"""Series on their way to Ray's metrics, whose own classes are put aside."""

import math
import threading
import time

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.live.state.series import Series
from scaleray.records.published import RankSample
from scaleray.records.run_record import EventRecord
from scaleray.training import ray_metrics
from scaleray.training.ray_metrics import RankPublisher, RayMetrics

LABELS = {"ray_train_run_name": "a", "run_id": "1"}


class Made:
    """Metrics as Ray makes them, and what was done with each."""

    def __init__(self):
        self.done, self.made = [], []

    def __call__(self, kind, name, help, labels):
        self.made.append((kind, name, labels))
        outer = self

        class One:
            def set(self, value, tags):
                assert kind == "gauge" and set(tags) == set(labels)
                outer.done.append((name, value))

            def inc(self, value, tags):
                assert kind == "counter" and value > 0 and set(tags) == set(labels)
                outer.done.append((name, value))

        return One()


def test_gauges_are_set_again_each_time_and_counters_grow_by_what_is_new():
    made = Made()
    metrics = RayMetrics(made)
    for steps in (0, 5, 5, 8):
        metrics.publish([Series(names.LOSS, LABELS, 1.5), Series(live.STEPS, LABELS, steps)])
    assert [value for name, value in made.done if name == "scaleray_loss"] == [1.5] * 4
    assert [value for name, value in made.done if name == "scaleray_steps_total"] == [5, 3]
    assert made.made == [
        ("gauge", "scaleray_loss", names.LOSS.all_labels),
        ("counter", "scaleray_steps_total", live.STEPS.all_labels),
    ], "each is made once, and Ray puts its prefix before the name"


def test_two_threads_count_nothing_twice():
    counted, both = [], threading.Barrier(2, timeout=30)

    class Slow:
        def inc(self, more, tags):
            counted.append(more)
            time.sleep(0.05)  # the other one comes in between, where it can

    metrics = RayMetrics(lambda *about: Slow())

    def publish():
        both.wait()
        metrics.publish([Series(live.STEPS, LABELS, 5)])

    threads = [threading.Thread(target=publish) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [5]


def test_what_is_not_finite_is_left_out():
    made = Made()
    RayMetrics(made).publish([Series(names.LOSS, LABELS, value) for value in (math.nan, math.inf, 2.0)])
    assert made.done == [("scaleray_loss", 2.0)]


def test_a_rank_publishes_its_last_sample_again_while_no_other_comes(monkeypatch):
    monkeypatch.setattr(ray_metrics, "PUBLISH_EVERY_S", 0.001)
    published, twice = [], threading.Event()

    def to(series):
        published.append(list(series))
        if len([one for one in published if one]) >= 2:
            twice.set()
            raise RuntimeError("Ray is gone")  # which ends nothing

    with RankPublisher("a", "1", to) as publisher:
        publisher.on_message(EventRecord("no sample"))
        publisher.on_message(RankSample(3, "n", 4, 7, 99.0))
        assert twice.wait(30)
    (one,) = [one for one in published[-1] if one.metric is live.LAST_STEP_TIMESTAMP_S]
    assert one.labels == {**LABELS, "rank": "3", "node": "n"} and one.value == 99.0
