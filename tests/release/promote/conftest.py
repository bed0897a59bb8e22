"""Four small trainings whose gates pass, for all tests of what is promoted."""

from __future__ import annotations

import shutil

import pytest

from tests.models.conftest import WORKLOAD

POLICY = {
    "fingerprint": {"allow_uncommitted": True},
    "convergence": {
        "target": "val/accuracy >= 0.5", "margin": 0.9, "metric_margin": 0.9, "alpha": 0.4, "min_runs": 2,
        "not_faster_than_chance": False,
    },
}  # fmt: skip
"""A policy that runs of any quality pass: what is promoted is not judged here."""
LAST_STEP = 32
"""Number of steps of each of the four, which keeps a checkpoint of the last."""


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_tests(tmp_path_factory):
    """Fetched models lie in a folder of the tests: those of this machine's user stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def four_runs(tmp_path_factory, empty_database):
    """The records of four trainings of the same but the seed, of which two are the baseline's."""
    import scaleray

    folder = tmp_path_factory.mktemp("promoted")
    (folder / "corners.py").write_text(WORKLOAD)
    database = shutil.copy(empty_database, folder / "mlflow.db")
    return [
        scaleray.train(
            {
                "workload.name": f"{folder}/corners.py:Named",
                "batch.global_size": 4,
                "optimizer.learning_rate": 0.02,
                "stop.after": "2 epochs",
                "evaluation.every": "1 steps",
                "checkpoint.every": f"{LAST_STEP} steps",
                "checkpoint.storage_path": str(folder / "runs"),
                "tracking.uri": f"sqlite:///{database}",
                "tracking.experiment": "corners",
                "tracking.run_name": f"corners-{seed}",
                "tracking.system_metrics": False,
                "seed": seed,
            },
            local=True,
        )
        for seed in range(4)
    ]


@pytest.fixture
def sides(four_runs, tmp_path):
    """Candidates, baselines, and the URI of a database of the test's own with their runs in it."""
    database = tmp_path / "mlflow.db"
    shutil.copy(four_runs[0].tracking_uri.removeprefix("sqlite:///"), database)
    folders = [record.run_dir for record in four_runs]
    return folders[:2], folders[2:], f"sqlite:///{database}"
