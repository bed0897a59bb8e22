"""Which failures are worth another start, and which would only come again."""

from __future__ import annotations

import pickle

import pytest

from scaleray.errors import (
    DataError,
    InitialisationError,
    LeftEarly,
    NonFiniteLossError,
    PeerLostError,
    RunFailedError,
    StepFailedError,
)
from scaleray.launch.workers.lost_workers import fatal_error


def failed(step, steps_done):
    return StepFailedError("rank 1 on node 1: a mistake", steps_done, step)


@pytest.mark.parametrize(
    "error",
    [
        DataError("the data", "bad", "it must be good"),
        NonFiniteLossError("NaN at step 3"),
        InitialisationError("ranks differ"),
        LeftEarly("left after step 3"),
        failed(step=0, steps_done=0),
    ],
)
def test_what_would_come_again_is_not_tried_again(error):
    assert fatal_error({0: PeerLostError("the other is gone"), 1: error}) is error


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("another worker is gone"),
        RunFailedError("the storage does not answer"),
        RuntimeError("the actor died"),
        failed(step=7, steps_done=7),
    ],
)
def test_what_may_pass_is_tried_again(error):
    assert fatal_error({0: error}) is None


def test_the_workloads_error_is_tried_once_at_a_step():
    assert fatal_error({0: failed(step=95, steps_done=95)}) is None
    assert fatal_error({0: failed(step=95, steps_done=5)}, 95, is_restart=True) is not None, "the same step again"
    assert fatal_error({0: failed(step=120, steps_done=30)}, 95, is_restart=True) is None, "it got further"


def test_an_error_before_the_first_step_of_a_restart_may_pass():
    assert fatal_error({0: failed(step=40, steps_done=0)}, is_restart=True) is None


def test_a_failed_step_survives_the_way_to_the_driver():
    error = pickle.loads(pickle.dumps(failed(step=95, steps_done=5)))
    assert (error.step, error.steps_done, str(error)) == (95, 5, "rank 1 on node 1: a mistake")
