"""Gloo processes end with their group, whatever runs in them."""

import os
import signal
import sys
import threading
import time
import types

import psutil
import pytest

from scaleray.launch.workers.gloo import TELL, UserCode, gloo_processes


def runs(pid):
    """Whether the process is there and not only waiting to be forgotten."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def deaf(place):
    """Hear no SIGTERM from now on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return os.getpid()


@pytest.mark.combination
def test_a_process_that_hears_no_sigterm_is_ended_all_the_same():
    with gloo_processes(1, UserCode(None, {}, None), timeout_s=60) as processes:
        pid = processes.run(1, deaf, workload=None)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and runs(pid):
        time.sleep(0.05)
    assert not runs(pid)


def number(place):
    return place.rank


def ask_twice(place, tell):
    tell(f"rank {place.rank}")
    return [tell.ask(number, threading.Lock()) for number in (1, 2)]


def test_a_process_is_answered_where_it_asks_and_not_where_it_only_tells():
    heard = []

    def on_message(told):
        heard.append(told)
        return told * 10

    with gloo_processes(1, UserCode(None, {}, None), timeout_s=60) as processes:
        assert processes.run(1, ask_twice, TELL, workload=None, on_message=on_message) == [10, 20]
    assert heard == ["rank 0", 1, 2]


def test_a_script_that_starts_them_at_its_top_level_is_not_run_once_more(tmp_path, monkeypatch):
    script, mark = tmp_path / "script.py", tmp_path / "mark"
    script.write_text(f"open({str(mark)!r}, 'w').close()")
    main = types.ModuleType("__main__")
    main.__file__, main.__spec__ = str(script), None
    monkeypatch.setitem(sys.modules, "__main__", main)
    with gloo_processes(1, UserCode(None, {}, None), timeout_s=60) as processes:
        assert processes.run(1, number, workload=None) == 0
    assert not mark.exists() and main.__file__ == str(script)


def test_functions_of_the_main_script_reach_the_processes(monkeypatch):
    main = types.ModuleType("__main__")
    exec("WORDS = ['rank']\ndef words(place): return [*WORDS, place.rank]", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with gloo_processes(1, UserCode(None, {}, None), timeout_s=60) as processes:
        assert processes.run(1, main.words, workload=None) == ["rank", 0]
