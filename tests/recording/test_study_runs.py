"""Studies and sweeps in a real SQLite store: what their pages need, and what happens while MLflow is away."""

from __future__ import annotations

import dataclasses
import json
import re
import threading

import pytest
import study_examples
from waiting import wait_until

from scaleray.common import metric_names
from scaleray.errors import TrackingError
from scaleray.recording import saved_views, store, study_runs
from scaleray.recording.study_runs import ParentRun, send_record
from scaleray.recording.study_store import CHILD_TAG
from scaleray.recording.study_values import (
    MOST_CURVE_POINTS,
    curve_values,
    point_name,
    record_values,
    safe_name,
    thinned,
    trial_name,
)
from scaleray.records.mlflow_operations import LogParams


def client(uri):
    from mlflow import MlflowClient

    return MlflowClient(uri)


def history(uri, run_id, key):
    return sorted((m.step, m.value) for m in client(uri).get_metric_history(run_id, key))


def children(uri, run):
    return client(uri).search_runs([run.experiment_id], f"tags.`mlflow.parentRunId` = '{run.run_id}'")


def open_study(uri, **more):
    config = {"workload": {"name": "digits"}, "batch": {"global_size": 512}}
    return ParentRun.open(uri, "studies", kind="scaling-study", name="study", config=config, **more)


def log_points(run, record):
    for curve in record.curves:
        for at in curve.points:
            run.log_point(at.point)


def test_a_study_has_its_curves_with_workers_as_steps_and_a_child_for_each_point(uri, tmp_path):
    record = study_examples.study(modes=("strong",))
    run = open_study(uri)
    log_points(run, record)
    known = run.identify(record)
    (tmp_path / "record.json").write_text(known.to_json())
    assert run.finish(known, files=[tmp_path / "record.json"]) is None

    curve = record.curves[0]
    assert history(uri, run.run_id, "scaling/strong_efficiency") == [
        (at.point.workers, pytest.approx(at.efficiency.value)) for at in curve.points
    ]
    assert history(uri, run.run_id, "scaling/ideal_speedup") == [(n, float(n)) for n in (1, 2, 4, 8)]
    assert history(uri, run.run_id, "scaling/strong_fit")[-1][0] == 16  # one doubling further
    found = {child.info.run_name: child for child in children(uri, run)}
    assert sorted(found) == [f"strong-w00{n}-ddp-b512" for n in (1, 2, 4, 8)]
    child = found["strong-w008-ddp-b512"].data
    assert child.metrics["point/world_size"] == 8
    assert child.metrics["point/efficiency"] == pytest.approx(curve.points[-1].efficiency.value)
    assert "point/time_to_target_s" not in child.metrics  # it missed the target
    assert "scaling/strong_efficiency" not in child.metrics  # it would be a stray dot at step 0 of the curve
    assert known.curves[0].points[-1].point.run_id == found["strong-w008-ddp-b512"].info.run_id
    parent = client(uri).get_run(run.run_id)
    assert parent.info.status == "FINISHED"
    assert parent.data.params["workload.name"] == "digits"
    assert "| workers |" in parent.data.tags["mlflow.note.content"]
    assert curve.verdict[:40] in parent.data.tags["mlflow.note.content"].replace("\\", "")
    assert [f.path for f in client(uri).list_artifacts(run.run_id)] == ["record.json"]


def test_the_link_leads_to_a_view_of_this_study_alone_sorted_by_a_metric(uri):
    record = study_examples.study()
    run = open_study(uri)
    assert run.finish(run.identify(record)) is None
    key = run.link.partition("viewStateShareKey=")[2]
    state = saved_views.state_of(client(uri).get_experiment(run.experiment_id).tags[saved_views.TAG + key])
    assert state["searchFilter"] == f"tags.`scaleray.study` = '{run.run_id}'"
    assert client(uri).search_runs([run.experiment_id], state["searchFilter"])[0].info.run_id == run.run_id
    assert state["orderByKey"] == "metrics.`scaling/ideal_speedup`"  # not the date: children stand beside their parent
    lines = [chart["selectedMetricKeys"] for chart in state["compareRunCharts"] if chart["type"] == "LINE"]
    assert ["scaling/strong_speedup", "scaling/ideal_speedup", "scaling/strong_fit"] in lines
    logged = client(uri).get_run(run.run_id).data.metrics
    assert all(metric in logged for metrics in lines for metric in metrics)


