"""Which ports every command opens, for whom, and what somebody without the token gets there."""

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from listening import NOT_GRPC, answer, is_refused, marked, ports, processes
from waiting import wait_until

from scaleray.launch.cluster import connection, loopback

ROOT = Path(__file__).parents[3]
SCALERAY = [sys.executable, "-m", "scaleray"]
LONG = ["-c", "jobs/digits.yaml", "--stop.after", "100000 epochs", "--evaluation.every", "100000 epochs"]


def of_home(tmp_path):
    """Environment of a user of this machine who has never used Ray."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SCALERAY_"))}
    return {**environment, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}


def started(tmp_path, command, word, *, timeout_s=300):
    """Context of a command whose output has had this word."""
    log = tmp_path / "output"

    def says() -> bool:
        return word in log.read_text()

    class Started:
        def __enter__(self):
            self.context = marked(command, of_home(tmp_path), cwd=ROOT, stdout=open(log, "w"), stderr=subprocess.STDOUT)
            self.process, mark = self.context.__enter__()
            wait_until(lambda: says() or self.process.poll() is not None, seconds=timeout_s)
            assert self.process.poll() is None, log.read_text()[-2000:]
            return mark

        def __exit__(self, *error):
            return self.context.__exit__(*error)

    return Started()


@pytest.mark.ray
def test_a_training_on_a_ray_of_its_own_has_no_port_for_another_host_and_none_of_ray_without_a_token(tmp_path):
    own = ["--checkpoint.storage-path", str(tmp_path / "runs"), "--tracking.uri", f"sqlite:///{tmp_path}/mlflow.db"]
    with started(tmp_path, [*SCALERAY, "train", *LONG, "--scale.workers", "2", *own], "step ") as mark:
        found = ports(mark)
        assert len(found) > 5 and all(port.is_on_loopback for port in found), found
        answers = {port: answer(port) for port in found}
        said = [words(statuses) for statuses in answers.values()]
        assert said.count("a token is wanted") > 5, answers
        assert set(said) <= {"a token is wanted", "nothing", "metrics or MLflow"}, answers
        # the rest are gloo's and the store's, which speak protocols of their own and ask nobody, see SECURITY.md
        lists = "".join(" ".join(p.cmdline()) for p in processes(mark))
    token = (tmp_path / ".ray" / "auth_token").read_text()
    assert stat.S_IMODE((tmp_path / ".ray" / "auth_token").stat().st_mode) == 0o600 and len(token) == 64
    assert token not in lists and not processes(mark)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "auth_token"]
    assert len(files) > 3 and not [path for path in files if token.encode() in path.read_bytes()]


def test_an_address_that_only_loopback_answers_is_told_from_one_of_the_machine():
    import ray.util

    with socket.create_server((loopback.ADDRESS, 0)) as alone, socket.create_server(("0.0.0.0", 0)) as open_to_all:
        on_loopback, on_all = alone.getsockname()[1], open_to_all.getsockname()[1]
        assert loopback.is_on_loopback_alone(f"127.0.0.1:{on_loopback}")
        assert loopback.is_on_loopback_alone(f"localhost:{on_loopback}")
        if ray.util.get_node_ip_address() != loopback.ADDRESS:
            assert not loopback.is_on_loopback_alone(f"127.0.0.1:{on_all}")
    assert not loopback.is_on_loopback_alone("10.0.0.1:6379") and not loopback.is_on_loopback_alone("auto")


def test_ray_has_its_own_view_of_the_address_again_afterwards():
    import ray.util

    before = ray.util.get_node_ip_address()
    with loopback.staying_local():
        assert ray.util.get_node_ip_address() == loopback.ADDRESS
    assert ray.util.get_node_ip_address() == before


def test_a_user_may_open_a_local_ray_to_other_hosts(monkeypatch):
    import ray.util

    before = ray.util.get_node_ip_address()
    monkeypatch.setenv(loopback.VARIABLE, "1")
    with loopback.staying_local():
        assert ray.util.get_node_ip_address() == before
    assert not loopback.is_wanted()


def test_the_folder_of_rays_processes_lies_in_one_of_this_user_alone(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    folder = Path(connection.ray_logs()).parents[2]
    assert folder.owner() == Path.home().owner() and stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    assert connection.ray_logs() == "/elsewhere/ray/session_latest/logs"


COMMANDS = {
    "train --local": ["-m", "scaleray", "train", *LONG, "--local"],
    "verify": ["-m", "scaleray", "verify", "-c", "jobs/digits.yaml", "--steps", "2000"],
    "verify --local": ["-m", "scaleray", "verify", "-c", "jobs/digits.yaml", "--steps", "2000", "--local"],
    "study": ["-m", "scaleray", "study", "-c", "jobs/digits.yaml", "--world-sizes", "1,2"],
    "study --local": ["-m", "scaleray", "study", "-c", "jobs/digits.yaml", "--world-sizes", "1,2", "--local"],
    "sweep": ["-m", "scaleray", "sweep", "-c", "jobs/digits.yaml", "--batch-sizes", "32,64"],
    "tracking ui": ["-m", "scaleray", "tracking", "ui", "--port", "0"],
    "local head": ["cluster/local_head.py"],
    "demo": ["-m", "jobs.demo"],
}
NEEDS_NO_PORT = ("train --local",)
WITHOUT_RAY = ("train --local", "verify --local", "study --local", "tracking ui")
WATCHED_S = 60
UNSETTLED = ("nothing", "too busy to answer")
"""A server that has just been started takes connections before it answers; one that says this is asked again."""


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_listens_for_other_hosts_and_ray_answers_nobody_without_a_token(name, tmp_path):
    with (
        open(tmp_path / "output", "w") as log,
        marked(
            [sys.executable, *COMMANDS[name]], of_home(tmp_path), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        ) as (process, mark),
    ):
        seen, answers = set(), {}
        deadline = time.monotonic() + WATCHED_S
        while process.poll() is None and time.monotonic() < deadline:
            for port in ports(mark):
                seen.add(port)
                if words(answers.get(port, {})) in UNSETTLED:
                    answers[port] = answer(port)
    print(
        *(f"{port.address}:{port.number} {port.process[-60:]} {words(answers.get(port, {}))}" for port in seen),
        sep="\n",
    )
    assert not processes(mark)
    assert seen or name in NEEDS_NO_PORT, (tmp_path / "output").read_text()[-2000:]
    assert all(port.is_on_loopback for port in seen), seen
    for statuses in answers.values():
        assert words(statuses) in (*UNSETTLED, "a token is wanted", "metrics or MLflow", "a page without data"), (
            statuses
        )
    if name not in WITHOUT_RAY:
        assert [words(statuses) for statuses in answers.values()].count("a token is wanted") >= 3, answers


def words(statuses):
    """What a port answers to somebody without a token."""
    if not statuses:
        return "nothing"  # gloo, torch's store, or gone before it was asked
    if is_refused(statuses) or set(statuses.values()) == {"401"}:
        return "a token is wanted"
    if set(statuses.values()) <= {"UNIMPLEMENTED", "UNAUTHENTICATED", *NOT_GRPC}:
        return "too busy to answer"
    if {path: status for path, status in statuses.items() if status != "401"} == {"/": "200"}:
        return "a page without data"  # of Ray's dashboard
    if set(statuses.values()) <= {"200", "404", "405"}:
        return "metrics or MLflow"  # which ask nobody, see SECURITY.md
    return f"something else: {statuses}"
