"""The package as others install it: the wheel far from the checkout, and the base without what trains."""

import ast
import itertools
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import study_examples
from packaging.requirements import Requirement

import scaleray.common.installed
from jobs.packaging import wheel
from scaleray.common.installed import (
    NEWEST_TESTED,
    OF_REPORTS,
    OF_TRAIN,
    install_command,
    missing_library,
    newer_than_tested,
)

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT_TRAIN = f"""
import sys
import importlib.util

class Away:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OF_TRAIN}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {OF_TRAIN} else find(name, package)
sys.meta_path.insert(0, Away())
from scaleray.cli.main import run_command
"""


def without_train(statements, folder, *, without=OF_TRAIN):
    """What is printed by a process in which the libraries of the extra `train`, or of several, cannot be imported."""
    script = WITHOUT_TRAIN.replace(str(OF_TRAIN), str(without))
    done = subprocess.run(
        [sys.executable, "-c", script + statements], capture_output=True, text=True, timeout=600, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.combination
def test_the_wheel_has_every_file_and_its_command_trains_far_from_the_checkout(tmp_path, mlflow_database):
    built = wheel.check(tmp_path, tracking_uri=f"sqlite:///{mlflow_database}")
    with zipfile.ZipFile(built) as archive:
        assert {"scaleray/py.typed", "scaleray/records/templates/page.html"} <= set(archive.namelist())


def test_a_wheel_that_lacks_a_file_is_found_out(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        for path in (ROOT / "scaleray").rglob("*"):
            if path.name != "page.css":
                archive.write(path, path.relative_to(ROOT))
    assert wheel.lacks(tmp_path / "a.whl") == {"scaleray/records/templates/page.css"}


@pytest.mark.combination
def test_plan_config_and_reports_need_nothing_of_the_extra_train(tmp_path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "record.json").write_text(study_examples.study().to_json())
    commands = (
        ["plan", "--model", "gpt2", "--cluster", "h100:8x2", "--html", "plan.html"],
        ["plan", "--model", "gpt2", "--here"],
        ["config", "show", "-c", str(ROOT / "jobs/digits.yaml"), "--no-data"],
        ["report", "study"],
    )
    without_train(f"for words in {commands}:\n    assert run_command(words) == 0, words", tmp_path)
    assert (tmp_path / "plan.html").exists() and (tmp_path / "study" / "report.html").exists()


@pytest.mark.combination
def test_plan_and_config_need_no_extra_and_others_name_theirs(tmp_path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "record.json").write_text(study_examples.study().to_json())
    known = [
        ["plan", "--model", "gpt2", "--cluster", "h100:8x2", "--json"],
        ["plan", "--model", "gpt2", "--here"],
        ["config", "show", "-c", str(ROOT / "jobs/digits.yaml"), "--no-data"],
        ["config", "keys"],
    ]
    lacking = [
        ["plan", "--model", "gpt2", "--cluster", "h100:8x2", "--html", "plan.html"],
        ["report", "study"],
        ["compare", "study", "study"],
    ]
    statements = f"for words in {known}:\n    assert run_command(words) == 0, words\n"
    statements += f"for words in {lacking}:\n    assert run_command(words) == 2, words"
    shown = without_train(statements, tmp_path, without=(*OF_TRAIN, *OF_REPORTS))
    assert shown.count("[reports]'") == len(lacking) and "Traceback" not in shown, shown


@pytest.mark.combination
def test_a_command_that_lacks_its_libraries_says_what_to_install(tmp_path):
    database = f"sqlite:///{tmp_path}/mlflow.db"
    commands = [
        ("torch", ["study", "-c", "jobs/digits.yaml"]),
        ("torch", ["train", "-c", "jobs/digits.yaml", "--local"]),
        ("pyarrow", ["checkpoint", "list", "nowhere"]),
        ("mlflow", ["tracking", "ui", "--uri", database, "--port", "0"]),  # which makes the file of the database
        ("mlflow", ["report", "nowhere", "--uri", database]),
        ("ray", ["train", "-c", "jobs/digits.yaml"]),  # last: it imports in a thread meanwhile
    ]
    shown = without_train(f"for _, words in {commands}:\n    assert run_command(words) == 2, words", ROOT)
    said = [line.split()[3] for line in shown.splitlines() if line.startswith("UsageError: the library")]
    assert said == [library for library, _ in commands], shown
    assert shown.count("[train]'") == len(commands) and "Traceback" not in shown


@pytest.mark.combination
def test_from_python_the_same_is_said(tmp_path):
    for call in ("train", "study", "load"):
        statements = (
            f"import scaleray\ntry:\n    scaleray.{call}({{}})\nexcept scaleray.ScaleRayError as exc:\n    print(exc)"
        )
        assert "[train]'" in without_train(statements, tmp_path), call


def test_a_missing_module_of_somebody_else_is_not_taken_for_ours():
    assert missing_library(ModuleNotFoundError("x", name="nowhere")) is None
    assert missing_library(ModuleNotFoundError("x", name="torch.nowhere")) is None, "torch itself is there"


def test_the_libraries_of_the_extra_are_those_that_the_package_names():
    names = {
        line.partition("[")[0].partition(">")[0].partition("=")[0] for line in PROJECT["optional-dependencies"]["train"]
    }
    assert names - {"grpcio", "scaleray"} == set(OF_TRAIN) - {"grpc"}
    reports = PROJECT["optional-dependencies"]["reports"]
    assert "scaleray[reports]" in PROJECT["optional-dependencies"]["train"]
    assert {Requirement(line).name for line in reports} == set(OF_REPORTS)


def test_every_library_that_the_package_imports_is_declared():
    """cloudpickle, grpc and pandas were not: they were there as long as Ray and MLflow needed them."""
    extras = PROJECT["optional-dependencies"].values()
    declared = {
        Requirement(line).name.lower().replace("_", "-") for line in itertools.chain(PROJECT["dependencies"], *extras)
    }
    roots = set()
    for file in (ROOT / "scaleray").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                roots.add(node.module.partition(".")[0])
    homes = metadata.packages_distributions()
    others = roots - set(sys.stdlib_module_names) - {"scaleray"}
    assert len(others) > 20
    for name in others:
        assert {home.lower().replace("_", "-") for home in homes.get(name, [name])} & declared, name


def test_every_extra_that_trains_brings_what_trains():
    for name, lines in PROJECT["optional-dependencies"].items():
        assert name in ("reports", "train") or any(
            line.startswith("scaleray[") and "train" in line for line in lines
        ), name


def test_no_library_that_others_need_is_held_back():
    """pip takes another torch away where a package says which one it wants at most."""
    lines = {line.partition(">")[0].partition("[")[0]: line for line in PROJECT["optional-dependencies"]["train"]}
    assert "<" not in lines["torch"]


@pytest.mark.parametrize(
    ("version", "is_newer"), [("2.13.0+cpu", False), ("2.14.0", True), ("3.0", True), ("2.9.1", False)]
)
def test_a_library_newer_than_any_that_was_tried_is_said(monkeypatch, version, is_newer):
    monkeypatch.setattr(
        scaleray.common.installed.importlib.metadata, "version", lambda name: version if name == "torch" else "0.1"
    )
    said = newer_than_tested()
    assert said == (
        [f"torch {version} is newer than {NEWEST_TESTED['torch']}, the newest version tested with scaleray"]
        if is_newer
        else []
    )


def test_the_versions_of_the_tests_are_the_newest_tested():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if "==" in line)
    assert {name: ".".join(pins[name].split(".")[:2]) for name in NEWEST_TESTED} == NEWEST_TESTED


@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (
            '{"dir_info": {"editable": true}, "url": "file:///home/me/my%20clone"}',
            "pip install '/home/me/my clone[train]'",
        ),
        (
            '{"archive_info": {}, "url": "file:///tmp/scaleray-0.1.0.whl"}',
            "pip install '/tmp/scaleray-0.1.0.whl[train]'",
        ),
        (None, "pip install 'scaleray[train]'"),
    ],
)
def test_an_extra_is_installed_from_where_scaleray_came(direct_url, command, monkeypatch):
    class Installed:
        def read_text(self, name):
            assert name == "direct_url.json"
            return direct_url

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    assert install_command("train") == command