def test_a_sweep_has_a_child_for_each_trial_and_curves_with_the_batch_size_as_steps(uri):
    record = study_examples.sweep(batches=(32, 128), rules=("sqrt",))
    run = ParentRun.open(uri, "sweeps", kind="sweep", name="sweep", config=record.config)
    for trial in record.trials:
        run.log_trial(trial)
    known = run.identify(record)
    assert run.finish(known) is None
    found = children(uri, run)
    assert {child.info.run_id for child in found} == {trial.run_id for trial in known.trials}
    assert len(found) == len(record.trials) == 12
    assert [step for step, _ in history(uri, run.run_id, "batch/samples_to_target_sqrt")] == [32, 128]
    best = min(t.value for t in record.trials if t.value is not None)
    assert (
        client(uri).get_run(run.run_id).data.metrics["trial/value"] <= best * 1.2
    )  # else not among the first 100 runs
    trial = known.trials[0]
    assert [step for step, _ in history(uri, trial.run_id, "validation/loss")] == [row[0] for row in trial.curve]
    child = client(uri).get_run(trial.run_id)
    assert child.data.params["trial.rule"] == "sqrt"
    assert child.info.end_time - child.info.start_time == pytest.approx(1000 * trial.total_time_s, abs=2)
    first = min(client(uri).get_metric_history(trial.run_id, "validation/loss"), key=lambda m: m.step)
    assert first.timestamp - child.info.start_time == pytest.approx(
        1000 * trial.curve[0][1], abs=2
    )  # MLflow's time axis


def test_a_failed_trial_is_marked_failed_with_its_error(uri):
    record = study_examples.sweep(batches=(32,), rules=("sqrt",))
    failed = dataclasses.replace(record.trials[0], status="failed", error="boom " * 3000, value=None, curve=[])
    run = ParentRun.open(uri, "sweeps", kind="sweep", name="sweep", config={})
    run.log_trial(failed)
    assert run.finish(None, status="FAILED") is None
    (child,) = children(uri, run)
    assert child.info.status == "FAILED" and child.data.tags["scaleray.error"].startswith("boom")
    assert client(uri).get_run(run.run_id).info.status == "FAILED"


def stamps(uri, run_id, key):
    return {m.step: m.timestamp / 1000 for m in client(uri).get_metric_history(run_id, key)}


def test_a_sweep_whose_record_is_sent_much_later_has_the_times_at_which_its_trials_were_measured(uri, tmp_path):
    record = study_examples.sweep(batches=(32,), rules=("sqrt",))
    began = [1.7e9 + 1000 * n for n in range(len(record.trials))]
    trials = [
        dataclasses.replace(t, ended_at=at + 900, recorded_at=[at + 100 * (n + 1) for n in range(len(t.curve))])
        for t, at in zip(record.trials, began, strict=True)
    ]
    run = ParentRun.open(uri, "sweeps", kind="sweep", name="sweep", config={})
    record = run.identify(dataclasses.replace(record, trials=trials, started_at=1.7e9, duration_s=5.0))
    (tmp_path / "record.json").write_text(record.to_json())
    assert send_record(tmp_path / "record.json", uri=uri) is None
    found = {child.info.run_name: child for child in children(uri, run)}
    for trial, at in zip(trials, began, strict=True):
        child = found[trial_name(trial)]
        assert child.info.end_time == 1000 * (at + 900)
        curve = stamps(uri, child.info.run_id, "validation/loss")
        assert sorted(curve.values()) == trial.recorded_at
        assert stamps(uri, child.info.run_id, "trial/samples") == {0: at + 900}
    last = began[-1] + 900
    assert set(stamps(uri, run.run_id, "batch/best_value_sqrt").values()) == {last}
    assert client(uri).get_run(run.run_id).info.end_time == 1000 * last


