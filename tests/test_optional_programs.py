"""The list of optional programs: every use in a test goes through it, and `make test` does not find them."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import optional_programs
import pytest
from optional_programs import OF_BASE, OF_ENVIRONMENT, OPTIONAL

ROOT = Path(__file__).parent.parent
STARTERS = {"run", "Popen", "call", "check_call", "check_output", "guarded", "command", "marked", "execvp"}
FILES = sorted((ROOT / "tests").rglob("*.py"))


def first_words(tree: ast.Module) -> list[str]:
    """First words of the command lines of a module, as far as they are literals: given to a call that starts one, or
    assigned to a name that is."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [word for scope in (tree, *functions) for word in _of_scope(scope)]


def _of_scope(scope: ast.Module | ast.FunctionDef) -> list[str]:
    nodes, assigned = list(_own_nodes(scope)), {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                assigned.setdefault(ast.unparse(target), []).append(node.value)
    found = []
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STARTERS and node.args:
            given = node.args[0]
            for command in assigned.get(ast.unparse(given), []) if isinstance(given, ast.Name) else [given]:
                if isinstance(command, ast.BinOp):
                    command = command.left
                if isinstance(command, ast.List | ast.Tuple) and command.elts:
                    command = command.elts[0]
                if isinstance(command, ast.Constant) and isinstance(command.value, str):
                    found.append(command.value.split()[0])
    return found


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module or function without those of functions in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, ast.FunctionDef):
            yield from _own_nodes(node)


def uses_past_the_list(text: str) -> list[str]:
    """Programs that a module of tests looks for or starts without the list."""
    tree = ast.parse(text)
    found = [
        "shutil.which"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "which")
        or (isinstance(node, ast.alias) and node.name == "which")
    ]
    literal = {
        node.elts[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Constant)
    }
    found += sorted(literal & OPTIONAL.keys())
    if "subprocess" in text or "guarded" in text:
        found += [word for word in first_words(tree) if word not in OF_BASE and word not in literal & OPTIONAL.keys()]
    return found


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("import subprocess\nsubprocess.run(['promtool', 'check'])", ["promtool"]),
        ("import subprocess\nwords = ['jq', '.']\nsubprocess.Popen(words, text=True)", ["jq"]),
        ("import subprocess\nsubprocess.check_output('jq . x.json', shell=True)", ["jq"]),
        ("import subprocess\nsubprocess.run(['jq'] + more)", ["jq"]),
        ("import shutil\nmark = shutil.which('fish')", ["shutil.which"]),
        ("from shutil import which\nwhich('fish')", ["shutil.which"]),
        ("machine.begin(['chromium', '--headless'])", ["chromium"]),
        ("import subprocess\nsubprocess.run(['bash', '-c', 'true'])\nsubprocess.run([sys.executable])", []),
    ],
)
def test_a_use_past_the_list_is_found(text, uses):
    assert uses_past_the_list(text) == uses


def test_every_use_of_an_outside_program_goes_through_the_list():
    found = {
        str(path.relative_to(ROOT)): uses
        for path in FILES
        if path.name not in ("optional_programs.py", Path(__file__).name)
        and (uses := uses_past_the_list(path.read_text()))
    }
    assert found == {}


def test_programs_that_jobs_and_the_package_look_for_are_on_a_list():
    """Whether one is found changes what a test of them sees."""
    looked_for = {
        argument.value
        for folder in ("jobs", "scaleray")
        for path in (ROOT / folder).rglob("*.py")
        if "which" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("which", "shutil.which")
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }
    assert looked_for and looked_for <= OPTIONAL.keys() | OF_BASE | OF_ENVIRONMENT


def test_optional_programs_are_hidden_and_all_others_found(tmp_path):
    programs, links = tmp_path / "bin", tmp_path / "links"
    programs.mkdir()
    links.mkdir()
    for name in ("promtool", "jq"):
        (programs / name).write_text(f"#!/bin/sh\necho {name}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, optional_programs.__file__, str(links)],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    hidden = {"PATH": done.stdout.strip()}
    found = "command -v promtool openssl sshd; jq; command -v sh git"
    said = subprocess.run(["bash", "-c", found], env=hidden, capture_output=True, text=True, check=True).stdout.split()
    assert said[0] == "jq" and len(said) == 3


def test_a_program_that_is_on_no_list_is_refused():
    with pytest.raises(KeyError, match="jq is on no list"):
        optional_programs.program("jq")
    with pytest.raises(KeyError, match="jq: not in OPTIONAL"):
        optional_programs.needs("chromium|jq")


@pytest.mark.always("words1")
@pytest.mark.parametrize("words", [["-m", "not slow"], []])
def test_what_make_test_runs_does_not_find_them(tmp_path, words):
    """A run of pytest in which `fish` and `promtool` are installed."""
    for name in ("fish", "promtool"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "test_one.py").write_text(
        "import subprocess\nfrom optional_programs import needs, program\n"
        "def test_absent():\n    assert program('fish') is None\n"
        "@needs('promtool')\ndef test_used():\n    assert program('promtool')\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path), *words],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "tests")}, capture_output=True, text=True,
    )  # fmt: skip
    assert ("1 passed, 1 deselected" if words else "1 failed, 1 passed") in done.stdout, done.stdout + done.stderr
