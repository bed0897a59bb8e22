"""Fixtures for all rooms. Test modules have names of their own, as none of the folders is a package."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the processes of a test share few cores

import pytest
from gloo_pool import GlooPool
from hypothesis import settings

settings.register_profile("scaleray", deadline=None)  # a loaded machine is not a failure
settings.load_profile("scaleray")


ON_FOUR_WORKERS = ("strategies", "training")
KEPT = "test_many_workers_equal_one_process[accumulation"  # of every strategy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Four workers on two cores take turns: what is also tested on two or three is left to `make slow`, but for one case."""
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if (
            params.get("world_size") == 4
            and item.path.relative_to(Path(__file__).parent).parts[0] in ON_FOUR_WORKERS
            and not item.name.startswith(KEPT)
        ):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def gloo() -> Iterator[GlooPool]:
    """Gloo processes on the loopback interface: `gloo.run(world_size, function, *args)`."""
    pool = GlooPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without a run: making its tables costs more than a second of a core, a copy nothing."""
    from scaleray.tracking import store

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
