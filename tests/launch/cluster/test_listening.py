"""Which ports every command opens, for whom, and what somebody without the token gets there."""

import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from listening import MARK, answer, marked, ports, processes, status, words
from waiting import wait_until

from scaleray.common import own_folder
from scaleray.launch.cluster import connection, loopback

CLIENT = "/ray.rpc.RayletDriver/ClusterInfo"
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
@pytest.mark.combination
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
    assert token not in lists
    wait_until(lambda: not processes(mark), seconds=60)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "auth_token"]
    assert len(files) > 3 and not [path for path in files if token.encode() in path.read_bytes()]
    assert len(logs := logs_of("ray")) > 3 and token.encode() not in b"".join(logs)


def logs_of(folder):
    """What Ray's processes have written in this folder of the user."""
    found = own_folder.own_folder().glob(f"{folder}/session_2*/logs/**/*")
    return [path.read_bytes() for path in found if path.is_file()]


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
    assert folder.stat().st_uid == os.geteuid() and stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    assert connection.ray_logs() == "/elsewhere/ray/session_latest/logs"


def test_what_torch_compiles_lies_in_the_folder_of_this_user_alone_unless_the_user_says_where(monkeypatch):
    monkeypatch.delenv(own_folder.COMPILED, raising=False)
    own_folder.keep_compiled_code_here()
    folder = Path(os.environ[own_folder.COMPILED]).parent
    assert folder == own_folder.own_folder() and stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setenv(own_folder.COMPILED, "/elsewhere")
    own_folder.keep_compiled_code_here()
    assert os.environ[own_folder.COMPILED] == "/elsewhere"


