"""Which tests run which line: recorded once by coverage, read for every mutant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.mutation.contexts import OUTCOMES

TESTS = ("checkpoints", "data", "tracking", "launch", "reproducibility", "strategies", "training")
"""Rooms of tests that are recorded, besides the commands that look after checkpoints."""
COMMANDS = ("tests/cli/test_checkpoint_commands.py", "tests/cli/test_compare_command.py")
FAST = "not ray and not gpu and not slow"


@dataclass(frozen=True)
class KnownTest:
    """A test that passes without a mutant. needs_pool: of gloo processes, which take seconds to start."""

    name: str
    seconds: float
    needs_pool: bool


@dataclass(frozen=True)
class CoverageMap:
    """lines: by file and line, the numbers of the tests that run it."""

    tests: list[KnownTest]
    lines: dict[str, dict[int, list[int]]]

    def tests_of(self, file: str, first: int, last: int) -> list[KnownTest]:
        """Those that run any of these lines: first the module's own tests and those of its room, the quickest first."""
        known = self.lines.get(file, {})
        numbers = {number for line in range(first, last + 1) for number in known.get(line, ())}
        room, stem = Path(file).parts[1:-1], Path(file).stem

        def order(test: KnownTest) -> tuple[bool, bool, bool, float, str]:
            module = Path(test.name.partition("::")[0])
            is_own, is_room = module.stem == f"test_{stem}", module.parts[1:-1] == room
            return not is_own, test.needs_pool, not is_room, test.seconds, test.name

        return sorted((self.tests[n] for n in numbers), key=order)

    def with_more(self, more: CoverageMap) -> CoverageMap:
        """This map of the same code with tests that were recorded later; one that both have is as it was later."""
        new = {test.name for test in more.tests}
        tests = [*(test for test in self.tests if test.name not in new), *more.tests]
        numbers = {test.name: number for number, test in enumerate(tests)}
        lines: dict[str, dict[int, list[int]]] = {}
        for known in (self, more):
            for file, of_file in known.lines.items():
                for line, found in of_file.items():
                    names = [known.tests[n].name for n in found]
                    kept = [numbers[name] for name in names if known is more or name not in new]
                    have = lines.setdefault(file, {}).setdefault(line, [])
                    have += [n for n in kept if n not in have]
        return CoverageMap(tests, lines)

    def write(self, path: Path) -> None:
        """As JSON."""
        tests = [[test.name, round(test.seconds, 3), test.needs_pool] for test in self.tests]
        path.write_text(json.dumps({"tests": tests, "lines": self.lines}))

    @classmethod
    def read(cls, path: Path) -> CoverageMap:
        """What `write` wrote."""
        found = json.loads(path.read_text())
        lines = {file: {int(line): tests for line, tests in known.items()} for file, known in found["lines"].items()}
        return cls([KnownTest(*values) for values in found["tests"]], lines)


def record(tree: Path, *, tests: Sequence[str] = ()) -> CoverageMap:
    """Run the fast tests of `tree` once under coverage, in the tree itself. Takes about twice as long as they do."""
    outcomes = tree / "outcomes.json"
    chosen = list(tests) or [*(f"tests/{room}" for room in TESTS), *COMMANDS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *chosen,
        "-q",
        "-m",
        FAST,
        "--cov",
        "--cov-context=test",
        "--cov-report=",
        "--timeout",
        "900",
        "-p",
        "jobs.mutation.contexts",
        "-p",
        "no:cacheprovider",
    ]
    subprocess.run(command, cwd=tree, env=environment(tree) | {OUTCOMES: str(outcomes)}, check=False)
    return read_coverage(tree, json.loads(outcomes.read_text()))


def environment(tree: Path) -> dict[str, str]:
    """For tests of a tree: its own modules come first."""
    return {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'tests'}", "OMP_NUM_THREADS": "1"}


def read_coverage(tree: Path, outcomes: dict[str, dict]) -> CoverageMap:
    """The map out of coverage's own file. Tests that failed are left out: they would kill everything."""
    from coverage import CoverageData

    tests = [KnownTest(name, o["seconds"], o.get("pool", False)) for name, o in outcomes.items() if o["passed"]]
    numbers = {test.name: number for number, test in enumerate(tests)}
    by_module: dict[str, list[int]] = {}
    for name, number in numbers.items():
        by_module.setdefault(name.partition("::")[0], []).append(number)
    data = CoverageData(str(tree / ".coverage"))
    data.read()
    lines: dict[str, dict[int, list[int]]] = {}
    for file in sorted(data.measured_files()):
        if not file.startswith(f"{tree}/"):
            continue
        known: dict[int, list[int]] = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            found: set[int] = set()
            for context in contexts:
                name, _, phase = context.rpartition("|")
                if phase == "setup":  # of a fixture, which other tests of the module may share
                    found.update(by_module.get(name.partition("::")[0], ()))
                elif name in numbers:
                    found.add(numbers[name])
            if found:
                known[line] = sorted(found)
        if known:
            lines[str(Path(file).relative_to(tree))] = known
    return CoverageMap(tests, lines)
