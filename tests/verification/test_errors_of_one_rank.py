"""An error that one rank alone meets ends a verification at once, with the user's line, also where passes communicate."""

from __future__ import annotations

import inspect

import gloo_pool
import pytest
import torch.distributed as dist
from gloo_pool import Failure
from small_runs import Classify, make_job
from verified import judge

from scaleray.errors import WorkloadError
from scaleray.verification.interrupted_runs import Interruption, interruption_job, verify_resume
from scaleray.verification.runs import rank0_decisions


@pytest.fixture(scope="module")
def gloo():
    """A pool of this file's own: ranks that were ended in a collective are of no use to others."""
    pool = gloo_pool.GlooPool()
    yield pool
    pool.stop()


class FailsOnOne(Classify):
    """A loss that reads what rank 1 does not have."""

    def loss(self, model, batch):
        if dist.is_initialized() and dist.get_rank() == 1:
            return {}["of this rank"]
        return super().loss(model, batch)


def line_of_the_slip():
    lines, first = inspect.getsourcelines(FailsOnOne)
    return first + next(number for number, line in enumerate(lines) if "of this rank" in line)


def resume(place, flags, folder):
    job, sources = make_job(FailsOnOne(), {**flags, "stop.after": "3 steps"}, world_size=2)
    return verify_resume(place, Interruption("x", interruption_job(job), 2, 1, folder), sources=sources)


def check(guilty):
    assert isinstance(guilty, Failure) and isinstance(guilty.error, WorkloadError)
    assert f"test_errors_of_one_rank.py:{line_of_the_slip()}" in str(guilty.error).replace('", line ', ":")


@pytest.mark.combination
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_slip_of_one_rank_while_passes_communicate_ends_a_verification(gloo, monkeypatch, strategy):
    monkeypatch.setattr(
        gloo_pool, "GRACE_S", 0.5
    )  # the other one waits in a collective, and is ended as by the product
    check(gloo.attempt(2, judge, FailsOnOne(), {"strategy.name": strategy})[1])


@pytest.mark.combination
def test_a_slip_of_one_rank_ends_the_check_of_a_resume(gloo, monkeypatch, tmp_path):
    monkeypatch.setattr(gloo_pool, "GRACE_S", 0.5)
    check(gloo.attempt(2, resume, {"strategy.name": "tensor"}, str(tmp_path))[1])


def test_where_all_ranks_hear_of_a_slip_it_is_the_outcome(gloo):
    outcome = gloo.run(2, judge, FailsOnOne(), {"strategy.name": "ddp"})[0]
    assert outcome.verdict == "differs"
    assert "loss() failed" in str(outcome)


def failures(place, name):
    return [rank0_decisions.Failures(place, name).is_shared() for _ in range(2)]


def test_an_error_that_all_ranks_meet_is_a_shared_one(gloo):
    assert gloo.run(2, failures, "a") == [[True, True]] * 2