AFTER = "tests/launch/cluster/after_a_training.py"
COMMANDS = {
    "train with a dashboard": ["-m", "scaleray", "train", *LONG, "--scale.dashboard", "true", "--monitoring.port", "0"],
    "profile": ["-m", "scaleray", "profile", "-c", "jobs/digits.yaml", "--scale.workers", "2", "--steps", "2000"],
    "check": ["-m", "scaleray", "check", "-c", "jobs/digits.yaml"],
    "doctor": ["-m", "scaleray", "doctor", "--local"],
    "train --local": ["-m", "scaleray", "train", *LONG, "--local"],
    "verify": ["-m", "scaleray", "verify", "-c", "jobs/digits.yaml", "--steps", "2000"],
    "verify --local": ["-m", "scaleray", "verify", "-c", "jobs/digits.yaml", "--steps", "2000", "--local"],
    "study": ["-m", "scaleray", "study", "-c", "jobs/digits.yaml", "--world-sizes", "1,2"],
    "study --local": ["-m", "scaleray", "study", "-c", "jobs/digits.yaml", "--world-sizes", "1,2", "--local"],
    "sweep": ["-m", "scaleray", "sweep", "-c", "jobs/digits.yaml", "--batch-sizes", "32,64"],
    "tracking ui": ["-m", "scaleray", "tracking", "ui", "--port", "0"],
    "cluster up": ["-m", "scaleray", "cluster", "up", "of-a-test", "--nodes", "2", "--cpus", "1", "--block"],
    "demo": ["-m", "jobs.demo"],
    "watch": ["-m", "jobs.watch"],
    "evaluate": [AFTER, "evaluate"],
    "predict": [AFTER, "predict"],
    "path": [AFTER, "path"],
}
NEEDS_NO_PORT = ("train --local",)
WITHOUT_RAY = ("check", "doctor", "train --local", "verify --local", "study --local", "tracking ui")
WATCHED_S = 60
SCRIPTS_S = 150
"""For commands that follow others."""
LOADED_S = 500
"""How long a command that has not opened its ports yet is waited for, on a machine with other work."""
HARMLESS = ("a token is wanted", "metrics or MLflow", "a page without data", "a receiver of alerts")
UNSETTLED = ("nothing", "too busy to answer")
"""A server that has just been started takes connections before it answers; one that says this is asked again."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_listens_for_other_hosts_and_ray_answers_nobody_without_a_token(name, tmp_path):
    with (
        open(tmp_path / "output", "w") as log,
        marked(
            [sys.executable, *COMMANDS[name]], of_home(tmp_path), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        ) as (process, mark),
    ):
        seen, answers, begun = set(), {}, time.monotonic()
        least_s = SCRIPTS_S if AFTER in COMMANDS[name] else WATCHED_S
        while process.poll() is None and time.monotonic() - begun < (least_s if are_up(name, answers) else LOADED_S):
            for port in ports(mark):
                seen.add(port)
                if words(answers.get(port, {})) in UNSETTLED:
                    answers[port] = answer(port)
    print(
        *(f"{port.address}:{port.number} {port.process[-60:]} {words(answers.get(port, {}))}" for port in seen),
        sep="\n",
    )
    wait_until(lambda: not processes(mark), seconds=60)  # those that were killed take a moment to be gone
    assert seen or name in NEEDS_NO_PORT, (tmp_path / "output").read_text()[-2000:]
    assert all(port.is_on_loopback for port in seen), seen
    for statuses in answers.values():
        assert words(statuses) in (*UNSETTLED, *HARMLESS), statuses
    assert are_up(name, answers), answers


def are_up(name, answers):
    """Whether the ports that the command must have were there, and answered what they must."""
    if name in WITHOUT_RAY:
        return bool(answers) or name in NEEDS_NO_PORT
    return [words(statuses) for statuses in answers.values()].count("a token is wanted") >= 3


@pytest.mark.ray
@pytest.mark.combination  # half a minute of a feature that few commits touch
def test_a_cluster_of_this_machine_lets_nobody_in_without_its_token_and_is_gone_after_its_end(tmp_path):
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment, name = {**of_home(tmp_path), MARK: mark}, f"t{os.getpid()}"

    def cluster(*words):
        command = [*SCALERAY, "cluster", words[0], name, *words[1:], "--json"]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=700)
        return done.returncode, json.loads(done.stdout or "{}"), done.stderr

    try:
        code, found, said = cluster("up", "--nodes", "3", "--cpus", "1")
        assert code == 0, said
        [up] = found["clusters"]
        assert [(node["name"], node["state"], node["resources"]) for node in up["nodes"]] == [
            (node, "up", {"CPU": 1.0}) for node in ("head", "node-1", "node-2")
        ]
        opened = ports(mark)
        assert all(port.is_on_loopback for port in opened), opened
        for token in (None, "0" * 64):
            answers = {port: answer(port, token) for port in opened}
            said = [words(statuses) for statuses in answers.values()]
            assert said.count("a token is wanted") >= 9, answers  # control store, client, dashboard; two of each node
            assert set(said) <= {"a token is wanted", "metrics or MLflow", "a page without data", *UNSETTLED}, answers
            # Ray's client, whoever reaches which may run code
            assert [s[CLIENT] for s in answers.values() if s.get(CLIENT, "UNIMPLEMENTED") != "UNIMPLEMENTED"] == [
                "UNAUTHENTICATED"
            ], answers
        own = (tmp_path / ".ray" / "auth_token").read_text().strip()
        for path in ("/api/jobs/", "/nodes?view=summary", "/api/v0/nodes"):
            statuses = [status(up["dashboard"] + path, header) for header in ({}, bearer("0" * 64), bearer(own))]
            assert statuses == ["401", "403", "200"], path
        refused = subprocess.run(
            [*SCALERAY, "jobs", "list", "--to", up["dashboard"]],
            env={**environment, "RAY_AUTH_TOKEN": "0" * 64}, cwd=ROOT, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert refused.returncode == 2 and "rejected the token" in refused.stderr, refused.stderr
        psutil.Process(up["nodes"][1]["pid"]).kill()
        wait_until(lambda: not psutil.pid_exists(up["nodes"][1]["pid"]), seconds=60)
        code, found, _ = cluster("status")
        assert code == 1 and [node["state"] for node in found["clusters"][0]["nodes"]] == ["up", "lost", "up"]
        assert len(logs := logs_of(f"c-{name}/*")) > 3 and own.encode() not in b"".join(logs)
    finally:
        down = cluster("down")
        left = processes(mark)
        for process in left:
            process.kill()
    assert down[:2] == (0, {**down[1], "was_up": True}) and not left, left
    assert cluster("down")[1]["was_up"] is False and cluster("status")[1]["clusters"] == []


def bearer(token):
    return {"Authorization": f"Bearer {token}"}
