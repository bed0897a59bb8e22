"""What starts quickly: config, planning and help import neither torch nor Ray nor MLflow."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import scaleray

HEAVY = ("torch", "ray", "mlflow")
NOT_FOR_WORDS = (*HEAVY, "numpy", "scipy", "pandas", "pyarrow", "pydantic", "yaml", "psutil")
"""Modules that no list of options needs."""
ONLY_IN_WORKERS = ("torch._dynamo", "torch.distributed.tensor", "sympy", "mlflow", "ray", "scaleray.training.loop")
"""Modules of a second of a core, or more, that a driver on Ray needs later or never."""
ROOT = Path(__file__).parents[1]
REPORT = f"import sys; print('heavy:', *[m for m in {HEAVY} if m in sys.modules])"


def loaded_after(statements):
    """Which of the heavy libraries a fresh interpreter has imported after these statements."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statements}\n{REPORT}"], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(
    "statements",
    [
        "import scaleray",
        "import scaleray.config; scaleray.config.load_config('jobs/digits.yaml', environ={}).hash()",
        "import scaleray.config.recipe.derive, scaleray.config.recipe.lr_rules, scaleray.config.recipe.lr_rules",
        "import scaleray.errors, scaleray.records.run_record, scaleray.common.metric_names, scaleray.workload",
        "from scaleray import RunConfig, load_config, Workload, RunRecord, ConfigError",
        "import scaleray.cli",
        "from scaleray.cli.main import run_command\n"
        "assert run_command(['plan', '--model', 'gpt2', '--cluster', 'h100:8x2', '--global-batch', '64', '--json']) == 0",
        "import runpy, sys; sys.argv = ['scaleray', '--help']\n"
        "try: runpy.run_module('scaleray', run_name='__main__')\nexcept SystemExit as exc: assert not exc.code, exc.code",
    ],
)
def test_light_parts_import_nothing_heavy(statements):
    assert loaded_after(statements) == []


def imported_by(words, modules):
    """Which of these modules a command line has imported when it is done."""
    statements = f"import sys\nfrom scaleray.cli.main import run_command\nassert run_command({words.split()}) == 0\n"
    report = f"print('loaded:', *(m for m in {modules} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", statements + report], capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.always("[train", "[study", "[plan")
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "--version",
        *(
            f"{name} --help"
            for name in (
                "train",
                "plan",
                "study",
                "sweep",
                "verify",
                "compare",
                "gate",
                "path",
                "report",
                "evaluate",
                "predict",
                "check",
                "profile",
                "watch",
                "doctor",
            )
        ),
        *(f"{name} --help" for name in ("checkpoint", "config", "tracking", "plan explain", "checkpoint list")),
    ],
)
def test_help_imports_neither_the_config_nor_what_computes(words):
    assert imported_by(words, NOT_FOR_WORDS) == []


@pytest.mark.always("config keys")
@pytest.mark.parametrize("words", ["config keys", "plan --model gpt2 --cluster h100:8x2 --json"])
def test_words_and_plans_about_configs_import_nothing_that_computes(words):
    assert imported_by(words, (*HEAVY, "numpy", "scipy", "pandas", "pyarrow")) == []


@pytest.mark.combination
def test_the_check_itself_sees_a_heavy_import():
    assert loaded_after("import scaleray.training.setup.precision") == ["torch"]


@pytest.mark.parametrize("room", ["scaleray.launch.run.train", "scaleray.data.ray_blocks"])
def test_drivers_and_reading_tasks_import_nothing_that_only_a_worker_needs(room):
    statements = f"import sys, {room}\nprint(*(m for m in {ONLY_IN_WORKERS} if m in sys.modules))\nsys.exit()"
    done = subprocess.run([sys.executable, "-c", statements], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done


def test_ray_trains_controller_imports_no_torch():
    rooms = ("process_group", "lean_trainer", "lost_workers")
    assert loaded_after("".join(f"import scaleray.launch.workers.{room}\n" for room in rooms)) == ["ray"]


def test_every_public_name_exists():
    for name in scaleray.__all__:
        assert getattr(scaleray, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        scaleray.nothing  # noqa: B018


@pytest.mark.parametrize("room", ["config", "data", "strategies"])
def test_every_public_name_of_a_room_exists(room):
    module = importlib.import_module(f"scaleray.{room}")
    assert module.__all__ and all(hasattr(module, name) for name in module.__all__)
