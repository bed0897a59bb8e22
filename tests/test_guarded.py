"""Nothing that scaleray starts outlives it: not what its children started, in sessions of their own or deaf to SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from scaleray.common.guarded import guarded
from scaleray.launch.cluster.own_ray import free_port

ROOT = Path(__file__).parent.parent

SERVER = """
import os, pathlib, subprocess, sys, time
deaf = f"import signal, time; signal.signal(signal.SIGTERM, {os.environ['ON_SIGTERM']}); print(flush=True); time.sleep(600)"
one = subprocess.Popen([sys.executable, '-S', '-c', deaf], stdout=subprocess.PIPE, start_new_session=True)
one.stdout.readline()
orphan = subprocess.run(['sh', '-c', 'sleep 600 >/dev/null 2>&1 & echo $!'], stdout=subprocess.PIPE).stdout
pathlib.Path(os.environ['PIDS'] + '.part').write_text(f'{os.getpid()} {one.pid} {int(orphan)}')
os.rename(os.environ['PIDS'] + '.part', os.environ['PIDS'])
time.sleep(600)
"""
"""Stands for a server: it has a child in a session of its own, which may ignore SIGTERM, and one whose parent is gone."""


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def family(tmp_path, monkeypatch):
    """Starts a program below which SERVER comes to run, and gives all processes of it. What is left is ended."""
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    found = []

    def start(code):
        program = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
        found.append(program.pid)
        wait_until((tmp_path / "pids").exists)
        found.extend(map(int, (tmp_path / "pids").read_text().split()))
        found.extend(child.pid for child in psutil.Process(program.pid).children())
        return program, found

    yield start
    for pid in found:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.always("[15]")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_no_process_of_the_server_outlives_the_pages(tmp_path, family, monkeypatch, number):
    package = tmp_path / "mlflow"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SERVER)
    is_deaf = number == signal.SIGTERM  # once is enough: it costs the time that is given to those who listen
    monkeypatch.setenv("ON_SIGTERM", f"signal.{'SIG_IGN' if is_deaf else 'SIG_DFL'}")
    code = f"""
import signal, sys
from scaleray.recording.ui import tracking_ui
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
sys.exit(tracking_ui(uri='sqlite:///m.db', port={free_port()}))
"""
    program, processes = family(code)
    assert len(processes) >= 4 and all(map(is_running, processes))
    program.send_signal(number)
    assert program.wait(timeout=600) == (-number if number == signal.SIGKILL else 0)
    wait_until(lambda: not any(map(is_running, processes)))


def test_what_a_command_leaves_behind_ends_with_it_and_its_exit_code_is_kept(tmp_path):
    def run(text, **more):
        return subprocess.run(guarded(["sh", "-c", text]), stdout=subprocess.PIPE, text=True, timeout=600, **more)

    done = run("sleep 600 >/dev/null 2>&1 & echo $!; exit 7")
    assert done.returncode == 7
    assert not is_running(int(done.stdout))
    assert run("kill -KILL $$").returncode == -signal.SIGKILL
    assert run("cat", input="passed on").stdout == "passed on"
    assert subprocess.run(guarded([str(tmp_path / "none")]), stderr=subprocess.PIPE).returncode == 127


def test_a_process_ends_in_the_middle_of_its_work_when_its_parent_is_killed(family):
    code = """
import multiprocessing, os, pathlib, time
from scaleray.common.guarded import end_with_parent

def endless():
    end_with_parent()
    pathlib.Path(os.environ['PIDS'] + '.part').write_text(str(os.getpid()))
    os.rename(os.environ['PIDS'] + '.part', os.environ['PIDS'])
    while True: pass

multiprocessing.get_context('fork').Process(target=endless, daemon=True).start()
time.sleep(600)
"""
    program, processes = family(code)
    assert all(map(is_running, processes))
    program.kill()
    program.wait(timeout=600)
    wait_until(lambda: not any(map(is_running, processes)))


@pytest.mark.slow
def test_gloo_processes_end_in_the_middle_of_their_work_when_their_parent_is_killed(tmp_path, family):
    (tmp_path / "work.py").write_text(
        "import pathlib\ndef endless(place):\n    pathlib.Path('began').touch()\n    while True:\n        pass\n"
    )
    code = """
import multiprocessing, os, pathlib, threading, time
from scaleray.launch.workers import gloo
from work import endless

if __name__ == '__main__':
    with gloo.gloo_processes(1, gloo.UserCode(None, {}, None), timeout_s=60) as processes:
        threading.Thread(target=processes.run, args=(1, endless), kwargs={'workload': None}, daemon=True).start()
        worker = processes._processes[0]
        while not pathlib.Path('began').exists(): time.sleep(0.01)
        pathlib.Path(os.environ['PIDS'] + '.part').write_text(str(worker.pid))
        os.rename(os.environ['PIDS'] + '.part', os.environ['PIDS'])
        time.sleep(600)
"""
    program, processes = family(code)
    program.kill()
    program.wait(timeout=600)
    wait_until(lambda: not any(map(is_running, processes)))
