"""How Ray Train is started on a Ray of a command's own, and on one of others. Without a cluster."""

from __future__ import annotations

import threading

import pytest
import ray
import ray.train
from ray.train.v2._internal.execution.scaling_policy import create_scaling_policy

from scaleray.launch.cluster import connection
from scaleray.launch.workers import lean_trainer
from scaleray.launch.workers.process_group import ProcessGroup
from scaleray.launch.workers.ray_train import without_watcher_notice


@pytest.fixture
def launched(monkeypatch):
    """What the controller's actor is made with, by whether workers inherit all variables."""
    found = {}

    def remote(**options):
        found["options"] = options

        def of_class(cls):
            found["class"] = cls
            raise InterruptedError  # the rest needs a cluster

        return of_class

    def launch(*, inherits, datasets=None, are_replaced=False):
        scaling = ray.train.ScalingConfig(num_workers=2)
        group = ProcessGroup("gloo", 60, are_replaced=are_replaced)
        trainer = lean_trainer.lean_trainer(print, datasets=datasets, scaling_config=scaling, torch_config=group)
        monkeypatch.setattr(connection, "workers_inherit", lambda: inherits)
        monkeypatch.setattr(ray, "remote", remote)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: type("Here", (), {"get_node_id": lambda self: "n"})())
        with pytest.raises(InterruptedError):
            trainer._initialize_and_run_controller(scaling_policy=create_scaling_policy(scaling))
        return found

    assert threading.current_thread() is threading.main_thread()
    return launch


def test_where_workers_inherit_neither_controller_nor_workers_have_an_environment_of_their_own(launched):
    made = launched(inherits=True)
    assert "runtime_env" not in made["options"]
    assert made["class"].worker_group_cls._get_worker_runtime_env({}) == {}
    assert made["class"].worker_group_cls._get_worker_runtime_env({"env_vars": {"A": "1"}}) == {"env_vars": {"A": "1"}}


def test_on_a_cluster_of_others_ray_train_starts_as_it_does(launched):
    made = launched(inherits=False)
    assert made["options"]["runtime_env"]["env_vars"]
    assert made["class"] is lean_trainer.controller.TrainController
    made = launched(inherits=False, are_replaced=True)
    assert made["options"]["runtime_env"]["env_vars"] and made["class"] is lean_trainer.PatientController


def test_of_what_ray_logs_the_notice_of_its_watcher_alone_is_not_shown():
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    notice = (
        "[2026-11-27 06:16:35,764 E 14023 14050] core_worker.cc:2465: Actor with class name: 'PreemptionWatcher' and "
        "ID: 'dfc0' has constructor arguments in the object store and max_restarts > 0."
    )
    others = ["PreemptionWatcher: node a is drained", "E: Actor 'Mine' has constructor arguments in the object store"]
    shown = []
    dispatcher.add_handler("test", lambda batch: shown.append(list(batch["lines"])))
    try:
        with without_watcher_notice():
            dispatcher.emit({"lines": [others[0], notice, others[1]]})
        dispatcher.emit({"lines": [notice]})
    finally:
        dispatcher.remove_handler("test")
    assert shown == [others, [notice]]
