"""A workload that logs with mlflow's own functions hears where that goes."""

from __future__ import annotations

from typing import Any

import mlflow
import pytest
from small_runs import Classify, make_job, train_alone, train_job

from scaleray.common.callbacks import Callback
from scaleray.records.run_record import EventRecord
from scaleray.training.health.stray_runs import run_ids
from scaleray.training.setup.rank_context import RankContext


class Log(Callback):
    def on_evaluation(self, run: Any) -> None:
        mlflow.log_metric("my_figure", 1.0 + run.step, step=run.step)


class Logs(Classify):
    def callbacks(self) -> list[Callback]:
        return [Log()]


@pytest.fixture
def _own_store(mlflow_database, monkeypatch):
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{mlflow_database}")
    yield
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)


def warnings_of(finished: Any) -> list[str]:
    return [m.text for m in finished.messages if isinstance(m, EventRecord) and "mlflow's own functions" in m.text]


@pytest.mark.combination
@pytest.mark.usefixtures("_own_store")
def test_a_run_that_a_callback_begins_is_named_once_and_ended():
    finished = train_alone(Logs(num_val=8), {"evaluation.every": "1 epoch"})
    assert len(warnings_of(finished)) == 1 and "run.log_metrics" in warnings_of(finished)[0]
    assert mlflow.active_run() is None
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    assert run.info.status == "FINISHED"


class InModel(Classify):
    def build_model(self) -> Any:
        mlflow.start_run()
        return super().build_model()


class InCallbacks(Classify):
    def callbacks(self) -> list[Callback]:
        mlflow.start_run()
        return []


class Closed(Callback):
    def on_step(self, run: Any) -> None:
        with mlflow.start_run(nested=True):
            mlflow.log_metric("my_figure", 1.0)


class InHook(Classify):
    def callbacks(self) -> list[Callback]:
        return [Closed()]


@pytest.mark.parametrize("workload", [InModel, InCallbacks, InHook])
@pytest.mark.usefixtures("_own_store")
def test_a_run_is_named_wherever_the_workload_begins_it_and_although_it_has_ended(workload):
    finished = train_alone(workload(), {"stop.after": "1 step"})
    assert len(warnings_of(finished)) == 1 and mlflow.active_run() is None


@pytest.mark.usefixtures("_own_store")
def test_a_run_that_datasets_begins_is_named_and_one_of_the_script_is_not():
    with mlflow.start_run():
        before = run_ids()
        job, sources = make_job(Classify(), {"stop.after": "1 step"})
        assert warnings_of(train_job(RankContext(), job.changed(mlflow_runs=before), sources)) == []
        assert len(warnings_of(train_job(RankContext(), job.changed(mlflow_runs=()), sources))) == 1


@pytest.mark.usefixtures("_own_store")
def test_a_run_that_was_active_before_is_the_users():
    with mlflow.start_run() as outer:
        finished = train_alone(Logs(num_val=8), {"evaluation.every": "1 epoch"})
        assert warnings_of(finished) == [] and mlflow.active_run().info.run_id == outer.info.run_id
