"""Commands that a launcher starts several times: one of them trains."""

from __future__ import annotations

import os

import pytest

from scaleray.errors import ClusterError
from scaleray.launch.run.train import train
from scaleray.launch.session.opened import LAUNCHERS, check_started_once


@pytest.fixture(autouse=True)
def _without_a_launcher(monkeypatch):
    for name in ("RAY_JOB_CONFIG_JSON_ENV_VAR", *(name for _, *names in LAUNCHERS for name in names)):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("launcher", "rank", "size"), LAUNCHERS, ids=[name for name, *_ in LAUNCHERS])
def test_the_first_of_several_copies_continues_with_a_warning_and_the_others_are_refused(
    monkeypatch, launcher, rank, size
):
    said: list[str] = []
    monkeypatch.setenv(size, "2")
    monkeypatch.setenv(rank, "0")
    check_started_once(said.append)
    assert len(said) == 1 and f"{launcher} started 2 copies" in said[0]
    monkeypatch.setenv(rank, "1")
    with pytest.raises(ClusterError, match=f"copy 2 of 2, started by {launcher}"):
        train({"workload.name": "nothing.py:Nothing"})


def test_one_copy_and_a_job_of_ray_are_no_copies(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    check_started_once(pytest.fail)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    check_started_once(pytest.fail)
    assert "SLURM_PROCID" in os.environ
