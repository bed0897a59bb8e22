"""A hang in a check, a study, a verification's kind of group or a trial names the collective, the ranks and their lines."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from gloo_pool import PRELOADED
from small_runs import Classify, make_job

from scaleray.data import as_source
from scaleray.errors import PeerLostError, RunFailedError
from scaleray.launch.workers import gloo
from scaleray.launch.workers.gloo import UserCode
from scaleray.studies.measure_sizes import StudySize
from scaleray.studies.study import measure_in_processes
from scaleray.sweeps import trial_workers
from scaleray.sweeps.sweep_plan import material_key
from scaleray.sweeps.trial_workers import TrialGroup
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.stores import OwnedStore, open_store
from scaleray.verification.check.check import two_processes

pytestmark = pytest.mark.combination

TIMEOUT_S = 5.0  # a loaded machine brings the ranks together within it
FLAGS = {"scale.collective_timeout_s": TIMEOUT_S, "batch.global_size": 4}


class Sleeps(Classify):
    """Rank 1 sleeps in the loss of its first batch."""

    def loss(self, model, batch):
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(600)  # asleep in user code
        return super().loss(model, batch)


def asleep():
    lines, first = inspect.getsourcelines(Sleeps)
    number = first + next(number for number, line in enumerate(lines) if "asleep" in line)
    return f"test_hangs_of_groups.py:{number} in loss"


def sources():
    return {name: as_source(value, split=name) for name, value in Sleeps(16).datasets().items()}


def of_check(folder):
    job, _ = make_job(Sleeps(16), FLAGS)
    two_processes(job.config, job.workload, sources(), UserCode(None, {}, None, job.workload))


def of_study(folder):
    job, _ = make_job(Sleeps(16), FLAGS, world_size=2)
    study_size = StudySize(name="two", workers=2, job=job, num_turns=1, steps=4, seconds=0.0)
    code = UserCode(None, {}, None, job.workload)
    measure_in_processes(code, str(folder), [study_size], 0, lambda told: None, job.config, sources())


@pytest.mark.parametrize("run", [of_check, of_study])
def test_a_rank_that_sleeps_in_user_code_is_named_with_its_line(tmp_path, monkeypatch, run: Callable[[Any], None]):
    monkeypatch.setattr(gloo, "GRACE_S", 1.0)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(RunFailedError) as caught:
        run(tmp_path)
    text = str(caught.value)
    assert "rank 0 waits in collective" in text and "rank 1 did not arrive" in text, text
    assert f"rank 1 is at {os.path.dirname(__file__)}/{asleep()}" in text
    assert "what each rank was doing: " in text


def take_part(rank, meeting):
    """A rank of a trial, in a process of its own."""
    job, its_sources = make_job(Sleeps(16), FLAGS, world_size=2)
    trial_workers.fresh_job = lambda plan, settings: job
    plan: Any = SimpleNamespace(materials={material_key({}): SimpleNamespace(sources=its_sources)})
    trial_workers.train_rank(
        plan,
        {},
        RankContext(rank, 2, local_rank=rank, local_world_size=2),
        meeting,
        emit=lambda message: None,
        make_checkpointing=lambda job, place: None,
        on_hang=lambda what: None,
    )


def test_a_trial_of_a_sweep_names_the_rank_that_did_not_come(tmp_path):
    owned = OwnedStore(gloo.HOST)
    store = open_store(owned.place)  # the server
    meeting = trial_workers.Rendezvous(owned.place, "trial 1", "gloo", TIMEOUT_S, True, (str(tmp_path), "trial-1"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    ranks = [context.Process(target=take_part, args=(rank, meeting), daemon=True) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        ranks[0].join(timeout=120)  # rank 1 sleeps
        group = object.__new__(TrialGroup)  # with actors it needs Ray
        group._meets, group._nodes, group._answers = meeting, ["here", "here"], []
        text = str(group._cause(PeerLostError("rank 0: another worker is gone")))
    finally:
        for process in ranks:
            process.kill()
            process.join(timeout=10)
        del store
        owned.close()
    assert "another worker is gone" in text and "rank 0 waits in collective" in text and asleep() in text, text
