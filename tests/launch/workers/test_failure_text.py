"""What a user reads when a worker fails: who, where, at which step, its last lines and the cause, once."""

from __future__ import annotations

from pathlib import Path

import pytest

import scaleray
from scaleray.errors import PeerLostError, RunFailedError, StepFailedError
from scaleray.launch.workers.lost_workers import cause_of, fatal_error, what_failed
from scaleray.records.run_record import Heartbeat
from scaleray.training.health.worker_errors import is_lost_peer

pytestmark = pytest.mark.usefixtures("mlflow_database")

WORKLOADS = Path(__file__).parent.parent / "workloads.py"


def settings(tmp_path, name, **more):
    return {
        "workload.name": f"{WORKLOADS}:{name}",
        "batch.global_size": 16,
        "optimizer.learning_rate": 0.05,
        "stop.after": "12 steps",
        "scale.workers": 2,
        "tracking.uri": f"sqlite:///{tmp_path / 'mlflow.db'}",
        "checkpoint.storage_path": str(tmp_path / "runs"),
        **more,
    }


@pytest.mark.ray
def test_a_killed_worker_is_named_once_with_its_last_lines(ray_session, tmp_path):
    said = []
    with pytest.raises(RunFailedError) as caught:
        scaleray.train(
            settings(tmp_path, "Talking", **{"scale.max_failures": 0, "workload.args": {"how": "kill", "at_call": 8}}),
            show=lambda messages: said.extend(str(getattr(m, "text", "")) for m in messages),
        )
    text = str(caught.value)
    assert text.startswith("rank 1 on ")
    assert "step 8" in text
    assert "| call 7 of rank 1" in text
    assert "its process ended" in text
    assert text.count("rank 1 on") == 1
    assert "OOM" not in text, "Ray's guesses are left out"
    assert not any("rank 1 on" in line for line in said), "the error says it, and nothing else"


@pytest.mark.combination
@pytest.mark.ray
def test_a_worker_that_sleeps_is_named_with_the_collective_that_the_others_wait_in(ray_session, tmp_path):
    options = {
        "scale.max_failures": 0,
        "scale.collective_timeout_s": 15,  # a beat may be late on a loaded machine
        "workload.args": {"how": "sleep", "at_call": 8},
    }
    with pytest.raises(RunFailedError) as caught:
        scaleray.train(settings(tmp_path, "Failing", **options))
    text = str(caught.value)
    assert text.startswith("rank 1 on ") and "hangs: it has been in `forward` of step 8" in text
    assert "rank 0 waits in collective " in text and " of group default_pg, all_reduce " in text
    assert "rank 1 did not arrive" in text
    assert text.count("time.sleep(600)  # others wait") == 2, "in the sentence, and where each rank stands"
    (folder,) = (tmp_path / "runs").glob("*/hangs/*")
    assert f"what each rank was doing: {folder}" in text
    assert {path.name for path in folder.iterdir()} >= {"rank-00000.json", "rank-00001.json"}


@pytest.mark.combination
@pytest.mark.ray
def test_an_error_of_the_workload_is_not_tried_again_unless_training_got_further(ray_session, tmp_path):
    said = []
    options = {"scale.max_failures": 3, "workload.args": {"at_call": 1, "how": "backward"}}
    with pytest.raises(RunFailedError, match="the user's own mistake"):
        scaleray.train(settings(tmp_path / "first", "Failing", **options), show=said.extend)
    assert not any("starting again" in getattr(message, "text", "") for message in said)
    options = {"checkpoint.every": "2 steps", "workload.args": {"at_call": 8, "marker": str(tmp_path / "marker")}}
    record = scaleray.train(settings(tmp_path / "later", "Failing", **options))
    assert record.status == "FINISHED"
    assert sum("the user's own mistake" in event and "starting again" in event for event in record.events) == 1


def heartbeat(rank, *, step=7, phase="backward", since_s=0.1, silent_s=0.2):
    tail = (f"the last line of rank {rank}",)
    return Heartbeat(rank, f"10.0.0.{rank}", 100 + rank, step, phase, since_s, tail, 3, silent_s)


