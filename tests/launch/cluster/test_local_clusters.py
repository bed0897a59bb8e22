"""`scaleray cluster up`, `status` and `down`: what is remembered, and whom they end. `test_listening.py` has one live."""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

import scaleray
from scaleray.cli.cluster import _export as export_line
from scaleray.cli.main import run_command
from scaleray.clusters import local_clusters
from scaleray.common.guarded import guarded
from scaleray.config import load_config
from scaleray.errors import ClusterError, UsageError
from scaleray.launch.cluster import head, local_state, node_process
from scaleray.launch.cluster.local_state import MARK, ClusterState, NodeState

ROOT = Path(__file__).parents[3]
WAITING = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], start_new_session=True); time.sleep(600)"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A machine on which this user has no cluster."""
    monkeypatch.setattr(local_state, "own_folder", lambda: tmp_path / f"scaleray-{os.getuid()}")
    monkeypatch.setattr(local_state, "short_path", lambda: tmp_path)
    (tmp_path / f"scaleray-{os.getuid()}").mkdir(mode=0o700)
    return tmp_path


@pytest.fixture
def started(place):
    """Remembers a cluster of two nodes, each a guard with a process that has one in a session of its own."""
    processes = []

    def start(name="local", mark="0123"):
        local_state.new_folder(name)
        nodes = []
        for node in ("head", "node-1"):
            command = guarded([sys.executable, "-S", "-c", WAITING], outlives=True)
            process = subprocess.Popen(command, env={**os.environ, MARK: mark}, start_new_session=True)
            processes.append(process)
            wait_until(lambda process=process: len(below(process.pid)) == 2)
            nodes.append(NodeState(node, process.pid, psutil.Process(process.pid).create_time(), "log"))
        state = ClusterState(name, mark, "127.0.0.1:1", "http://127.0.0.1:1", 2, tuple(nodes))
        state.save()
        return state

    yield start
    for process in processes:
        process.terminate()  # a guard, with all below it
        process.wait()


def below(pid):
    return psutil.Process(pid).children(recursive=True)


def test_what_is_remembered_is_for_this_user_alone_and_comes_back_as_it_was(started):
    state = started()
    file = state.folder / "state.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(state.folder.stat().st_mode) == 0o700
    assert local_state.load("local") == state and list(local_state.names()) == ["local"]
    assert state.end() == 2


def test_a_process_that_wrote_its_title_over_the_mark_is_found_below_one_that_has_it():
    """As Ray's agents do: after a GCS was killed, two of them outlived its driver."""
    nested = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {WAITING!r}], env={{}}).wait()"
    process = subprocess.Popen([sys.executable, "-S", "-c", nested], env={**os.environ, MARK: "fedc"})
    try:
        wait_until(lambda: len(below(process.pid)) == 2)
        family = {psutil.Process(process.pid), *below(process.pid)}
        assert local_state.marked_processes(MARK, "fedc") == family
    finally:
        for one in [*below(process.pid), process]:
            one.kill()
        process.wait()
    assert local_state.marked_processes(MARK, "fedc") == set()


def test_down_ends_the_nodes_with_all_that_is_below_them_and_no_other_cluster(started):
    state, other = started(), started("other", mark="4567")
    family = [*below(state.nodes[0].pid), *below(state.nodes[1].pid)]
    assert scaleray.cluster_down("local")
    assert not any(process.is_running() for process in family) and not state.folder.exists()
    assert all(node.is_running for node in other.nodes) and list(local_state.names()) == ["other"]
    assert local_clusters.cluster_down("local") is None and local_clusters.cluster_down("other") == 2


@pytest.mark.combination
def test_down_ends_what_a_node_has_left_that_was_killed(started):
    state = started()
    family = below(state.nodes[0].pid)
    psutil.Process(state.nodes[0].pid).kill()
    wait_until(lambda: not state.nodes[0].is_running)
    assert any(process.is_running() for process in family)
    assert local_clusters.cluster_down("local") == 1
    assert not any(process.is_running() for process in family)


def test_a_process_that_has_the_number_of_a_node_now_is_left_alone(started):
    state = started()
    later = [replace(node, started_at=node.started_at + 100) for node in state.nodes]
    stranger = replace(state, mark="89ab", nodes=tuple(later))
    assert not stranger.left() and stranger.end() == 0
    assert all(node.is_running for node in state.nodes)
    state.end()


