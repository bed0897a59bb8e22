"""Ray Train's controller of a training with spares, without a node for the replacement of a lost worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
from ray.train.v2._internal.execution.controller import controller
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

from scaleray.launch.workers import lean_trainer

RUNNING, FINISHED = WorkerStatus(running=True), WorkerStatus(running=False)
LOST = WorkerStatus(running=False, error=RuntimeError("its node is lost"))
FAILED = WorkerStatus(running=False, error=UserExceptionWithTraceback(ValueError("a callback"), ""))


def patient(*, replaces=True):
    """A controller that has not started."""
    made = object.__new__(lean_trainer.PatientController)
    made._manages_replica_groups = replaces
    handle = SimpleNamespace(placement_group="the places")
    made._worker_group = SimpleNamespace(_worker_group_state=SimpleNamespace(placement_group_handle=handle))
    return made


def status(*workers):
    return WorkerGroupPollStatus(dict(enumerate(workers)))


@pytest.mark.parametrize(
    ("workers", "is_over"),
    [
        ([FINISHED, FINISHED], True),
        ([LOST, FINISHED, FINISHED], True),
        ([LOST, FINISHED, RUNNING], False),
        ([RUNNING, RUNNING], False),
        ([LOST, LOST], False),
        ([FAILED, FINISHED], False),
    ],
)
def test_a_training_is_over_when_all_that_are_left_have_returned(workers, is_over):
    assert patient()._is_training_succeeded(status(*workers)) is is_over


def test_without_replacements_each_worker_must_return():
    assert not patient(replaces=False)._is_training_succeeded(status(LOST, FINISHED))


@pytest.mark.parametrize(("state", "is_replaced"), [("CREATED", True), ("RESCHEDULING", False)])
def test_a_worker_is_replaced_once_its_place_has_a_node(state, is_replaced, monkeypatch):
    replaced = []
    monkeypatch.setattr(lean_trainer.ray.util, "placement_group_table", lambda places: {"state": state})
    monkeypatch.setattr(
        controller.TrainController, "_replace_bad_workers", lambda self, poll_status: replaced.append(poll_status)
    )
    patient()._replace_bad_workers(status(LOST, RUNNING))
    assert bool(replaced) is is_replaced
