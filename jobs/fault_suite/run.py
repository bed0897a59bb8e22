"""One training under faults: starts the command, again where a fault ended it, and knows how far it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleray.records.run_record import RunRecord

ROOT = Path(__file__).resolve().parent.parent.parent
WORKERS = 2
BATCH = 24


@dataclass(frozen=True)
class Size:
    """How long a run is. pause_s: of each step. hang_limit_s: after which a worker that hangs, or that has waited nearly as
    long for its input, is given up: more than a loaded machine needs for rows that are read by Ray tasks."""

    steps: int = 320
    checkpoint_every: int = 20
    pause_s: float = 0.04
    hang_limit_s: float = 15.0


FULL = Size()
QUICK = Size(steps=150, checkpoint_every=10, pause_s=0.03)


@dataclass(frozen=True)
class Entry:
    """A line of a worker's diary: it began `step` at `time` with these samples."""

    step: int
    rank: int
    size: int
    process: int
    time: float
    ids: list[int]


@dataclass
class Run:
    """A training in a folder of its own. The same command starts it and continues it.

    environment: of the driver. options: more keys of the config.
    """

    folder: Path
    environment: Mapping[str, str]
    size: Size
    options: Mapping[str, Any] = field(default_factory=dict)
    driver: subprocess.Popen[str] | None = None
    lines: list[tuple[float, str]] = field(default_factory=list)
    """What the drivers said, with the time at which it was said."""
    processes: set[int] = field(default_factory=set)
    """Of all that belonged to the run."""
    starts: int = 0
    _output: list[str] = field(default_factory=list)
    _entries: list[Entry] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.diary = self.folder / "diary"
        self.diary.mkdir(parents=True)
        values = {
            "workload.name": f"{Path(__file__).parent / 'workload.py'}:Recorded",
            "workload.args": {"folder": str(self.diary), "pause_s": self.size.pause_s},
            "batch.global_size": BATCH,
            "optimizer.name": "adamw",
            "optimizer.learning_rate": 0.002,
            "optimizer.clip_norm": 1.0,
            "schedule.name": "cosine",
            "schedule.warmup": "20 steps",
            "stop.after": f"{self.size.steps} steps",
            "evaluation.every": "50 steps",
            "deterministic": True,
            "data.reserved_cpus": 1,
            "data.chunk_mib": 0.01,
            "scale.workers": WORKERS,
            "scale.label_selector": {"role": "train"},
            "scale.placement": "SPREAD",
            "scale.max_failures": 100,
            "scale.collective_timeout_s": self.size.hang_limit_s,
            "scale.launch_timeout_s": 60,
            "checkpoint.every": f"{self.size.checkpoint_every} steps",
            "checkpoint.storage_path": str(self.folder / "runs"),
            "checkpoint.grace_s": 15,
            "tracking.uri": f"sqlite:///{self.folder / 'mlflow.db'}",
            "tracking.every_steps": 1,
            "tracking.interval_s": 1,
            **self.options,
        }
        self.storage_path, self.tracking_uri = str(values["checkpoint.storage_path"]), str(values["tracking.uri"])
        import yaml

        nested: dict[str, Any] = {}
        for key, value in values.items():
            *sections, name = key.split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        (self.folder / "run.yaml").write_text(yaml.safe_dump(nested))

    def start(self) -> None:
        """The command, for the first time or again."""
        command = [
            sys.executable,
            "-m",
            "scaleray",
            "train",
            "-c",
            str(self.folder / "run.yaml"),
            "--resume",
            "auto",
            "--json",
        ]
        self._output = []
        self.driver = subprocess.Popen(
            command,
            env=dict(self.environment),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.add(self.driver.pid)
        self.starts += 1
        for stream, take in ((self.driver.stdout, self._output.append), (self.driver.stderr, self._hear)):
            threading.Thread(target=_pump, args=(stream, take), daemon=True).start()

    def _hear(self, line: str) -> None:
        self.lines.append((time.time(), line.rstrip()))

    @property
    def path(self) -> Path:
        """The run's folder, local. A driver that was killed before the run was made leaves an empty one behind."""
        return max(Path(self.storage_path).iterdir(), key=lambda path: path.stat().st_mtime)

    @property
    def is_over(self) -> bool:
        """Whether the command has ended well."""
        return self.driver is not None and self.driver.poll() == 0

    def entries(self) -> list[Entry]:
        """The diaries of all workers so far, in the order of time."""
        for path in self.diary.glob("used-*.jsonl"):
            with open(path) as file:
                file.seek(self._read.get(path, 0))
                while (line := file.readline()).endswith("\n"):
                    self._entries.append(Entry(**json.loads(line)))
                    self._read[path] = file.tell()
        self._entries.sort(key=lambda entry: entry.time)
        self.processes |= {entry.process for entry in self._entries}
        return self._entries

    def step(self) -> int:
        """The last step that all workers of the newest attempt have begun; 0 before the first."""
        newest = self.workers()
        return min((entry.step for entry in newest.values()), default=0) if len(newest) == WORKERS else 0

    def workers(self) -> dict[int, Entry]:
        """The newest entry of every rank."""
        return {entry.rank: entry for entry in self.entries()}

    def wait_for(
        self, condition: Callable[[], Any], what: str, *, seconds: float = 120.0, may_end: bool = False
    ) -> Any:
        """Poll until the condition gives something. Raises Failed when it does not in time, or when the run ends before."""
        deadline = time.monotonic() + seconds
        while True:
            found = condition()
            if found:
                return found
            if not may_end and self.driver is not None and self.driver.poll() is not None:
                raise Failed(f"the run ended (exit code {self.driver.returncode}) before {what}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise Failed(f"{what} did not happen within {seconds:g} s:\n{self.tail()}")
            time.sleep(0.02)

    def said(self, text: str, *, since: float = 0.0) -> list[tuple[float, str]]:
        """Lines with a text, and when they came."""
        return [(at, line) for at, line in self.lines if text in line and at >= since]

    def finish(self) -> RunRecord:
        """Wait for the end and give the record."""
        assert self.driver is not None
        try:
            code = self.driver.wait(timeout=300)
        except subprocess.TimeoutExpired:
            raise Failed(f"the run did not end:\n{self.tail()}") from None
        time.sleep(0.2)  # the last lines are on their way
        if code:
            raise Failed(f"the run ended with exit code {code}:\n{self.tail()}")
        return RunRecord.from_json("".join(self._output))  # which leaves out what the command alone says

    def stop(self) -> None:
        """End what still runs, if anything."""
        if self.driver is not None and self.driver.poll() is None:
            os.killpg(self.driver.pid, signal.SIGKILL)
            self.driver.wait(timeout=30)

    def tail(self) -> str:
        """The last lines, for a message."""
        return "\n".join(f"    {line}" for _, line in self.lines[-25:])


class Failed(Exception):
    """Something that was promised did not happen."""


def _pump(stream: Any, take: Callable[[str], None]) -> None:
    for line in stream:
        take(line)