def test_a_studys_curve_carries_the_times_at_which_its_points_were_measured(uri, tmp_path):
    record = study_examples.study(modes=("strong",))
    curve = record.curves[0]
    at = {p.point.workers: 1.7e9 + 100 * p.point.workers for p in curve.points}
    points = [
        dataclasses.replace(p, point=dataclasses.replace(p.point, measured_at=at[p.point.workers]))
        for p in curve.points
    ]
    run = open_study(uri)
    record = dataclasses.replace(
        record, curves=[dataclasses.replace(curve, points=points)], started_at=1.7e9, duration_s=5000.0
    )
    (tmp_path / "record.json").write_text(run.identify(record).to_json())
    assert send_record(tmp_path / "record.json", uri=uri) is None
    assert stamps(uri, run.run_id, "scaling/strong_speedup") == at
    assert set(stamps(uri, run.run_id, "scaling/strong_fit").values()) == {1.7e9 + 5000}
    for child in children(uri, run):
        workers = int(child.data.metrics["point/world_size"])
        assert stamps(uri, child.info.run_id, "point/samples_per_s") == {0: at[workers]}
        assert stamps(uri, child.info.run_id, "point/efficiency") == {0: at[workers]}


class Away:
    """MLflow's writes fail while `is_away`."""

    def __init__(self, monkeypatch):
        from mlflow import MlflowClient

        self.is_away, self.calls = True, 0
        for name in ("create_run", "log_batch", "set_terminated", "log_artifact"):
            monkeypatch.setattr(MlflowClient, name, self._broken(getattr(MlflowClient, name)))
        monkeypatch.setattr("scaleray.recording.outbox.FIRST_S", 0.01)
        monkeypatch.setattr("scaleray.recording.outbox.MOST_S", 0.01)

    def _broken(self, real):
        def call(*args, **more):
            self.calls += 1
            if self.is_away:
                raise ConnectionError("the server is away")
            return real(*args, **more)

        return call


@pytest.mark.combination
def test_points_measured_while_mlflow_is_away_are_written_when_it_is_back(uri, monkeypatch):
    record = study_examples.study(modes=("strong",))
    run = open_study(uri)
    away = Away(monkeypatch)
    log_points(run, record)
    wait_until(lambda: away.calls > 3)  # it goes on trying
    away.is_away = False
    assert run.finish(run.identify(record)) is None
    assert len(children(uri, run)) == 4


def test_a_study_ends_although_mlflow_stays_away_and_its_record_can_be_sent_later_once(uri, tmp_path, monkeypatch):
    record = study_examples.study(modes=("strong",))
    run = open_study(uri)
    run.identify(record)  # what was written at the start is there
    with monkeypatch.context() as patch:
        Away(patch)
        log_points(run, record)
        known = run.identify(record)
        (tmp_path / "record.json").write_text(known.to_json())
        lacks = run.finish(known)
    assert lacks is not None and "the server is away" in lacks
    assert known.run_id == run.run_id and known.curves[0].points[0].point.run_id == ""
    assert children(uri, run) == []
    for _ in range(2):  # the second time changes nothing
        assert send_record(tmp_path / "record.json", uri=uri) is None
    assert len(children(uri, run)) == 4
    assert history(uri, run.run_id, "scaling/ideal_speedup") == [(n, float(n)) for n in (1, 2, 4, 8)]
    assert client(uri).get_run(run.run_id).info.status == "FINISHED"


def test_a_write_that_mlflow_refuses_does_not_keep_back_those_after_it(uri):
    record = study_examples.study(modes=("strong",))
    run = open_study(uri)
    run.identify(record)
    client(uri).log_param(run.run_id, "taken", "1")
    run.log(LogParams({"taken": "2"}))
    log_points(run, record)
    lacks = run.finish(run.identify(record))
    assert lacks is not None and lacks.startswith("1 ")
    assert len(children(uri, run)) == 4
    assert client(uri).get_run(run.run_id).info.status == "FINISHED"


