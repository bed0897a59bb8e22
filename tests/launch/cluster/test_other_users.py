"""Two users of one machine: their clusters beside each other, and what one finds of the other's training."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from listening import words
from other_users import SHARED, users
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(900)]

SCALERAY = (sys.executable, "-m", "scaleray")
TRAINING = ("-c", "jobs/digits.yaml", "--scale.workers", "2", "--scale.cpus-per-worker", "1")
SHORT = (*TRAINING, "--stop.after", "2 epochs")
LOOK = """
import contextlib, json, os, socket, sys
from listening import Port, answer

ports, sockets, files, processes = json.load(sys.stdin)
found = {"answers": {}, "sockets": [], "files": [], "environments": [], "command lines": ""}
for again in range(3):  # a loaded server takes connections before it answers
    for address, number in ports:
        found["answers"][number] = found["answers"].get(number) or answer(Port(address, number, ""))
for place in sockets:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as one:
        one.connect(place.replace("@", chr(0), 1) if place.startswith("@") else place)
        found["sockets"].append(place)
for place in files:
    with contextlib.suppress(OSError):
        os.listdir(place) if os.path.isdir(place) else os.close(os.open(place, os.O_RDONLY))
        found["files"].append(place)
    with contextlib.suppress(OSError):
        os.close(os.open(place, os.O_WRONLY))
        found["files"].append(place)
for number in processes:
    with contextlib.suppress(OSError):
        found["environments"].append(open(f"/proc/{number}/environ").read(1))
    with contextlib.suppress(OSError):
        found["command lines"] += open(f"/proc/{number}/cmdline").read()
print(json.dumps(found))
"""
"""What a user finds who tries all that there is of another one."""


def own(user):
    """Options that keep a training's files in the home of its user."""
    return (
        "--checkpoint.storage-path", str(user.home / "runs"), "--tracking.uri", f"sqlite:///{user.home}/mlflow.db",
    )  # fmt: skip


def succeeded(done):
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def elsewhere(user):
    """What a user has left that others can look into, beside the folder that nobody else may enter."""
    places = [path for path in user.files() if path.parent in SHARED and path.name != f"scaleray-{user.uid}"]
    return [path for path in places if path.lstat().st_mode & 0o077]  # Ray's dashboard leaves a closed one


def test_two_users_have_clusters_of_one_name_beside_each_other_and_neither_gets_into_the_others():
    with users(2) as both, ThreadPoolExecutor() as pool:
        one, other = both

        def at_once(*words):
            return [succeeded(done) for done in pool.map(lambda user: user.run(*SCALERAY, *words), both)]

        try:
            ups = [json.loads(up.stdout)["clusters"] for up in at_once("cluster", "up", "--cpus", "3", "--json")]
            [[of_one], [of_other]] = ups
            assert {of_one["address"], of_one["dashboard"]}.isdisjoint({of_other["address"], of_other["dashboard"]})
            assert all(
                json.loads(s.stdout)["clusters"] == up
                for s, up in zip(at_once("cluster", "status", "--json"), ups, strict=True)
            )
            train = pool.submit(one.run, *SCALERAY, "train", *SHORT, *own(one), RAY_ADDRESS=of_one["address"])
            submit = other.run(*SCALERAY, "submit", *SHORT, *own(other), "--to", of_other["dashboard"], "--wait")
            for done in (train.result(), submit):
                assert "done: 46 steps" in succeeded(done).stdout + done.stderr
            assert (one.home / "runs").stat().st_uid == one.uid and (other.home / "runs").stat().st_uid == other.uid

            into = other.run(*SCALERAY, "train", *SHORT, *own(other), RAY_ADDRESS=of_one["address"])
            jobs = other.run(*SCALERAY, "jobs", "list", "--to", of_one["dashboard"])
            for refused in (into, jobs):
                assert refused.returncode == 2 and "token" in refused.stderr and "Traceback" not in refused.stderr
                print(refused.stderr)
            assert other.run("ls", f"/tmp/scaleray-{one.uid}").returncode != 0
            assert "no cluster" not in succeeded(one.run(*SCALERAY, "cluster", "down")).stdout
            assert not one.processes()
            assert (
                json.loads(succeeded(other.run(*SCALERAY, "cluster", "status", "--json")).stdout)["clusters"] == ups[1]
            )
        finally:
            for user in both:
                user.run(*SCALERAY, "cluster", "down")
        assert not other.processes()
        assert not elsewhere(one) and not elsewhere(other)
        assert not [path for user in both for path in user.files() if path.name == "c-local"]


def test_another_user_of_the_machine_finds_nothing_of_a_training_but_the_ports_that_the_page_names(tmp_path):
    with users(2) as (one, other):
        long = ("--stop.after", "100000 epochs", "--evaluation.every", "100000 epochs")
        log = tmp_path / "log"
        with open(log, "w") as output:
            process = psutil.Popen(
                one.command(*SCALERAY, "train", *TRAINING, *long, *own(one)),
                env=one.environment, stdout=output, stderr=output,
            )  # fmt: skip
        try:
            wait_until(lambda: "step " in log.read_text() or process.poll() is not None, seconds=300)
            assert process.poll() is None, log.read_text()[-2000:]
            mine = one.processes()
            ports = [
                (c.laddr.ip.removeprefix("::ffff:"), c.laddr.port)
                for p in mine
                for c in p.net_connections("inet")
                if c.status == "LISTEN"
            ]
            sockets = listening_paths(mine)
            files = [str(path) for path in one.files() if not path.is_symlink()]
            assert len(ports) > 5 and len(sockets) > 2 and len(files) > 10
            given = json.dumps([ports, sockets, files, [p.pid for p in mine]])
            told = subprocess.run(
                other.command(sys.executable, "-c", LOOK), env=other.environment, input=given,
                capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            found = json.loads(succeeded(told).stdout)
        finally:
            process.terminate()
            process.wait(timeout=100)
        print(*found["answers"].items(), sockets, sep="\n")
        token = (one.home / ".ray" / "auth_token").read_text()
        assert token not in found.pop("command lines")
        said = [words(answer) for answer in found.pop("answers").values()]
        assert said.count("a token is wanted") > 5, said
        assert set(said) <= {"a token is wanted", "nothing", "metrics or MLflow"}, said  # as SECURITY.md has them
        assert found == {"sockets": [], "files": [], "environments": []}
        wait_until(lambda: not one.processes(), seconds=60)
        assert not elsewhere(one)


def listening_paths(processes):
    """Where these processes listen for others of this machine, names that are no files among them."""
    held = set()
    for process in processes:
        for link in os.scandir(f"/proc/{process.pid}/fd"):
            held.add(os.readlink(link.path))
    found = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and f"socket:[{words[6]}]" in held and int(words[3], 16) & 0x10000:
            found.append(words[7])
    return found
