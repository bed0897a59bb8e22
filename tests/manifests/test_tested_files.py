"""The table of files and tests: every file has a row, and every test in it exists."""

from __future__ import annotations

import importlib.util
import re

from cluster_files import ROOT

from scaleray.manifests.files import files
from scaleray.manifests.wanted import Wanted


def table():
    spec = importlib.util.spec_from_file_location("tested_files", ROOT / "docs" / "tested_files.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_has_tests_and_each_of_them_exists():
    known = {
        f"{path.name}::{name}"
        for path in (ROOT / "tests" / "manifests").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    module = table()
    for name in files(Wanted()):
        named = {test for _, test in module.tests_of(name)}
        assert len(named) >= 2 and named <= known, (name, named - known)


def test_the_numbers_of_rules_are_those_that_there_are():
    from scaleray.manifests.rules import kuberay, own, ray_up

    module = table()
    assert module.RULES[0] == f"{len(kuberay.RULES)} rules of the operator, {len(own.RULES)} of ours"
    assert module.UP_RULES[0] == f"{len(ray_up.RULES)} rules of ours"
