"""Names that the jobs and benchmarks import from scaleray exist, though most of them run in no test."""

import ast
import importlib
from pathlib import Path

import pytest

JOBS = Path(__file__).parent.parent / "jobs"
OPTIONAL = ("lightning", "torchmetrics", "torchvision", "transformers", "peft", "datasets")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "scaleray":
            yield from ((node.module, alias.name) for alias in node.names)


def exists(module, name):
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as exc:
        return (exc.name or "").split(".")[0] in OPTIONAL
    return True


@pytest.mark.parametrize("path", sorted(JOBS.rglob("*.py")), ids=lambda path: str(path.relative_to(JOBS)))
def test_what_a_job_imports_from_scaleray_exists(path):
    assert [each for each in imported(path) if not exists(*each)] == []
