"""MLflow without the libraries that it can do without."""

import subprocess
import sys

import pytest

from scaleray.launch.workers.recorder_actor import UNUSED

SEES = f"import sys; print('seen:', *[name for name in {UNUSED} if name in sys.modules])\n"


def run(code, folder):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


WRITES = """
from scaleray.records.mlflow_operations import EndRun, LogArtifact, LogDataset, LogMetrics, LogParams, SetTags
from scaleray.recording.store import RunStore

open("file", "w").close()
store = RunStore.create("sqlite:///mlflow.db", experiment="e", run_name="r", tags={}, key="k")
operations = [LogParams({"a": 1}), LogDataset("data", "digest", {}, {}, "train"), LogMetrics([("m", 1.0, 0, 1)])]
for operation in [*operations, SetTags({"t": "u"}), LogArtifact("file"), EndRun("FINISHED", 1)]:
    store.send(operation)
store.remove_twins("k")
print(store.history("m"), store.tags("t"), store.last_steps())
"""


@pytest.mark.combination
def test_a_run_is_written_without_what_it_does_not_need(mlflow_database):
    plain = run("import mlflow" + WRITES + SEES, mlflow_database.parent)
    light = run(
        "from scaleray.launch.workers.recorder_actor import import_mlflow\nimport_mlflow()\n" + WRITES + SEES,
        mlflow_database.parent,
    )
    assert light == [plain[0], "seen:"]
    assert plain[1] == " ".join(["seen:", *UNUSED])  # or there would be nothing to leave out


@pytest.mark.combination
def test_afterwards_all_of_it_can_be_imported(tmp_path):
    code = "from scaleray.launch.workers.recorder_actor import import_mlflow\nimport pandas\nimport_mlflow()\nassert pandas.DataFrame\n"
    assert run(code + "import pandas.api, scipy.sparse, pyarrow.fs\n" + SEES, tmp_path) == [
        " ".join(["seen:", *UNUSED])
    ]


def test_an_mlflow_that_needs_one_of_them_is_imported_whole(tmp_path):
    (tmp_path / "mlflow.py").write_text("import scipy\nprint('whole')\n")
    code = "from scaleray.launch.workers.recorder_actor import import_mlflow\nimport_mlflow()\nimport mlflow\n"
    assert run(code + SEES, tmp_path) == ["whole", "seen: scipy"]


@pytest.mark.combination
def test_a_look_at_a_run_leaves_mlflow_whole(mlflow_database):
    lines = [
        "import contextlib",
        "from scaleray.errors import ScaleRayError",
        "from scaleray.recording.find_record import find_run",
        "with contextlib.suppress(ScaleRayError): find_run('none', uri='sqlite:///mlflow.db')",
        "import mlflow, pandas",
        "from mlflow.models import infer_signature",
        "print(mlflow.pyfunc.__name__, infer_signature(pandas.DataFrame({'a': [1.0]})) is not None)",
    ]
    assert run("\n".join(lines), mlflow_database.parent) == ["mlflow.pyfunc True"]
