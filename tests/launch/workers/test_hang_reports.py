"""The failure of a run says which collective it hung in, as far as the ranks' accounts tell; else it says nothing more."""

from __future__ import annotations

import pytest
from ray.exceptions import RayActorError

from scaleray.errors import PeerLostError
from scaleray.launch.workers import hang_reports
from scaleray.launch.workers.hang_reports import explain_hang
from scaleray.launch.workers.lost_workers import what_failed
from scaleray.records.hangs import HANGS, Call, Group, Line, RankDump, dump_name, stacks_name
from scaleray.records.run_record import Heartbeat

WORLD = Group("0", "default_pg", (0, 1))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(hang_reports, "OTHERS_WRITE_S", 0.0)


def beat(rank, *, phase="backward", silent_s=0.1, process=100):
    return Heartbeat(rank, "10.0.0.1", process + rank, 7, phase, 9.0, (f"last line of {rank}",), 2, silent_s)


BEATS = [beat(0), beat(1)]


def write(tmp_path, rank, *, calls, after_error=False, line=3, process=None, group="20261123-120000", lines=True):
    own = tuple(
        Call("0", "gloo", n + 1, "all_reduce", ((16,),), ((16,),), ("float",), done, n, False, ())
        for n, done in enumerate(calls)
    )
    where = (Line("/home/me/model.py", line, "loss", "work()"),)
    dump = RankDump(
        rank, 2, "here", process or 100 + rank, "", 7, "loss", 9.0, 0.0, "2.13", (WORLD,), own, True, after_error,
        where if lines else (), is_complete=lines,
    )  # fmt: skip
    folder = tmp_path / HANGS / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / dump_name(rank)).write_text(dump.to_json())
    return folder


def ended(folder, rank, text):
    header = f"rank {rank} of 2 on here, process {100 + rank}, training thread 0x0000000000000002\n"
    (folder / stacks_name(rank)).write_text(header + text)


ABORTED = """Fatal Python error: Aborted

Thread 0x0000000000000002 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/model.py", line 12 in loss
"""


def test_a_run_without_accounts_is_explained_by_nothing(tmp_path):
    assert explain_hang(str(tmp_path), BEATS) == ""
    (tmp_path / HANGS).mkdir()
    assert explain_hang(str(tmp_path), BEATS) == ""


def test_a_rank_that_stays_away_is_named_in_the_runs_failure_before_its_last_lines(tmp_path):
    folder = write(tmp_path, 0, calls=[True, False], line=3)
    write(tmp_path, 1, calls=[True], line=33)
    lost = PeerLostError("rank 0 on 10.0.0.1, step 8: another worker is gone or did not answer: Timed out waiting")
    text = what_failed({0: lost}, BEATS, explain_hang(str(tmp_path), BEATS))
    lines = text.splitlines()
    assert lines[0] == str(lost) and lines[-1] == "  | last line of 0"
    assert lines[1:-1] == [
        "  rank 0 waits in collective 2 of group default_pg, all_reduce float [16]: rank 1 did not arrive",
        "  rank 0 is at /home/me/model.py:3 in loss: work()",
        "  rank 1 is at /home/me/model.py:33 in loss: work()",
        f"  what each rank was doing: {folder}",
    ]


def test_a_worker_that_was_killed_needs_no_account_of_those_that_missed_it(tmp_path):
    folder = write(tmp_path, 0, calls=[True, True], after_error=True)
    ended(folder, 1, "")
    death = RayActorError(
        error_msg="Worker exit type: SYSTEM_ERROR Worker exit detail: end of file. Some common causes"
    )
    text = what_failed({0: PeerLostError("gone"), 1: death}, BEATS, explain_hang(str(tmp_path), BEATS))
    assert "its process ended (SYSTEM_ERROR: end of file)" in text and "collective" not in text
    assert not folder.exists(), "nobody is told of them"


def test_a_process_that_gloo_has_ended_is_shown_with_its_line_and_what_the_others_called(tmp_path):
    folder = write(tmp_path, 0, calls=[True, True], after_error=True)
    ended(folder, 1, ABORTED)
    text = explain_hang(str(tmp_path), BEATS)
    assert "rank 0 waits in collective 2 of group default_pg, all_reduce float [16]: rank 1 did not arrive" in text
    assert "rank 1 is at /home/me/model.py:12 in loss (Aborted)" in text
    assert "compare sizes and dtypes of this call on all ranks" in text


def test_lines_that_a_rank_still_looks_up_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(hang_reports, "OTHERS_WRITE_S", 60.0)
    write(tmp_path, 0, calls=[True, False], line=3)
    write(tmp_path, 1, calls=[True], lines=False)

    class Clock:
        monotonic = staticmethod(lambda: 0.0)
        sleep = staticmethod(lambda s: write(tmp_path, 1, calls=[True], line=33))

    monkeypatch.setattr(hang_reports, "time", Clock)
    assert "rank 1 is at /home/me/model.py:33 in loss: work()" in explain_hang(str(tmp_path), BEATS)


def test_accounts_of_other_processes_and_damaged_ones_are_left_alone(tmp_path):
    write(tmp_path, 0, calls=[True, False], group="20261123-110000")
    write(tmp_path, 1, calls=[True], group="20261123-110000")
    folder = write(tmp_path, 0, calls=[True, False], process=7)
    assert explain_hang(str(tmp_path), BEATS) == "", "another process had this rank"
    folder = write(tmp_path, 0, calls=[True, False])
    (folder / dump_name(1)).write_text('{"rank": 1')
    ended(folder, 1, "Timeout (0:00:01)!\n" + ABORTED.partition("\n\n")[2])
    text = explain_hang(str(tmp_path), BEATS)
    assert "rank 1 is at /home/me/model.py:12 in loss (it holds Python's lock" in text
    assert (tmp_path / HANGS / "20261123-110000").exists()


def test_accounts_that_cannot_be_read_do_not_hide_the_failure(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(hang_reports, "read_report", lambda *about: 1 / 0)
    assert explain_hang(str(tmp_path), BEATS) == ""
    assert "could not be read" in caplog.text
