"""One mutant, judged by the tests that run its line: in a process of its own, which is forked from one that has torch already."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

from jobs.mutation.coverage_map import KnownTest

COPIED = (
    "scaleray",
    "tests",
    "jobs",
    "cluster",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "CHANGELOG.md",
    "LICENSE",
    "constraints.txt",
)
PRELOADED = ("numpy", "torch", "torch.distributed", "torch.distributed.tensor.parallel", "torch.distributed.fsdp")
"""What takes seconds to import and is never mutated; for the pool's processes too."""
FOR_TESTS = ("pytest", "hypothesis", "scipy.stats", "pyarrow.parquet", "pydantic", "pandas", "ray.tune", "mlflow")
LEAST_LIMIT_S, PER_TEST_S = 300.0, 4.0
"""A mutant may take so long, and so many times what its tests took; beyond, it hangs, which kills it too."""


@dataclass(frozen=True)
class Outcome:
    """How a mutant ended. by: the test that failed, where one did."""

    verdict: str
    """`killed`, `timed out`, `survived` or `not judged`."""
    by: str
    num_tests: int
    seconds: float


def copy_of(tree: Path, target: Path) -> Path:
    """A copy of what tests need, in which files may be changed."""
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for name in COPIED:
        if (source := tree / name).is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, target / name)
    return target


class Judge:
    """Runs tests of a copied tree with one file changed; the file is put back afterwards."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self._count = 0
        if "scaleray" in sys.modules:
            raise RuntimeError("scaleray is imported already, and its mutants would not be")
        os.environ["OMP_NUM_THREADS"] = "1"
        for name in (*PRELOADED, *FOR_TESTS):
            importlib.import_module(name)
        # pool processes are forked too, from a server that has torch and no threads
        multiprocessing.set_forkserver_preload(list(PRELOADED))
        with _silent():
            forkserver.ensure_running()

    def judge(self, file: str, source: str, tests: Sequence[KnownTest]) -> Outcome:
        """Run these tests on the tree with `source` in `file`."""
        path = self.tree / file
        before = path.read_text()
        self._count += 1
        started = time.monotonic()
        try:
            path.write_text(source)
            later = time.time() + 10 * self._count  # or the bytecode of another mutant might be taken for this one's
            os.utime(path, (later, later))
            return self._run(tests, started)
        finally:
            path.write_text(before)

    def _run(self, tests: Sequence[KnownTest], started: float) -> Outcome:
        log = self.tree / "mutant.log"
        limit_s = LEAST_LIMIT_S + PER_TEST_S * sum(test.seconds for test in tests)
        process = os.fork()
        if process == 0:
            _in_child(self.tree, log, [test.name for test in tests])
        verdict = ""
        while time.monotonic() - started < limit_s:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                verdict = verdict_of(os.waitstatus_to_exitcode(status))
                break
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # the mutant's own group: it, and what it left behind
        if not verdict:
            os.waitpid(process, 0)
            verdict = "timed out"
        text = log.read_text(errors="replace") if log.exists() else ""
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        by = found[1] if found and verdict == "killed" else ""
        return Outcome(verdict, by, len(tests), round(time.monotonic() - started, 1))


def verdict_of(exit_code: int) -> str:
    """By pytest's exit code: a test failed or could not be imported (1, 2), or the process was ended by the mutant. Of an
    error of pytest's own (3), tests that it does not know (4) or none (5) nothing follows."""
    return "survived" if exit_code == 0 else "not judged" if exit_code in (3, 4, 5) else "killed"


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What is started inside has nowhere to print to."""
    kept, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, before in enumerate(kept, start=1):
            os.dup2(before, number)
            os.close(before)
        os.close(nowhere)


def _in_child(tree: Path, log: Path, names: Sequence[str]) -> None:
    """Run pytest here, and leave without the parent's own ends."""
    code = 3
    try:
        os.setsid()
        os.chdir(tree)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.dont_write_bytecode = True
        os.environ["PYTHONPATH"] = f"{tree}{os.pathsep}{tree / 'tests'}"
        sys.path[:0] = [str(tree), str(tree / "tests")]
        sys.modules.pop("jobs", None)
        forkserver._forkserver.ensure_running = lambda: None  # the parent's; here it is no child to look after
        import pytest

        options = [
            "-x",
            "-q",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "-p",
            "jobs.mutation.pool",
            "--timeout",
            "240",
            "-rfE",
        ]
        code = int(pytest.main([*options, *names]))
    finally:
        os._exit(code)
