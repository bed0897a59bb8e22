"""The messages of a training, taken again: what each reader of a run's state shows is what it showed when the state was
kept once for each reader.

`replayed_run.json` has the messages of two workers under gloo that were killed after step 8 and resumed after step 6,
and at three moments the series, the live state, the goodput and the points in MLflow.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
from live_states import describe

from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.metric import prometheus_name
from scaleray.recording.recorder import Recorder
from scaleray.recording.store import open_client
from scaleray.records import published, run_record
from scaleray.records.published import PublishedFacts

FILE = Path(__file__).with_name("replayed_run.json")
RATES = ("step_time_s", "samples_per_s", "tokens_per_s", "input_wait_share")
ELSEWHERE = ("seen_at", "run_id", "mlflow_link", "run_dir", "best_samples_per_s", *RATES)
"""Fields of a live state that differ from one replay to the next, and rates, which are compared with the series."""
OF_MACHINE = {prometheus_name(metric) for metric in (live.DISK_FREE, live.RUN_INFO)}


def message(kind, values):
    values = {name: tuple(value) if name == "ahead_s" else value for name, value in values.items()}
    return (getattr(run_record, kind, None) or getattr(published, kind))(**values)


def rounded(value):
    """Sums in another order have other last digits."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) and math.isfinite(value) else value


def replay(uri, folder, messages):
    """What readers show after a third of the messages, when the second attempt has begun, and at the end."""
    begun = next(n for n, one in enumerate(messages) if getattr(one, "kind", "") == "resumed")
    last_at = max(getattr(one, "recorded_at", 0.0) for one in messages)
    with pytest.MonkeyPatch.context() as patched:
        for name, module in list(sys.modules.items()):
            if name.startswith("scaleray.") and hasattr(module, "steady_time"):
                patched.setattr(module, "steady_time", lambda: last_at + 3.0)
        facts = PublishedFacts(
            checkpoint_every_steps=3, expected_samples_per_s=1000.0, flops_per_sample=1e6, peak_flops_per_s=1e9
        )
        first_at = min(getattr(one, "recorded_at", math.inf) for one in messages)
        recorder = Recorder(
            describe(
                uri, folder, total_steps=12, strategy="ddp", started_at=first_at - 2.0, every_steps=3,
                tokens_per_sample=5, published=facts, key="abc",
            )
        )  # fmt: skip
        recorder.start()
        moments, taken = [], 0
        for until in (begun // 2, begun + 4, len(messages)):
            recorder.log(messages[taken:until])
            taken = until
            moments.append(shown_by(recorder))
        recording = recorder.drain()
        client, run_id = open_client(uri), recorder.identity().run_id
        points = {
            name: [[point.step, point.value] for point in client.get_metric_history(run_id, name)]
            for name in sorted(client.get_run(run_id).data.metrics)
        }
        recorder.finish("FINISHED", metrics={}, tags={}, files={})
    known = {
        name: getattr(recording, name) for name in ("metrics", "evaluations", "resumed_after", "last_step", "events")
    }
    known["ranks"] = [summary.rank for summary in recording.summaries]
    return rounded(json.loads(json.dumps({"moments": moments, "points": points, "recording": known})))


def shown_by(recorder):
    recorder.durable()
    series = [
        [prometheus_name(metric), dict(sorted(labels.items())), value]
        for metric, labels, value in recorder.publishing.series()
        if prometheus_name(metric) not in OF_MACHINE
    ]
    state = {name: value for name, value in recorder.live().to_dict().items() if name not in ELSEWHERE}
    goodput = dataclasses.asdict(recorder.drain().goodput)
    return {"series": sorted(series, key=str), "live": state, "goodput": goodput}


@pytest.fixture(scope="module")
def kept():
    return json.loads(FILE.read_text())


def test_readers_of_a_run_show_what_they_showed(kept, uri, tmp_path):
    found = replay(uri, tmp_path, [message(*one) for one in kept["messages"]])
    assert found["recording"] == kept["expected"]["recording"]
    assert found["points"] == kept["expected"]["points"]
    for moment, expected in zip(found["moments"], kept["expected"]["moments"], strict=True):
        assert moment["goodput"] == expected["goodput"]
        assert moment["live"] == expected["live"]
        assert moment["series"] == expected["series"]


def test_rates_of_the_live_state_are_those_of_the_series(kept, uri, tmp_path):
    recorder = Recorder(describe(uri, tmp_path, tokens_per_sample=5))
    for one in kept["messages"]:
        recorder.state.take(message(*one))
    series = {one.metric: one.value for one in recorder.publishing.own_series()}
    state = recorder.live()
    assert state.samples_per_s == series[names.SAMPLES_PER_S] > 0
    assert state.tokens_per_s == series[names.TOKENS_PER_S] > 0
    assert state.input_wait_share == series[names.INPUT_WAIT_SHARE]
