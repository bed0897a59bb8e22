"""Whether a cluster has what a job needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scaleray.clusters.submit.package_versions import (
    PROBE,
    SIGN,
    Versions,
    differences,
    imported_packages,
    missing_packages,
    normalised,
    versions_in,
)

HERE = Versions("3.11.7", {"ray": "2.60.0", "torch": "2.13.0+cpu", "scikit-learn": "1.7.0", "numpy": "2.1.0"})


def there(python="3.11.2", **packages):
    return Versions(python, {"ray": "2.60.0", "torch": "2.13.1+cu126", **packages})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (there(), []),
        (there(python=""), []),
        (there(python="3.12.1"), ["Python is 3.12.1 there and 3.11.7 here"]),
        (there(ray="2.60.1"), ["ray is 2.60.1 there and 2.60.0 here"]),
        (there(torch="2.12.0"), ["torch is 2.12.0 there and 2.13.0+cpu here"]),
        (Versions("3.11.0", {}), []),
    ],
)
def test_ray_must_be_the_same_and_python_and_torch_of_one_minor_version(other, said):
    assert differences(HERE, other) == said


def test_packages_that_are_needed_and_not_there_are_named_with_the_version_of_here():
    needed = {"scikit-learn", "numpy", "torch", "of-nobody"}
    assert missing_packages(needed, HERE, there(numpy="1.0")) == {"scikit-learn": "1.7.0"}
    assert normalised({"Scikit_Learn": "1", "ruamel.yaml": "2"}) == {"scikit-learn": "1", "ruamel-yaml": "2"}


def test_imports_are_followed_through_the_users_own_modules_and_no_further(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("import numpy")
    (tmp_path / "own" / "deep.py").write_text("from sklearn.datasets import load_iris\nimport own")
    (tmp_path / "jobs" / "helpers.py").write_text("import yaml, os")
    (tmp_path / "tests.py").write_text("import pytest")
    start = tmp_path / "jobs" / "work.py"
    start.write_text("import json\nfrom own import deep\nfrom .helpers import X\n\ndef f():\n    import scipy.stats\n")
    assert imported_packages(start, tmp_path) == {"numpy", "scikit-learn", "pyyaml", "scipy"}


@pytest.mark.parametrize("text", ["def f(:\n", "\0", "# -*- coding: nonsense -*-\nimport numpy"])
def test_a_file_that_is_no_python_imports_nothing(tmp_path, text):
    (tmp_path / "work.py").write_text(text)
    assert imported_packages(tmp_path / "work.py", tmp_path) == set()


def test_what_a_cluster_is_asked_needs_nothing_but_python_and_tells_its_packages():
    done = subprocess.run(
        f'"{sys.executable}" -I -c "{PROBE}"', shell=True, capture_output=True, text=True, timeout=120
    )
    values = json.loads(done.stdout.removeprefix(SIGN))
    assert normalised(values["packages"])["torch"] == Versions.here().packages["torch"]
    assert values["python"] == Versions.here().python


@pytest.mark.parametrize(
    "program",
    [
        PROBE,
        "import json; from scaleray.clusters.submit.package_versions import SIGN, Versions; print(SIGN + json.dumps(vars(Versions.here())))",
    ],
)
def test_of_two_installations_of_a_package_the_one_that_is_imported_counts(tmp_path, program):
    (tmp_path / "torch-2.12.1.dist-info").mkdir()
    (tmp_path / "torch-2.12.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.12.1\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    found = versions_in(said.stdout)
    assert found is not None and found.packages["torch"] == "2.12.1" and found.packages["ray"]