LOST = PeerLostError("rank 0 on 10.0.0.0, step 8: another worker is gone or did not answer: Timed out waiting")


def test_a_worker_that_says_nothing_is_blamed_rather_than_the_one_that_missed_it():
    text = what_failed({0: LOST}, [heartbeat(0), heartbeat(1, step=5, silent_s=11.0), heartbeat(2)])
    assert text.startswith("rank 1 on 10.0.0.1 (process 101) hangs or was lost in step 8: no sign of life for 11 s")
    assert text.endswith("| the last line of rank 1")


def test_a_worker_that_is_stuck_in_its_own_code_is_blamed_rather_than_the_one_that_waited():
    text = what_failed(
        {0: LOST}, [heartbeat(0), heartbeat(1, since_s=10.0), heartbeat(2, phase="forward", since_s=10.2)]
    )
    assert text.startswith("rank 2 on 10.0.0.2 (process 102) hangs: it has been in `forward` of step 8 for 10 s")


def test_a_worker_without_input_is_blamed_rather_than_one_that_waits_longer_inside_its_loss():
    inside_ddp = heartbeat(1, phase="forward", since_s=90.0)
    text = what_failed({0: LOST}, [heartbeat(0), inside_ddp, heartbeat(2, phase="input", since_s=80.0)])
    assert text.startswith(
        "rank 2 on 10.0.0.2 (process 102) has been waiting for its input for 80 s in step 8, longer than"
    )
    assert "scale.collective_timeout_s" in text and "hangs" not in text


def test_a_worker_that_compiles_is_no_hang():
    text = what_failed({0: LOST}, [heartbeat(0), heartbeat(1, phase="compiling", since_s=180.0)])
    assert "has been compiling for 180 s in step 8" in text and "raise scale.collective_timeout_s" in text
    assert "hangs" not in text


def test_a_worker_that_ended_is_described_without_guesses():
    from ray.exceptions import RayActorError  # here, as Ray reads its authentication mode when it is imported

    death = RayActorError(
        error_msg="The actor died unexpectedly. Worker exit type: SYSTEM_ERROR Worker exit detail: end of file. Some common causes include: (1) OOM"
    )
    text = what_failed({0: LOST, 1: death}, [heartbeat(0), heartbeat(1)])
    assert "rank 1 on 10.0.0.1 (process 101) was lost in step 8" in text
    assert "its process ended (SYSTEM_ERROR: end of file)" in text
    assert "OOM" not in text


def test_where_nobody_else_can_be_blamed_the_one_that_waited_speaks():
    assert what_failed({0: LOST, 1: LOST, 2: LOST}, []) == str(LOST)


def test_an_error_at_the_first_step_after_a_start_is_final_and_a_later_one_is_not():
    assert fatal_error({1: StepFailedError("again", 0), 0: LOST}) is not None
    assert fatal_error({1: StepFailedError("later", 3), 0: LOST}) is None


def raised_in(file, text):
    """A RuntimeError out of a file of this name."""
    try:
        exec(compile(f"raise RuntimeError({text!r})", file, "exec"))
    except RuntimeError as exc:
        return exc


@pytest.mark.parametrize(
    ("file", "text", "is_lost"),
    [
        ("/x/torch/nn/parallel/distributed.py", "Application timeout caused pair closure", True),
        ("/x/torch/distributed/distributed_c10d.py", "Connection closed by peer", True),
        ("/home/me/loss.py", "Connection closed by my database", False),
        ("/x/torch/nn/parallel/distributed.py", "Expected to have finished reduction", False),
    ],
)
def test_a_lost_peer_is_told_from_an_error_of_the_workload(file, text, is_lost):
    assert is_lost_peer(raised_in(file, text)) is is_lost


def test_the_cause_of_errors_that_cause_each_other_is_the_first_of_them():
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert cause_of(first) is first
    second.__cause__ = PeerLostError("gone")
    assert cause_of(first) is second.__cause__
