"""A worker that stands still writes down what it is doing, once, before the others give up on it, and clears it away when it goes on."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading

import pytest
from waiting import wait_until

from scaleray.checkpoints.storage import Store
from scaleray.common.watchers import Guard
from scaleray.errors import PeerLostError
from scaleray.records.hangs import RankDump, dump_name, stacks_name
from scaleray.training.health import flight_recorder, stall_watch
from scaleray.training.health.stack_file import LOCKED, StackFile, read_stacks
from scaleray.training.health.worker_progress import WATCHDOG_SHARE, Progress, Watchdog
from scaleray.training.setup.rank_context import RankContext


def watch_of(tmp_path, progress, *, world_size=1, say=None, timeout_s=100.0, guard=None):
    return stall_watch.StallWatch(
        progress, RankContext(0, world_size, node="here"), str(tmp_path), collective_timeout_s=timeout_s, look_every_s=0.5, say=say, guard=guard
    )  # fmt: skip


def taken(step=7):
    progress = Progress()
    progress.finish_step(step)
    progress.enter("forward")
    return progress


def files(tmp_path):
    return sorted(path.name for path in tmp_path.rglob("*") if path.is_file())


def test_it_is_written_before_the_worker_is_ended():
    assert stall_watch.STALL_SHARE < WATCHDOG_SHARE < 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stall_is_written_once_and_forgotten_when_the_training_goes_on(tmp_path, monkeypatch, world_size):
    monkeypatch.setenv(stall_watch.GROUP_VARIABLE, "now")
    written, write = [], Store.write_text
    monkeypatch.setattr(Store, "write_text", lambda self, name, text: (written.append(name), write(self, name, text)))
    progress, was_enabled = taken(), faulthandler.is_enabled()
    stacks = [stacks_name(0)] if world_size > 1 else []
    with watch_of(tmp_path, progress, world_size=world_size) as watch:
        watch.look(79.9, True)
        assert files(tmp_path) == stacks and not written
        watch.look(80.1, True)
        watch.look(90.0, True)
        assert files(tmp_path) == [dump_name(0), *stacks]
        assert written == 2 * [dump_name(0)], "first what needs nothing of Python's state"
        dump = RankDump.from_json((tmp_path / "hangs" / "now" / dump_name(0)).read_bytes())
        assert (dump.step, dump.phase, dump.world_size, dump.process) == (7, "forward", world_size, os.getpid())
        progress.enter("input")
        watch.look(0.1, True)
        assert files(tmp_path) == stacks
    assert not list(tmp_path.rglob("*.*")), "nothing stays behind"
    assert faulthandler.is_enabled() == was_enabled


def test_a_watchdog_has_it_written_at_the_first_look_after_the_limit(tmp_path):
    progress, seen = taken(), []
    watch = watch_of(tmp_path, progress, timeout_s=0.25)  # 0.2 s until it is a stall

    def beat(step, phase, since_s):  # comes after each look
        seen.append((since_s >= 0.2, bool(files(tmp_path))))
        return False

    dog = Watchdog(
        progress, interval_s=0.02, limit_s=1e9, beat=beat, on_leave=lambda: None, on_hang=lambda what: None, look=watch.look
    )  # fmt: skip
    with watch, dog:
        wait_until(lambda: len([late for late, _ in seen if late]) >= 3)
    assert all(late == is_written for late, is_written in seen), "at the next look, which is less than two intervals"


def test_a_run_alone_says_where_it_stands_and_how_to_read_more(tmp_path):
    said, release, progress = [], threading.Event(), Progress()

    def users_loss():
        progress.thread_id = threading.get_ident()
        progress.finish_step(3)
        progress.enter("forward")
        release.wait(60)  # asleep

    thread = threading.Thread(target=users_loss)
    with watch_of(tmp_path, progress, say=said.append) as watch:
        thread.start()
        wait_until(lambda: progress.phase == "forward")
        watch.look(90.0, False)
        assert said == [], "a checkpoint may take long"
        progress.enter("forward")
        watch.look(90.0, True)
        release.set()
        thread.join()
    (text,) = said
    assert text.startswith("no progress in step 4 for 90 s, at ") and "test_stall_watch.py" in text
    assert "release.wait(60)  # asleep" in text and dump_name(0) in text


def test_where_the_training_thread_stands_is_told_with_all_other_threads(tmp_path):
    progress, found = taken(), []
    caller = threading.Thread(
        target=lambda: found.append(
            stall_watch.rank_dump(
                progress, RankContext(), why="", with_lines=True, after_error=(), read=lambda act, other: act()
            )
        )
    )
    caller.start()
    caller.join()
    dump = found[0]
    assert dump.threads[0].trains and any("threading.py" in line.file for line in dump.threads[0].lines)
    assert "test_stall_watch.py" in dump.stands_on[0].file and "caller." in dump.stands_on[0].code


def test_a_lost_peer_leaves_an_account_with_the_line_of_the_collective_unless_there_is_one_from_before(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(stall_watch.GROUP_VARIABLE, "now")

    def train(progress, *, looks):
        with watch_of(tmp_path, progress, world_size=2) as watch:
            if looks:
                watch.look(90.0, True)
            try:
                raise RuntimeError("Connection closed by peer")  # the collective
            except RuntimeError as exc:
                raise PeerLostError("gone") from exc

    def fails(progress, *, looks):
        with pytest.raises(PeerLostError):
            train(progress, looks=looks)
        (path,) = tmp_path.rglob(dump_name(0))
        return RankDump.from_json(path.read_bytes())

    after = fails(taken(), looks=False)
    assert after.is_after_error and "# the collective" in after.stands_on[0].code
    assert not list(tmp_path.rglob(stacks_name(0))), "its process speaks for itself"
    assert not fails(taken(), looks=True).is_after_error, "what was pending is known only before"


def test_a_group_that_replaces_another_one_of_its_name_removes_the_account_of_that(tmp_path, monkeypatch):
    monkeypatch.setenv(stall_watch.GROUP_VARIABLE, "now")
    with pytest.raises(PeerLostError), watch_of(tmp_path, taken(), world_size=2):
        raise PeerLostError("gone")
    assert dump_name(0) in files(tmp_path)
    with watch_of(tmp_path, taken(), world_size=2):
        assert files(tmp_path) == [stacks_name(0)]
    assert not files(tmp_path)


def test_what_cannot_be_written_costs_nothing_and_is_said_once(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        Store, "write_text", lambda self, name, text: (_ for _ in ()).throw(OSError("the disk is full"))
    )
    progress = taken()
    with watch_of(tmp_path, progress, guard=Guard(said.append)) as watch:
        for _ in range(3):
            watch.look(90.0, True)
            progress.enter("forward")
    assert len(said) == 1 and said[0].startswith("dumps of hangs: no longer observed (OSError: the disk is full)")


def test_a_flight_recorder_that_torch_has_changed_leaves_the_stacks(tmp_path, monkeypatch):
    def gone(*options):
        raise TypeError("incompatible function arguments")

    from torch._C import _distributed_c10d as c10d

    monkeypatch.setenv(flight_recorder.SIZE_VARIABLE, "100")
    monkeypatch.setattr(c10d, "_dump_fr_trace", gone)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", gone)
    said = []
    with watch_of(tmp_path, taken(), guard=Guard(said.append)) as watch:
        watch.look(90.0, True)
        (path,) = tmp_path.rglob(dump_name(0))
        dump = RankDump.from_json(path.read_bytes())
    assert dump.calls is None and dump.is_complete
    assert [text.partition(":")[0] for text in said] == [
        "dumps of hangs (entries without lines)",
        "dumps of hangs (entries with frames)",
    ]
    monkeypatch.delattr(c10d, "_dump_fr_trace")
    monkeypatch.delattr(c10d, "_dump_nccl_trace", raising=False)  # only a torch with NCCL has it
    assert flight_recorder.entries_with_frames() is None, "a torch without it"
    monkeypatch.setenv(flight_recorder.SIZE_VARIABLE, "0")
    assert flight_recorder.entries_without_lines() is None, "switched off"


def test_the_users_own_size_of_the_recorder_stays(monkeypatch):
    monkeypatch.setenv(flight_recorder.SIZE_VARIABLE, "0")
    flight_recorder.switch_on()
    assert os.environ[flight_recorder.SIZE_VARIABLE] == "0"
    monkeypatch.delenv(flight_recorder.SIZE_VARIABLE)
    monkeypatch.setenv(flight_recorder.OLD_VARIABLE, "7")
    flight_recorder.switch_on()
    assert flight_recorder.SIZE_VARIABLE not in os.environ


def test_reading_lines_imports_no_compiler(monkeypatch):
    import torch

    monkeypatch.delitem(vars(torch), "_inductor", raising=False)
    with flight_recorder._without_inductor():
        assert not hasattr(torch._inductor, "codecache")
    assert "_inductor" not in vars(torch)
    monkeypatch.setitem(vars(torch), "_inductor", sys)
    with flight_recorder._without_inductor():
        assert torch._inductor is sys, "the real one"


# the file of a process that cannot speak


def test_stacks_are_written_when_nobody_looks_and_forgotten_at_the_next_look(tmp_path):
    file = StackFile(
        tmp_path / "it.txt", rank=3, world_size=8, node="10.0.0.1", process=55, thread_id=threading.get_ident()
    )
    try:
        assert read_stacks(file.path.read_text(), step=1, phase="loss", recorded_at=0.0) is None
        file.expect_look(0.05)
        wait_until(
            lambda: (read_stacks(file.path.read_text(), step=1, phase="loss", recorded_at=0.0) or file).__dict__.get(
                "stands_on"
            )
        )
        found = read_stacks(file.path.read_text(), step=1, phase="loss", recorded_at=0.0)
        assert (found.rank, found.world_size, found.node, found.process, found.why) == (3, 8, "10.0.0.1", 55, LOCKED)
        assert found.calls is None and found.stands_on
        file.expect_look(600)
        assert read_stacks(file.path.read_text(), step=1, phase="loss", recorded_at=0.0) is None
    finally:
        file.close()
    assert not file.path.exists()


FATAL = """rank 1 of 2 on 10.0.0.7, process 99, training thread 0x00007f0000000002
Fatal Python error: Segmentation fault

