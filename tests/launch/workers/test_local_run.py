"""A run in gloo processes gives the signs of life that a run on Ray does."""

import pickle
import time
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from small_runs import Classify, make_job

from scaleray.checkpoints.catalog import Catalog
from scaleray.errors import LeftEarly
from scaleray.launch.workers import local_run
from scaleray.records.phases import Phase
from scaleray.records.published import LinksMeasured
from scaleray.records.run_record import EventRecord, Heartbeat
from scaleray.records.worker_requests import ControlRequest
from scaleray.training import rank

TOLD, WISHES = [], []
"""What this process has told while it trained, and what it is asked for."""


class Tells:
    """Whoever is told, and answers."""

    def __call__(self, told):
        TOLD.append(told)

    def ask(self, told, saying):
        with saying:
            TOLD.append(told)
        is_asked = told.rank == 0 and told.phase == Phase.EVALUATION
        return WISHES.pop(0) if WISHES and is_asked else ControlRequest.NOTHING


class EvaluatesUntilSeen(Classify):
    """Rank 0's evaluation goes on until it was told of twice: what was answered the first time is done by then."""

    def metrics(self, model, batch):
        until = time.monotonic() + 30
        while torch.distributed.get_rank() == 0 and len(evaluations()) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        return super().metrics(model, batch)


def evaluations():
    return [one for one in TOLD if isinstance(one, Heartbeat) and one.phase == Phase.EVALUATION]


def trained(place, folder, wish):
    TOLD.clear()
    WISHES[:] = [wish]
    rank.BEAT_S = 0.02
    flags = {"evaluation.every": "2 steps", "stop.after": "4 steps", "data.readers": "worker"}
    job, sources = make_job(EvaluatesUntilSeen(26, 8), flags, world_size=2)
    try:
        local_run._train(place, pickle.dumps((job, sources, folder, {})), Tells())
    except LeftEarly as left:
        return str(left)
    num_told = len(TOLD)
    time.sleep(0.1)
    messages = [one for told in TOLD if isinstance(told, list) for one in told]
    return SimpleNamespace(
        lives={(beat.rank, beat.world_size) for beat in TOLD if isinstance(beat, Heartbeat)},
        has_evaluated=bool(evaluations()),
        is_silent=len(TOLD) == num_told,
        measured_after=[one.step for one in messages if isinstance(one, LinksMeasured)],
    )


def test_each_process_tells_that_it_lives_in_a_long_evaluation_and_nothing_after_its_end(gloo, tmp_path):
    first, second = gloo.run(2, trained, str(tmp_path), ControlRequest.LINKS)
    assert first.lives == {(0, 2)} and second.lives == {(1, 2)}
    assert first.has_evaluated, "the evaluation is a sign of life of its own"
    assert first.is_silent and second.is_silent
    assert (first.measured_after, second.measured_after) == ([3], []), "what was asked for in the evaluation before"


def test_processes_that_are_asked_to_leave_save_and_do(gloo, tmp_path):
    assert (
        gloo.run(2, trained, str(tmp_path), ControlRequest.LEAVE)
        == ["left cleanly after step 3, whose checkpoint is complete"] * 2
    )
    assert [manifest.step for manifest in Catalog.of_run(str(tmp_path)).complete()] == [3]


def test_signs_of_life_reach_the_recorder_and_the_first_one_is_shown(monkeypatch, tmp_path):
    answers = []
    event, beats = EventRecord("here"), [Heartbeat(rank, "local", 1, 3, "evaluation", 1.0) for rank in (0, 1)]

    @contextmanager
    def processes(*about, **more):
        def run(*about, on_message, **more):
            answers.extend(on_message(told) for told in ([event], *beats))

        yield SimpleNamespace(run=run)

    monkeypatch.setattr(local_run, "gloo_processes", processes)
    logged, beaten, shown = [], [], []

    def beat(heartbeat):
        beaten.append(heartbeat)
        return ControlRequest.LINKS

    recorder = SimpleNamespace(log=logged.extend, beat=beat, alerts=SimpleNamespace())
    job, sources = make_job(Classify(), {}, world_size=2)
    local_run.run_in_processes(job, sources, recorder, run_path=str(tmp_path), facts={}, show=shown.extend)
    assert logged == [event] and beaten == beats and shown == [event, beats[0]]
    assert answers == [None, ControlRequest.LINKS, ControlRequest.LINKS]
