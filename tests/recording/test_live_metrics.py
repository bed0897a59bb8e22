"""A run's metrics on 127.0.0.1: what a recorder serves, as Prometheus' own parser reads it."""

import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest
from optional_programs import needs, program
from prometheus_client.parser import text_string_to_metric_families
from small_runs import Classify
from test_recorder import describe, step

import scaleray
from scaleray.common import live_metrics as live
from scaleray.common import metric_names as names
from scaleray.common.metric import prometheus_name
from scaleray.errors import ConfigError
from scaleray.launch.run import train as run
from scaleray.live import publisher
from scaleray.live.metrics_endpoint import HOST, MetricsEndpoint, chosen_port
from scaleray.recording.recorder import Recorder
from scaleray.recording.store import open_client
from scaleray.records.published import PublishedFacts, RankSample
from scaleray.records.run_record import EvaluationRecord

ABSENT = {
    live.LATENESS_S, live.LINK_RATIO, live.SLOWEST_LINK, live.SLOWEST_LINK_BYTES_PER_S,  # one worker
    names.LOSS_SCALE, names.TOKENS_PER_S, live.MFU, names.GRAD_NORM,
    live.EXPECTED_SAMPLES_PER_S, live.EFFICIENCY_OVER_PREDICTION,
}  # fmt: skip
"""Metrics that a run of one worker in fp32, without tokens, FLOPs or a prediction cannot have."""
BY_CHANCE = {prometheus_name(live.LONG_PHASE_TIMESTAMP_S)}
"""What a run has if its worker gives a sign of life while it evaluates."""
OF_STUDIES = {
    prometheus_name(metric)
    for metric in names.TABLE
    if metric.is_in_prometheus and (metric.name.startswith(("point/", "trial/", "live/measured")))
}