Current thread 0x00007f0000000001 (most recent call first):
  <no Python frame>

Thread 0x00007f0000000002 (most recent call first):
  File "/lib/site-packages/torch/nn/functional.py", line 7 in linear
  File "/home/me/model.py", line 33 in forward
  File "/home/me/model.py", line 12 in loss
  File "/lib/site-packages/ray/train/x.py", line 5 in run

Extension modules: numpy (total: 1)
"""


def test_a_process_that_was_ended_is_read_with_the_signal_and_the_users_lines():
    found = read_stacks(FATAL, step=7, phase="loss", recorded_at=1.0)
    assert (found.rank, found.process, found.why, found.step) == (1, 99, "Segmentation fault", 7)
    assert [(line.file, line.number, line.function) for line in found.stands_on] == [
        ("/home/me/model.py", 33, "forward"),
        ("/home/me/model.py", 12, "loss"),
    ]
    assert read_stacks("", step=0, phase="", recorded_at=0.0) is None
    assert read_stacks(json.dumps({"rank": 1}), step=0, phase="", recorded_at=0.0) is None


def test_a_file_of_a_process_without_python_frames_says_at_least_the_signal():
    cut = FATAL.partition("Thread 0x00007f0000000002")[0]
    found = read_stacks(cut, step=7, phase="loss", recorded_at=1.0)
    assert (found.why, found.stands_on) == ("Segmentation fault", ())
