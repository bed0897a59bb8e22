"""Series on their way to somebody who fails: nothing ends for that, and it is said once."""

from __future__ import annotations

import threading

from test_recorder import describe, step

from scaleray.common import metric_names as names
from scaleray.live import publisher
from scaleray.live.publisher import Publisher
from scaleray.live.state.series import Series
from scaleray.recording.recorder import Recorder
from scaleray.recording.store import open_client


class Given(Publisher):
    def series(self):
        return [Series(names.LOSS, {"ray_train_run_name": "a", "run_id": "1"}, 2.0)]

    own_series = series


def test_who_takes_no_series_is_asked_again_and_told_of_once(monkeypatch):
    monkeypatch.setattr(publisher, "PUBLISH_EVERY_S", 0.001)
    given, said, often = Given(None), [], threading.Event()
    calls, at_once = [], []

    def publish(series):
        at_once.append(1)
        calls.append(len(at_once))
        if len(calls) == 5:
            often.set()
        at_once.pop()
        raise RuntimeError("Ray is gone")

    given.publish, given.say = publish, said.append
    given.open()
    assert often.wait(30)
    given.end("FINISHED")
    given.close()
    assert set(calls) == {1}, "one at a time"
    assert said == ["metrics for Prometheus: at least one is lost (RuntimeError: Ray is gone); the training continues"]


def test_a_run_whose_metrics_nobody_takes_ends_as_it_should(uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path))

    def publish(series):
        raise RuntimeError("Ray is gone")

    recorder.publishing.publish = publish
    identity = recorder.start()
    recorder.log([step(1)])
    recorder.durable()
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    recorder.close()
    run = open_client(uri).get_run(identity.run_id)
    assert run.info.status == "FINISHED"
    assert [text for text in run.data.tags.values() if "Ray is gone" in text]