def test_a_continued_study_keeps_its_points_and_makes_half_written_ones_anew(uri):
    record = study_examples.study(modes=("strong",))
    first = open_study(uri)
    points = [at.point for at in record.curves[0].points]
    for point in points[:2]:
        first.log_point(point)
    before = first.identify(record)
    half = client(uri).create_run(
        first.experiment_id,
        run_name=point_name(points[2]),
        tags={"mlflow.parentRunId": first.run_id, CHILD_TAG: point_name(points[2])},
    )  # killed here
    again = open_study(uri, continue_run_id=first.run_id)
    log_points(again, record)
    known = again.identify(record)
    assert again.finish(known) is None
    assert [at.point.run_id for at in known.curves[0].points[:2]] == [
        at.point.run_id for at in before.curves[0].points[:2]
    ]
    assert half.info.run_id not in {at.point.run_id for at in known.curves[0].points}
    assert len(children(uri, again)) == 4
    assert known.run_id == first.run_id


@pytest.mark.combination
def test_a_trial_whose_writing_failed_half_way_has_one_child(uri, monkeypatch):
    from mlflow import MlflowClient

    record = study_examples.sweep(batches=(32,), rules=("sqrt",))
    run = ParentRun.open(uri, "sweeps", kind="sweep", name="sweep", config={})
    run.identify(record)
    monkeypatch.setattr("scaleray.recording.outbox.FIRST_S", 0.0)
    left = {"create_run": 1, "log_batch": 1, "set_terminated": 1}

    def failing_once(name):
        real = getattr(MlflowClient, name)

        def call(*args, **more):
            result = real(*args, **more)
            left[name] -= 1
            if left[name] == 0:
                raise ConnectionError("the answer was lost")
            return result

        monkeypatch.setattr(MlflowClient, name, call)

    for name in left:
        failing_once(name)
    run.log_trial(record.trials[0])
    wait_until(lambda: left["set_terminated"] < 0)
    assert run.finish(run.identify(record)) is None
    (child,) = children(uri, run)
    assert child.info.status == "FINISHED"


def test_a_sweep_that_was_killed_before_it_knew_its_run_goes_on_with_it(uri):
    first = ParentRun.open(uri, "sweeps", kind="sweep", name="sweep-1", config={"a": 1}, started_at=1.7e9)
    again = ParentRun.open(uri, "sweeps", kind="sweep", name="sweep-1", config={"a": 1}, started_at=1.7e9)
    other = ParentRun.open(uri, "sweeps", kind="sweep", name="sweep-1", config={"a": 1}, started_at=1.8e9)
    assert first.run_id == again.run_id != other.run_id
    assert again.finish(None) is None