def scraped(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def samples_of(text):
    """(name, labels, value) of every sample, with the kind of its family; raises what the parser cannot read."""
    return [
        (sample.name, sample.labels, sample.value, family.type)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def assert_as_in_the_table(samples):
    for name, labels, _, kind in samples:
        metric = names.IN_PROMETHEUS[name]
        assert kind == metric.kind and set(labels) == set(metric.all_labels), name


@pytest.mark.combination
def test_a_run_serves_the_table_while_it_trains_and_nothing_when_it_has_ended(tmp_path, uri):
    found, urls = {}, []
    expected = set(names.IN_PROMETHEUS) - {prometheus_name(metric) for metric in ABSENT} - BY_CHANCE - OF_STUDIES

    def published():
        return {name for name, *_ in found.get("samples", ())} - BY_CHANCE

    def say(text):
        if "http://" in text:
            urls.append(text.split()[-1])

    def show(messages):
        """Look until the recorder, whose thread is its own, has taken what came before the last evaluation."""
        deadline = time.monotonic() + 60
        if any(isinstance(message, EvaluationRecord) and message.step == 8 for message in messages):
            while published() != expected and time.monotonic() < deadline:
                found["samples"] = samples_of(scraped(urls[0]))

    flags = {
        "workload.name": "x:Classify", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "12 steps",
        "evaluation.every": "4 steps", "tracking.uri": uri, "tracking.run_name": "run", "tracking.every_steps": 1000,
        "checkpoint.storage_path": str(tmp_path), "checkpoint.every": "2 steps", "monitoring.port": 0,
        "monitoring.every_s": 0.001,
    }  # fmt: skip
    record = run.train(flags, Classify(num_val=10), local=True, say=say, show=show)
    assert record.status == "FINISHED" and not record.events
    assert published() == expected
    assert_as_in_the_table(found["samples"])
    assert {labels["ray_train_run_name"] for _, labels, *_ in found["samples"]} == {"run"}
    with pytest.raises(urllib.error.URLError):
        scraped(urls[0])


def test_every_point_that_a_run_gives_to_mlflow_has_a_name_of_the_table(tmp_path, uri):
    flags = {
        "workload.name": "x:Classify", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "4 steps",
        "evaluation.every": "4 steps", "tracking.uri": uri, "tracking.every_steps": 1,
        "checkpoint.storage_path": str(tmp_path), "checkpoint.every": "2 steps",
    }  # fmt: skip
    record = scaleray.train(flags, Classify(num_val=10), local=True)
    given = set(open_client(uri).get_run(record.run_id).data.metrics)
    assert {names.LOSS.name, names.GOODPUT.name, names.CHECKPOINT_STALL_S.name} <= given
    assert {name for name in given if names.find(name) is None} == set(record.metrics), "but for its evaluations"


@pytest.fixture
def serving(tmp_path, uri):
    """A recorder that serves its metrics, with what it was told."""
    made = []

    def serve(*messages, **more):
        port = chosen_port(0)
        recorder = Recorder(describe(uri, tmp_path, published=PublishedFacts(port=port), **more))
        recorder.start()
        made.append(recorder)
        recorder.log(list(messages))
        recorder.durable()
        return f"http://{HOST}:{port}/metrics", recorder

    yield serve
    for recorder in made:
        recorder.close()
        recorder.finish("FINISHED", metrics={}, tags={}, files={})


@pytest.mark.combination
def test_the_end_of_a_run_that_is_looked_at_waits_for_a_last_look(serving, monkeypatch):
    """Who never hears of a run's end takes it for lost."""
    url, recorder = serving(step(1))
    scraped(url)
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    monkeypatch.setattr(publisher, "LAST_READ_S", 600)
    closing = threading.Thread(target=recorder.close)
    closing.start()
    assert [value for name, _, value, *_ in samples_of(scraped(url)) if name == prometheus_name(live.RUN_FINISHED)] == [
        1.0
    ]
    closing.join(60)
    assert not closing.is_alive()


@pytest.mark.combination
def test_the_end_of_a_run_that_nobody_looks_at_waits_for_nobody(serving, monkeypatch):
    _, recorder = serving(step(1))
    recorder.finish("FINISHED", metrics={}, tags={}, files={})
    monkeypatch.setattr(recorder.publishing, "_has_seen_end", None)  # it is not asked
    recorder.close()


def test_labels_may_hold_any_text(serving):
    odd = 'a "quoted" {label},\\ with\nlines'
    url, _ = serving(step(1), EvaluationRecord(1, {f"val/{odd}": 0.5}, 0.1), RankSample(0, 'no"de\n', 1, 1, 1.0))
    samples = samples_of(scraped(url))
    assert_as_in_the_table(samples)
    (shown,) = [labels["metric"] for name, labels, *_ in samples if name == prometheus_name(live.EVAL)]
    assert shown == odd.replace("\n", " ")


def test_two_runs_of_one_name_are_told_apart_by_their_id(serving, tmp_path):
    texts = [scraped(serving(step(1), work_dir=str(tmp_path / folder))[0]) for folder in "ab"]
    ids = [{labels["run_id"] for _, labels, *_ in samples_of(text)} for text in texts]
    assert len(ids[0] | ids[1]) == 2
    assert [{labels["ray_train_run_name"] for _, labels, *_ in samples_of(text)} for text in texts] == [{"run"}] * 2


def test_a_run_that_goes_on_keeps_its_id(uri, tmp_path):
    first = describe(uri, tmp_path)
    later = describe(uri, tmp_path, continues={"key": first.run_id})
    assert later.run_id == first.run_id != describe(uri, tmp_path, continues={}).run_id


def test_a_loss_that_is_not_finite_is_served_as_such_and_counted(serving):
    url, _ = serving(step(1), step(2, loss=float("nan"), is_finite=False))
    values = {name: value for name, _, value, _ in samples_of(scraped(url))}
    assert values[prometheus_name(names.LOSS)] != values[prometheus_name(names.LOSS)]
    assert values[prometheus_name(names.NONFINITE_STEPS)] == 1


@needs("promtool")
def test_promtool_has_no_complaint(serving):
    ranks = [RankSample(rank, "n", 2, 3, 1.0, 0.1, {"forward": 0.1}, {"used": 5}, 9, (0.2, 0.1)) for rank in (0, 1)]
    url, _ = serving(*(step(n, loss_scale=2.0, sent_bytes=5.0, grad_norm=1.0) for n in (1, 2)), *ranks)
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=scraped(url), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nobody_else_than_this_machine_can_ask(serving):
    url, _ = serving(step(1))
    port = int(url.split(":")[2].split("/")[0])
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port]
    assert [c.laddr.ip for c in listening] == ["127.0.0.1"]


def test_the_page_holds_no_password(serving, uri):
    secret = "hunter2"
    url, recorder = serving(step(1), run_path=None)
    recorder.publishing._links["report"] = ""
    recorder.publishing.begin(f"http://me:{secret}@mlflow.example/#/runs/1")
    assert secret not in scraped(url) and "mlflow.example" in scraped(url)


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path, uri):
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        flags = {
            "workload.name": "x:Classify", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "tracking.uri": uri,
            "stop.after": "4 steps", "checkpoint.storage_path": str(tmp_path / "runs"), "monitoring.port": port,
        }  # fmt: skip
        with pytest.raises(ConfigError, match=rf"monitoring\.port is {port}.*another program listens on it on 127"):
            run.train(flags, Classify(), local=True)
        with pytest.raises(ConfigError, match="0 chooses a free port"):
            MetricsEndpoint(port, list)
    assert not (tmp_path / "runs").exists()
    assert chosen_port(None) is None and chosen_port(port) == port and chosen_port(0) > 0
