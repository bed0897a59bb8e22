"""CPU seconds and time of every test, with all processes that it starts: where `make test` goes.

    python -m jobs.benchmarks.suite --out build/suite.jsonl -- -m 'not ray and not gpu and not slow'

What follows `--` is for pytest, of which this is a plugin. A line of JSON for each test goes to the file as it ends, the most
expensive are shown at the end. On a machine with other work CPU seconds can be compared, and the time cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SHOWN = 40


class CpuSeconds:
    """Plugin that writes a line for each test: what this process and its descendants, ended or not, have used since the last."""

    def __init__(self, out: Path) -> None:
        self.lines: list[dict[str, str | float]] = []
        self._file = out.open("w")
        self._root, self._known, self._began = psutil.Process(os.getpid()), 0.0, time.monotonic()

    def pytest_collection_finish(self) -> None:
        self._write("(imports and collection)")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        self._write(item.nodeid)
        return result

    def pytest_unconfigure(self) -> None:
        self._write("(end)")

    def total(self, key: str) -> float:
        """Sum over all tests, of cpu_s or wall_s."""
        return sum(float(line[key]) for line in self.lines)

    def _write(self, name: str) -> None:
        used, now = self._used(), time.monotonic()
        line = {"test": name, "cpu_s": round(used - self._known, 3), "wall_s": round(now - self._began, 3)}
        self._known, self._began = used, now
        self.lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _used(self) -> float:
        seconds = 0.0
        for process in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
        return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/suite.jsonl"))
    parser.add_argument("pytest", nargs="*", metavar="-- ARGUMENTS OF PYTEST")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    plugin = CpuSeconds(given.out)
    code = pytest.main(given.pytest, plugins=[plugin])
    for line in sorted(plugin.lines, key=lambda line: -float(line["cpu_s"]))[:SHOWN]:
        print(f"{line['cpu_s']:8.1f} CPU s {line['wall_s']:8.1f} s  {line['test']}")
    print(
        f"{plugin.total('cpu_s'):8.1f} CPU s {plugin.total('wall_s'):8.1f} s  {len(plugin.lines)} lines in {given.out}"
    )
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main())
