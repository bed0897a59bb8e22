"""The Ray of a command's own: workers that are forks of one process, and a node without what nobody uses. No cluster here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import venv
from types import SimpleNamespace

import pytest

from scaleray.common.own_folder import plain_executable
from scaleray.launch.cluster import lean_node, worker_template

pytestmark = pytest.mark.skipif(not worker_template.is_possible(), reason="workers are forked on Linux only")

SAY = """
import json, os, sys
found = {
    "pid": os.getpid(), "group_of_processes": os.getpgrp(), "arguments": sys.argv, "folder": os.getcwd(), "colour": os.environ.get("COLOUR"), "nice": os.nice(0),
    "of_scaleray": [name for name in sys.modules if name.partition(".")[0] == "scaleray"],
    "imported": [name for name in ("torch._dynamo", "ray.train.torch", "scaleray.training.loop") if name in sys.modules],
}
if "--imports-nothing" not in sys.argv:
    import numpy, ray, torch
    try:
        import colours
    except ImportError:
        colours = None
    if "--threads" in sys.argv:
        ray.get_runtime_context = lambda: type("Context", (), {
            "worker": type("Worker", (), {"mode": ray._private.worker.WORKER_MODE}),
            "get_assigned_resources": lambda self: {"CPU": 2.0},
        })()
        ray._private.utils.set_omp_num_threads_if_unset()
    found |= {
        "threads": len(os.listdir("/proc/self/task")), "path": sys.path, "colours": colours and colours.__file__,
        "torch_threads": torch.get_num_threads(), "cuda": torch.cuda.is_initialized(),
        "numpy": numpy.random.random(), "group": ray._raylet.PlacementGroupID.of(ray.JobID.from_int(1)).hex(),
    }
if "--imports-scaleray" in sys.argv:
    import scaleray
    found["scaleray"] = scaleray.__file__
print(json.dumps(found))
sys.exit(3)
"""
LIBRARIES = ["torch._dynamo", "ray.train.torch"]


@pytest.fixture(scope="module")
def template():
    """One that expects the first job, whose workers train."""
    first = {worker_template.JOB: worker_template.FIRST_JOB, worker_template.RAYLET: str(os.getpid())}
    folder = worker_template.short_folder()
    found = worker_template.WorkerTemplate(folder=folder, variables=first, modules=["scaleray.training.worker"])
    yield found
    found.close()
    assert not folder.exists()


@pytest.fixture
def started(tmp_path):
    """Runs `as_fork.py` as a raylet would, with a script that says what it sees in place of Ray's own worker."""
    script, set_up = tmp_path / "worker.py", tmp_path / "set_up.py"
    script.write_text(SAY)
    set_up.write_text(f"import sys, runpy; sys.argv.append('set up by Ray'); runpy.run_path({str(script)!r})")

    def run(socket, *options, python=sys.executable, job=worker_template.FIRST_JOB, **variables):
        environment = {**os.environ, worker_template.SOCKET: str(socket), worker_template.ORIGINAL: str(set_up)}
        ids = {worker_template.RAYLET: str(os.getpid())} | ({worker_template.JOB: job} if job else {})
        process = subprocess.Popen(
            [python, str(worker_template.SCRIPT), str(script), "--one", "two words", *options],
            env={**environment, "COLOUR": "red", **ids, **variables},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: os.nice(2),
            text=True,
        )
        output, _ = process.communicate(timeout=300)
        return {**json.loads(output), "is_itself": process.pid == json.loads(output)["pid"]}

    run.script = script
    return run


def in_environment(**context):
    """What the raylet adds to a worker's arguments where its job or task has an environment."""
    return (
        f"--serialized-runtime-env-context={json.dumps({'py_executable': sys.executable, **context})}",
        "--language=PYTHON",
    )


@pytest.mark.combination
def test_a_worker_is_a_fork_with_everything_imported_and_no_gpu_touched(template, started):
    seen = started(template.socket)
    assert not seen["is_itself"]
    assert (seen["imported"], seen["cuda"], seen["threads"]) == ([*LIBRARIES, "scaleray.training.loop"], False, 1)


def test_a_fork_has_the_arguments_environment_folder_streams_and_niceness_of_the_process_it_stands_for(
    template, started, tmp_path
):
    seen = started(template.socket)
    assert seen["arguments"] == [str(started.script), "--one", "two words"]
    assert (seen["folder"], seen["colour"]) == (str(tmp_path), "red")
    assert seen["nice"] == os.nice(0) + 2
    assert seen["torch_threads"] == int(os.environ.get("OMP_NUM_THREADS", "1"))


