"""The table of files and tests: every file has a row, and every test in it exists."""

from __future__ import annotations

import re

from cluster_files import ROOT, table_of_tests

from scaleray.clusters.manifests.cluster_spec import ClusterSpec
from scaleray.clusters.manifests.written_files import files


def test_every_file_has_tests_and_each_of_them_exists():
    known = {
        f"{path.name}::{name}"
        for path in (ROOT / "tests" / "clusters" / "manifests").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    module = table_of_tests()
    for name in files(ClusterSpec()):
        named = {test for _, test in module.tests_of(name)}
        assert len(named) >= 2 and named <= known, (name, named - known)


def test_what_is_slow_is_said_by_the_marker_of_its_test_and_nowhere_else():
    module = table_of_tests()
    text = (ROOT / "docs" / "tested_files.py").read_text()
    assert text.count("(slow)") == 1  # where it is put behind the words
    slow = {test for name in files(ClusterSpec()) for words, test in module.tests_of(name) if words.endswith(" (slow)")}
    assert {test.partition("::")[0] for test in slow} == {
        "test_image.py", "test_local.py", "test_ray_up.py", "test_slurm.py",
    }  # fmt: skip
    for test in slow:
        file, _, name = test.partition("::")
        before = (ROOT / "tests" / "clusters" / "manifests" / file).read_text().partition(f"def {name}(")[0]
        assert re.search(r"@pytest\.mark\.slow|@needs\(", before.rpartition("\n\n\n")[2])
