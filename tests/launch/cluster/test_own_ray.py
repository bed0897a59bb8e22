"""The Ray of a command's own: workers that are forks of one process, and a node without what nobody uses. No cluster here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from scaleray.launch.cluster import own_ray, worker_template

pytestmark = pytest.mark.skipif(not worker_template.is_possible(), reason="workers are forked on Linux only")

SAY = """
import json, os, sys, threading
import numpy, ray, torch
print(json.dumps({
    "pid": os.getpid(), "arguments": sys.argv, "folder": os.getcwd(), "colour": os.environ.get("COLOUR"),
    "imported": "scaleray.training.loop" in sys.modules, "threads": len(os.listdir("/proc/self/task")),
    "torch_threads": torch.get_num_threads(), "cuda": torch.cuda.is_initialized(), "nice": os.nice(0),
    "numpy": numpy.random.random(), "group": ray._raylet.PlacementGroupID.of(ray.JobID.from_int(1)).hex(),
}))
sys.exit(3)
"""


@pytest.fixture(scope="module")
def template():
    found = worker_template.WorkerTemplate(threads=1)
    yield found
    found.close()


@pytest.fixture
def started(tmp_path):
    """Runs `as_fork.py` as a raylet would, with a script that says what it sees in place of Ray's own worker."""
    script = tmp_path / "worker.py"
    script.write_text(SAY)

    def run(socket, **variables):
        environment = {**os.environ, worker_template.SOCKET: str(socket), worker_template.ORIGINAL: str(script)}
        process = subprocess.Popen(
            [sys.executable, str(worker_template.SCRIPT), "--one", "two words"],
            env={**environment, "COLOUR": "red", **variables},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: os.nice(2),
            text=True,
        )
        output, _ = process.communicate(timeout=300)
        return {**json.loads(output), "is_itself": process.pid == json.loads(output)["pid"]}

    run.script = script
    return run


def test_a_worker_is_a_fork_with_everything_imported_and_no_gpu_touched(template, started, tmp_path):
    seen = started(template.socket)
    assert not seen["is_itself"]
    assert (seen["imported"], seen["cuda"], seen["threads"]) == (True, False, 1)


def test_a_fork_has_the_arguments_environment_folder_streams_and_niceness_of_the_process_it_stands_for(
    template, started, tmp_path
):
    seen = started(template.socket)
    assert seen["arguments"] == [str(started.script), "--one", "two words"]
    assert (seen["folder"], seen["colour"]) == (str(tmp_path), "red")
    assert seen["nice"] == os.nice(0) + 2
    assert seen["torch_threads"] == int(os.environ.get("OMP_NUM_THREADS", "1"))


def test_two_forks_draw_other_numbers(template, started):
    one, two = started(template.socket), started(template.socket)
    assert one["numpy"] != two["numpy"] and one["group"] != two["group"]


@pytest.mark.parametrize("how", ["no template", "another job"])
def test_a_worker_that_cannot_be_a_fork_is_what_ray_would_start(template, started, tmp_path, how):
    seen = started(tmp_path / "nobody") if how == "no template" else started(template.socket, RAY_JOB_ID="02000000")
    assert seen["is_itself"] and not seen["imported"]
    assert seen["arguments"] == [str(started.script), "--one", "two words"]


def test_a_node_of_another_make_starts_as_ray_starts_it(monkeypatch):
    import ray._private.node as node

    class Other:
        pass

    monkeypatch.setattr(node, "Node", Other)
    with own_ray._lean_node(has_dashboard=False):
        assert node.Node is Other


@pytest.mark.parametrize("has_dashboard", [False, True])
def test_a_node_has_a_dashboard_only_where_somebody_asked_for_it(monkeypatch, has_dashboard):
    import ray._private.node as node
    import ray._private.utils as utils

    started = []
    monkeypatch.setattr(node.Node, "start_api_server", lambda self, **arguments: started.append("dashboard"))
    before = node.Node, utils.get_dashboard_dependency_error
    with own_ray._lean_node(has_dashboard=has_dashboard):
        made = node.Node.__new__(node.Node)
        made.start_api_server(include_dashboard=has_dashboard, raise_on_failure=True)
        is_minimal = utils.get_dashboard_dependency_error is not before[1]
    assert (started, is_minimal) == ((["dashboard"], False) if has_dashboard else ([], True))
    assert (node.Node, utils.get_dashboard_dependency_error) == before


def test_the_environment_of_the_start_is_gone_afterwards(monkeypatch):
    monkeypatch.setenv("COLOUR", "red")
    monkeypatch.delenv("SHAPE", raising=False)
    with own_ray._variables({"COLOUR": "blue", "SHAPE": "round"}):
        assert (os.environ["COLOUR"], os.environ["SHAPE"]) == ("blue", "round")
    assert os.environ["COLOUR"] == "red" and "SHAPE" not in os.environ
