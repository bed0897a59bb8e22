"""Fixtures for all rooms. Test modules have names of their own, as none of the folders is a package."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the processes of a test share few cores
# a test that calls Ray without a cluster fails; Ray would start one, and change `print` for all tests after it
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")

import cases_in_turn
import optional_programs
import pytest
from gloo_pool import GlooPool
from hypothesis import settings
from waiting import wait_until

# a loaded machine is not a failure, hence no deadline
settings.register_profile("thorough", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=30)
settings.load_profile("quick" if cases_in_turn.PART else "thorough")


HERE = Path(__file__).parent
ON_FOUR_WORKERS = ("strategies", "training")
"""Folders where a case on four workers is a combination: on two cores they take turns, and two or three do the same."""


def pytest_report_header() -> str:
    return (
        f"combinations of settings: part {cases_in_turn.PART}, set by PART"
        if cases_in_turn.PART
        else "combinations of settings: all"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hide the optional programs if no test that needs one is selected, as on a machine without them."""
    if "not slow" in config.getoption("markexpr"):
        folder = tempfile.TemporaryDirectory(prefix="without-optional-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["PATH"] = optional_programs.path_without_optional(Path(folder.name), os.environ["PATH"])


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the combinations and what needs optional programs, and leave combinations of other parts out."""
    for item in items:
        if optional := item.get_closest_marker("optional"):
            item.add_marker(pytest.mark.slow)
            if reasons := optional_programs.missing(optional.args):
                item.add_marker(pytest.mark.skip(reason="; ".join(reasons)))
        if (always := item.get_closest_marker("always")) and not any(word in item.name for word in always.args):
            item.add_marker(pytest.mark.combination)
        if item.path.relative_to(HERE).parts[0] in ON_FOUR_WORKERS and _parameters(item).get("world_size") == 4:
            item.add_marker(pytest.mark.combination)
    products = [item for item in items if item.get_closest_marker("each_value") and not _is_rare(item)]
    for numbers in cases_in_turn.by_function(item.nodeid for item in products).values():
        cases = [products[number] for number in numbers]
        always = set(cases_in_turn.showing_each_value([_parameters(case) for case in cases]))
        words = cases[0].get_closest_marker("each_value").kwargs.get("and_all", "")
        for number, case in enumerate(cases):
            if number not in always and not (words and words in case.name):
                case.add_marker(pytest.mark.combination)
    if cases_in_turn.PART:
        others = [
            i
            for i in items
            if i.get_closest_marker("combination") and not cases_in_turn.is_in_part(i.nodeid, cases_in_turn.PART)
        ]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def _parameters(item: pytest.Item) -> dict[str, object]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _is_rare(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("combination", "slow", "gpu"))


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """Gloo processes on the loopback interface: `gloo.run(world_size, function, *args)`."""
    pool = GlooPool()
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def no_imports_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported while the next tests run: pytest iterates over all loggers, and modules add theirs."""
    if connection := sys.modules.get("scaleray.launch.cluster.connection"):
        monkeypatch.setattr(connection, "_importing", lambda *names: contextlib.nullcontext())


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without a run: making its tables costs more than a second of a core, a copy nothing."""
    from scaleray.recording import store

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    store.open_client(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def mlflow_database(empty_database: Path, tmp_path: Path) -> Path:
    """It as `mlflow.db` in the test's folder, for runs that would make one there."""
    return Path(shutil.copy(empty_database, tmp_path / "mlflow.db"))


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's config comes from the test alone."""
    for variable in list(os.environ):
        if variable.startswith("SCALERAY_"):
            monkeypatch.delenv(variable)


@pytest.fixture
def uri(mlflow_database: Path) -> str:
    """A tracking URI of the test's own."""
    return f"sqlite:///{mlflow_database}"


@pytest.fixture(scope="session")
def ray_head():
    """One Ray head for the whole session: starting one costs seconds, and so does every Ray Train launch. It has 6
    logical CPUs, whatever the machine has."""
    from scaleray.launch.cluster import head, node_process

    # all tests on Ray fail where it does not start, and a loaded machine was seen to need more than two minutes
    with mock.patch.object(node_process, "START_TIMEOUT_S", 600.0), head.local_head(num_cpus=6) as found:
        yield found


@pytest.fixture(scope="session")
def ray_session(ray_head):
    """This process as a driver of the session's head; `scaleray.train` uses the connection."""
    import ray

    from scaleray.launch.cluster import connection as cluster
    from scaleray.launch.cluster import loopback

    for name, value in cluster.DRIVER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    runtime_env = cluster.runtime_env(ray_head.address)

    def connects() -> bool:
        """The dashboard answers before the node has joined, much before on a loaded machine."""
        try:
            with loopback.reaching(ray_head.address):
                ray.init(address=ray_head.address, runtime_env=runtime_env, logging_level="ERROR")
        except ConnectionError:
            return False
        return True

    wait_until(connects)
    yield ray_head
    ray.shutdown()


@pytest.fixture
def bucket(monkeypatch):
    """The bucket `bucket` of an emulator of S3, as pyarrow's filesystem."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import pyarrow.fs

    filesystem = pyarrow.fs.S3FileSystem(endpoint_override=f"http://{host}:{port}", allow_bucket_creation=True)
    filesystem.create_dir("bucket")
    yield filesystem
    server.stop()