def test_a_job_of_a_cluster_reads_its_config_though_it_has_the_mark():
    flags = {"workload.name": "m:W", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch"}
    assert load_config(flags=flags, environ={MARK: "0123"}).batch.global_size == 8


def test_a_cluster_of_a_name_that_is_up_is_refused_and_one_whose_processes_are_gone_is_forgotten(started, monkeypatch):
    state = started()
    with pytest.raises(ClusterError, match="is running or starting"):
        scaleray.cluster_up()
    assert all(node.is_running for node in state.nodes)
    for node in state.nodes:
        psutil.Process(node.pid).terminate()
    wait_until(lambda: not state.left())

    def fails(*arguments, **named):
        raise OSError("no process to be had")

    monkeypatch.setattr(node_process, "start_head", fails)
    with pytest.raises(OSError, match="no process"):
        scaleray.cluster_up()
    assert list(local_state.names()) == []  # nothing of a start that failed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nodes": 0}, "--nodes is 0: a cluster needs at least 1 node"),
        ({"cpus": 0}, "--cpus is 0"),
        ({"port": 80}, "--port is 80: it must be between 1024 and 65535"),
        ({"name": "My Cluster"}, "at most 12 characters from a-z"),
        ({"name": "../elsewhere"}, "at most 12 characters from a-z"),
    ],
)
def test_what_no_cluster_can_be_is_one_error(place, arguments, words):
    with pytest.raises(UsageError, match=words):
        scaleray.cluster_up(**arguments)
    assert list(local_state.names()) == []


def test_a_port_that_is_taken_is_one_error(place):
    import socket

    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="cannot be used: Address already in use"),
    ):
        scaleray.cluster_up(port=taken.getsockname()[1])


def test_a_folder_that_somebody_else_has_taken_is_one_error(place, monkeypatch):
    (place / "other").mkdir()
    monkeypatch.setattr(local_state, "own_folder", lambda: place / "other")
    with pytest.raises(ClusterError, match="owned by another user"):
        scaleray.cluster_status()


NODE = {"name": "head", "pid": 1234567, "started_at": 1.0, "log": "log"}
STATE = {"name": "local", "mark": "0123", "address": "a:1", "dashboard": "", "cpus": 2, "nodes": [NODE]}
ODD_STATES = {
    "keys are missing": {"name": "local", "nodes": []},
    "no object": [],
    "no mark, which every process of the user has": STATE | {"mark": None},
    "an empty mark": STATE | {"mark": ""},
    "another cluster's name": STATE | {"name": "other"},
    "a key that is not known": STATE | {"more": 1},
    "CPUs as text": STATE | {"cpus": "2"},
    "nodes that are a number": STATE | {"nodes": 3},
    "a node that is a text": STATE | {"nodes": ["head"]},
    "a process as text": STATE | {"nodes": [NODE | {"pid": "7"}]},
    "a process that is true": STATE | {"nodes": [NODE | {"pid": True}]},
    "a group of processes": STATE | {"nodes": [NODE | {"pid": -1}]},
    "a start that is null": STATE | {"nodes": [NODE | {"started_at": None}]},
}


@pytest.mark.parametrize("values", ODD_STATES.values(), ids=list(ODD_STATES))
def test_a_state_that_is_not_as_it_was_saved_ends_no_process_and_is_one_error(place, values):
    (local_state.new_folder("local") / "state.json").write_text(json.dumps(values))
    for command in (scaleray.cluster_status, lambda: local_state.load("local").left()):
        with pytest.raises(ClusterError, match="not readable"):
            command()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_state_that_is_no_json_is_one_error(place, content):
    (local_state.new_folder("local") / "state.json").write_bytes(content)
    with pytest.raises(ClusterError, match="not readable"):
        scaleray.cluster_status()


def test_the_command_says_that_none_is_up(place, capsys):
    assert run_command(["cluster", "status"]) == 1 and "no cluster is up" in capsys.readouterr().out
    assert run_command(["cluster", "down", "mine"]) == 0 and "no cluster mine is up" in capsys.readouterr().out
    assert run_command(["cluster", "status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["clusters"] == []


def test_gpus_are_given_out_once(monkeypatch, tmp_path):
    assert local_clusters.shares_of("01234567", 3) == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"]]
    assert local_clusters.shares_of("0", 2) == [["0"], []]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert local_clusters._gpus(2) == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    assert local_clusters._gpus(1) == [{}]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(local_clusters, "GPUS_OF_LINUX", tmp_path / "none")
    assert local_clusters._gpus(2) == [{}, {}]


def test_the_exported_line_is_enough_for_ray_and_for_jobs():
    cluster = local_clusters.LocalCluster("local", "127.0.0.1:1", "http://127.0.0.1:2", ())
    words = shlex.split(export_line(cluster))
    assert {"RAY_ADDRESS=127.0.0.1:1", "RAY_API_SERVER_ADDRESS=http://127.0.0.1:2"} <= set(words)


def test_a_head_that_does_not_end_when_asked_is_killed(monkeypatch, tmp_path):
    for name in ("set_auth_mode", "ensure_token"):
        monkeypatch.setattr(head, name, lambda *given: None)
    monkeypatch.setattr(head, "GRACE_S", 0.1)
    words = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout.readline() == b"ready\n"
    node = node_process.NodeProcess(process, tmp_path / "log")
    monkeypatch.setattr(node_process, "start_head", lambda *given, **more: node)
    monkeypatch.setattr(node_process, "wait_for_head", lambda *given: None)
    with head.local_head(num_cpus=1) as started:
        assert started.pid == process.pid
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()