@pytest.mark.combination
def test_a_fork_has_the_environment_of_its_job_without_rays_set_up(template, started, tmp_path):
    folder = tmp_path / "working directory"
    folder.mkdir()
    (folder / "colours.py").touch()
    context = {
        "env_vars": {"COLOUR": "blue", "PYTHONPATH": str(folder)},
        "command_prefix": ["cd", shlex.quote(str(folder)), "&&"],
    }
    seen = started(template.socket, *in_environment(**context))
    assert not seen["is_itself"] and seen["arguments"] == [str(started.script), "--one", "two words"]
    assert (seen["folder"], seen["colour"]) == (str(folder), "blue")
    assert seen["colours"] == str(folder / "colours.py")


@pytest.mark.combination
def test_a_fork_finds_modules_where_a_fresh_process_would(template, started, tmp_path):
    fresh = started(tmp_path / "nobody", PYTHONPATH="/nowhere")
    assert fresh["is_itself"] and started(template.socket, PYTHONPATH="/nowhere")["path"] == fresh["path"]


def test_a_fork_has_the_threads_that_ray_gives_its_task(template, started, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert started(template.socket, "--threads")["torch_threads"] == 2


@pytest.mark.combination
def test_two_forks_draw_other_numbers(template, started):
    one, two = started(template.socket), started(template.socket)
    assert one["numpy"] != two["numpy"] and one["group"] != two["group"]


@pytest.mark.combination
def test_each_job_has_a_process_of_its_own_that_has_imported_ray_for_it(template, started):
    for number in range(2, worker_template.MOST_JOBS + 3):  # and the first ones are asked for anew
        seen = started(template.socket, job=f"{number % 6 + 1:02}000000")
        assert not seen["is_itself"] and seen["imported"][:2] == LIBRARIES


@pytest.mark.combination
def test_on_a_head_a_job_may_bring_another_version_of_scaleray(started, tmp_path):
    package = tmp_path / "other" / "scaleray"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    template = worker_template.WorkerTemplate(folder=worker_template.short_folder())
    try:
        seen = started(template.socket, "--imports-scaleray", PYTHONPATH=str(package.parent))
    finally:
        template.close()
    assert not seen["is_itself"] and seen["imported"] == LIBRARIES and not seen["of_scaleray"]
    assert seen["scaleray"] == str(package / "__init__.py")


@pytest.mark.combination
def test_an_expected_job_has_the_modules_of_its_driver(started):
    template = worker_template.WorkerTemplate(folder=worker_template.short_folder())
    ids = {worker_template.JOB: "07000000", worker_template.RAYLET: str(os.getpid())}
    try:
        worker_template.expect(str(template.socket), ids, modules=["scaleray.training.worker"])
        seen = started(template.socket, job="07000000")
    finally:
        template.close()
    assert not seen["is_itself"] and seen["imported"] == [*LIBRARIES, "scaleray.training.loop"]
    worker_template.expect(str(template.socket), ids, modules=[])  # it is gone: workers are then what Ray starts


def test_a_fork_leaves_the_group_of_its_driver_if_its_raylet_is_in_another(template, started):
    """The raylet of a cluster ends the group of each worker that has ended, which must not be the driver's."""
    assert started(template.socket)["group_of_processes"] == os.getpgrp()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as raylet:
        seen = started(template.socket, **{worker_template.RAYLET: str(raylet.pid)})
        raylet.communicate(b"\n")
    assert not seen["is_itself"] and seen["group_of_processes"] == seen["pid"]


def raylets(monkeypatch, *found):
    """Let the machine have these raylets: the address of the cluster, the interpreter, and the user of each."""
    processes = []
    for number, (address, interpreter, user) in enumerate(found, start=1):
        words = ["raylet", f"--gcs-address={address}", f"--python_worker_command={interpreter} setup_worker.py --x=1"]
        info = {"name": "raylet", "cmdline": words, "uids": SimpleNamespace(real=user)}
        processes.append(SimpleNamespace(info=info, pid=number))
    monkeypatch.setattr(worker_template.psutil, "process_iter", lambda names: processes)


def test_the_raylet_of_a_cluster_on_this_machine_is_found_by_its_address(monkeypatch):
    mine = (plain_executable(), os.getuid())
    raylets(monkeypatch, ("10.0.0.7:6379", *mine), ("10.0.0.7:6380", *mine))
    assert worker_template.raylet_here("10.0.0.7:6379") == 1
    assert worker_template.raylet_here("127.0.0.1:6380") == 2
    assert worker_template.raylet_here("10.0.0.8:6379") is None
    assert worker_template.raylet_here("ray://10.0.0.7:10001") is None
    assert worker_template.raylet_here("auto") is None  # which of them, Ray must find out


@pytest.mark.parametrize(
    "other", [("/other/python", os.getuid()), (sys.executable, os.getuid() + 1)], ids=["another Python", "another user"]
)
def test_a_raylet_that_could_not_use_this_template_is_left_alone(monkeypatch, other):
    raylets(monkeypatch, ("10.0.0.7:6379", *other))
    assert worker_template.raylet_here("10.0.0.7:6379") is None


@pytest.mark.parametrize("why", ["no template", "no job", "another Python"])
def test_a_worker_that_cannot_be_a_fork_is_what_ray_would_start(template, started, tmp_path, why):
    words = ("--imports-nothing",)
    if why == "another Python":
        venv.create(tmp_path / "other", symlinks=True)
        seen = started(template.socket, *words, python=str(tmp_path / "other" / "bin" / "python"))
    else:
        seen = started(template.socket, *words, job=None) if why == "no job" else started(tmp_path / "nobody", *words)
    assert seen["is_itself"] and not seen["imported"]
    assert seen["arguments"] == [str(started.script), "--one", "two words", *words]


@pytest.mark.parametrize(
    "context",
    [
        {"command_prefix": ["source", "activate", "&&"]},
        {"env_vars": {"PLACE": "${HOME}/here"}},
        {"override_worker_entrypoint": "/other.py"},
        {"py_executable": "/other/python"},
    ],
    ids=["a command before it", "a variable of variables", "a script of its own", "another Python"],
)
def test_an_environment_that_needs_rays_set_up_gets_it(template, started, context):
    words = ("--imports-nothing", *in_environment(**context))
    seen = started(template.socket, *words)
    assert seen["is_itself"] and seen["arguments"][-4:] == [*words, "set up by Ray"]


def test_a_node_of_another_make_starts_as_ray_starts_it(monkeypatch):
    import ray._private.node as node

    class Other:
        pass

    monkeypatch.setattr(node, "Node", Other)
    with lean_node.nodes(template=None, has_dashboard=False, has_autoscaler=False):
        assert node.Node is Other


@pytest.mark.parametrize("has_dashboard", [False, True])
def test_a_node_has_a_dashboard_only_where_somebody_asked_for_it(monkeypatch, has_dashboard):
    import ray._private.node as node
    import ray._private.utils as utils

    started = []

    def start_api_server(self, *, include_dashboard, raise_on_failure):
        started.append("dashboard")

    monkeypatch.setattr(node.Node, "start_api_server", start_api_server)
    before = node.Node, utils.get_dashboard_dependency_error
    with lean_node.nodes(template=None, has_dashboard=has_dashboard, has_autoscaler=False):
        made = node.Node.__new__(node.Node)
        made.start_api_server(include_dashboard=has_dashboard, raise_on_failure=True)
        is_minimal = utils.get_dashboard_dependency_error is not before[1]
    assert (started, is_minimal) == ((["dashboard"], False) if has_dashboard else ([], True))
    assert (node.Node, utils.get_dashboard_dependency_error) == before


def test_the_environment_of_the_start_is_gone_afterwards(monkeypatch):
    monkeypatch.setenv("COLOUR", "red")
    monkeypatch.delenv("SHAPE", raising=False)
    with lean_node.variables({"COLOUR": "blue", "SHAPE": "round"}):
        assert (os.environ["COLOUR"], os.environ["SHAPE"]) == ("blue", "round")
    assert os.environ["COLOUR"] == "red" and "SHAPE" not in os.environ


@pytest.mark.parametrize("ends", [False, True])
def test_a_node_that_joins_late_is_awaited_while_its_raylet_lives(monkeypatch, ends):
    """Ray gives up after 30 s, which a loaded machine needs."""
    import ray._private.node as node
    import ray._private.services as services

    asked, alive = [], [None, None, 1] if ends else [None] * 9

    def find(gcs_address, node_id):
        asked.append((gcs_address, node_id))
        if len(asked) < 4:
            raise RuntimeError("no node of this id")
        return {"node_id": node_id}

    def start_raylet(self, plasma_directory, fallback_directory, object_store_memory, use_valgrind=False, use_profiler=False):  # fmt: skip
        self.all_processes = {"raylet": [SimpleNamespace(process=SimpleNamespace(poll=lambda: alive.pop(0)))]}

    monkeypatch.setattr(services, "get_node", find)
    monkeypatch.setattr(node.Node, "start_raylet", start_raylet)
    monkeypatch.setattr(lean_node.time, "sleep", lambda seconds: None)
    with lean_node.nodes(template=None, has_dashboard=False, has_autoscaler=False):
        made = node.Node.__new__(node.Node)
        made.start_raylet("", "", 0)
        if ends:
            with pytest.raises(RuntimeError, match="no node"):
                services.get_node("here", "1")
        else:
            assert services.get_node("here", "1") == {"node_id": "1"}
    assert len(asked) == (3 if ends else 4) and services.get_node is find