def test_what_is_logged_returns_at_once_although_mlflow_hangs(uri, monkeypatch):
    import threading

    hang = threading.Event()
    run = open_study(uri)
    record = study_examples.study(modes=("strong",))
    run.identify(record)
    from mlflow import MlflowClient

    real = MlflowClient.create_run
    monkeypatch.setattr(MlflowClient, "create_run", lambda *a, **k: (hang.wait(30), real(*a, **k))[1])
    log_points(run, record)  # returns, although the first write is stuck
    assert run.identify(record, timeout_s=0.05).curves[0].points[0].point.run_id == ""
    hang.set()
    assert run.finish(run.identify(record)) is None
    assert len(children(uri, run)) == 4


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"curves": 1}', '{"trials": []}'])
def test_a_file_that_holds_no_record_is_refused_when_it_is_sent(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(TrackingError, match="is not that of a run, study or sweep"):
        send_record(tmp_path / "record.json")
    with pytest.raises(TrackingError, match="cannot be read"):
        send_record(tmp_path / "other.json")


def test_a_view_survives_its_packing_and_fits_into_a_tag():
    record = study_examples.sweep()
    for found in (record, None):
        view = saved_views.view_of("sweep", "a name with <b> and 'quotes'", "0" * 32, found)
        name, value = saved_views.tag("key", view, created_at=1.8e9)
        assert name == "mlflow.sharedViewState.key" and len(value) < saved_views.LONGEST_TAG
        assert json.loads(value)["createdAt"] == 1_800_000_000_000
        assert found is None or view.charts[0].title == f"Best {record.metric}"
        state = saved_views.state_of(value)
        sections = {section["uuid"] for section in state["compareRunSections"] if section["display"]}
        assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == sections
        assert (
            len({chart["uuid"] for chart in state["compareRunCharts"]})
            == len(state["compareRunCharts"])
            == len(view.charts)
        )


def test_thinning_keeps_both_ends_and_the_order():
    rows = [(k, k / 10, 1.0 / (k + 1)) for k in range(5000)]
    few = thinned(rows, 7)
    assert len(few) == 7 and few[0] == rows[0] and few[-1] == rows[-1] and few == sorted(few)
    assert thinned(rows[:7], 7) == rows[:7]
    assert len(curve_values("loss", rows, [], began_at=0.0)) == MOST_CURVE_POINTS


def test_values_that_are_not_finite_stay_out_of_mlflow():
    rows = [(1, 0.1, float("nan")), (2, 0.2, float("inf")), (3, 0.3, 1.0)]
    assert curve_values("loss", rows, [], began_at=100.0) == [("loss", 1.0, 3, 100.3)]


def test_names_that_mlflow_refuses_are_mended():
    assert safe_name("eff@8[x]=y") == "eff_8_x__y"
    assert safe_name("//") == "_"
    assert safe_name("validation/loss") == "validation/loss"


def test_opening_names_a_database_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match="cannot be written"):
        open_study(f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}")


@pytest.mark.combination
def test_a_thousand_trials_cost_three_writes_each_and_few_more(uri, monkeypatch):
    from mlflow import MlflowClient

    count = 1000
    calls = []
    for name in ("create_run", "log_batch", "set_terminated", "log_metric", "set_tag", "log_param"):
        monkeypatch.setattr(MlflowClient, name, lambda *a, _name=name, **k: calls.append(_name) or _Made(len(calls)))
    monkeypatch.setattr(store.RunStore, "send", lambda self, operation: calls.append(type(operation).__name__))
    record = study_examples.large_sweep(count)
    run = ParentRun.open(uri, "sweeps", kind="sweep", name="thousand", config={})
    for trial in record.trials:
        run.log_trial(trial)
    assert run.finish(run.identify(record)) is None
    assert calls.count("create_run") == 1 + count
    assert len(calls) <= 3 * count + 20


class _Made:
    """What create_run returns."""

    def __init__(self, number):
        self.info = type("Info", (), {"run_id": f"{number:032x}"})()


@pytest.mark.parametrize(
    "record", [study_examples.study(), study_examples.sweep(batches=(32, 64))], ids=["study", "sweep"]
)
def test_every_curve_of_a_parent_stands_in_the_table_of_metrics(record):
    known = [re.compile(re.escape(metric.name).replace("RULE", ".+")) for metric in metric_names.ALL]
    made = {name for name, *_ in record_values(record)}
    assert made and all(any(pattern.fullmatch(name) for pattern in known) for name in made)


def test_a_server_that_never_answers_is_named_as_such_at_the_end():
    is_over = threading.Event()

    class Silent:
        """Does not come back from whatever it is asked for until the test is over."""

        def __getattr__(self, name):
            is_over.wait()
            raise ConnectionError

    run = ParentRun(Silent(), "sweep", "s")
    assert run.finish(None, timeout_s=0.0).endswith("did not reach MLflow (no answer in time)")
    is_over.set()


@pytest.mark.parametrize("what", ["point_values", "record_values"])
def test_a_study_goes_on_when_what_mlflow_should_get_cannot_be_made(uri, monkeypatch, what):
    def fails(*args, **more):
        raise ZeroDivisionError("no such figure")

    monkeypatch.setattr(study_runs, what, fails)
    record = study_examples.study(modes=("strong",))
    run = open_study(uri)
    log_points(run, record)
    assert "ZeroDivisionError: no such figure" in run.finish(run.identify(record))
    assert store.open_client(uri).get_run(run.run_id).info.status == "FINISHED"
