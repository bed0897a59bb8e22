"""Record of a path from a baseline to a promoted model: its decisions, commands and results."""

import shlex
from dataclasses import dataclass, field
from typing import Literal

from scaleray.records.json_record import JsonRecord

Status = Literal["open", "running", "interrupted", "done", "failed", "skipped"]
STEPS = ("baseline", "distribute", "optimise", "validate", "produce")
"""Steps of a path, in order."""
OVER = ("done", "skipped")
Act = Literal["command", "train", "faults", "soak", "decide", "runbook"]
"""Kinds of tasks: a command, a training, a training that is killed and resumed, a long training that is evaluated, a
person's decision, or a page that the path writes."""


@dataclass(frozen=True, kw_only=True)
class PathTask:
    """One task of a path. key: `STEP/NAME`, unique; command: words after `scaleray`, empty if there is no command."""

    key: str
    what: str
    act: Act = "command"
    status: Status = "open"
    command: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    """The executed command, in which results of earlier tasks replace placeholders such as `{study}`."""
    exit_code: int | None = None
    started_at: float | None = None
    """Time in seconds since 1970."""
    duration_s: float | None = None
    by: str = ""
    folder: str = ""
    """Folder of the command's record."""
    figures: dict[str, float] = field(default_factory=dict)
    """Measurements of a training, by name."""
    words: str = ""
    """Summary of the command's record, why it failed or was skipped, or the decision that a person must make."""

    @property
    def step(self) -> str:
        """Step to which the task belongs."""
        return self.key.partition("/")[0]

    @property
    def shell(self) -> str:
        """The command for a shell; before its execution, capitals are placeholders for results of earlier tasks."""
        words = [word[1:-1].upper() if word[:1] + word[-1:] == "{}" else word for word in self.ran or self.command]
        return shlex.join(["scaleray", *words]) if words else ""


@dataclass(frozen=True, kw_only=True)
class PathDecision:
    """Decision of a person. at: in seconds since 1970."""

    at: float
    by: str
    what: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class PathRecord(JsonRecord):
    """A path. target: such as `test/accuracy >= 0.97`; runs: trainings per side; local: whether to avoid Ray if
    possible; model: its name in the registry; cluster: description for the planner; soak: length of the long training;
    kind: type of cluster for the pipeline."""

    name: str
    folder: str
    target: str
    workers: int
    strategy: str
    batch_size: int
    runs: int
    local: bool
    by: str
    started_at: float
    model: str
    soak: str
    kind: str = "local"
    alias: str = "champion"
    cluster: str | None = None
    decisions: list[PathDecision] = field(default_factory=list)
    tasks: list[PathTask] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tracking_uri: str = ""

    def task(self, key: str) -> PathTask | None:
        """Return the task with this key."""
        return next((task for task in self.tasks if task.key == key), None)

    def next_task(self) -> PathTask | None:
        """Return the first task that is neither done nor skipped; None at the end."""
        return next((task for task in self.tasks if task.status not in OVER), None)

    def lines(self) -> list[str]:
        """Lines about each step, failed tasks, and the next task."""
        found = [f"path {self.name}: {self.target} on {self.workers} workers", *self.notes]
        for step in STEPS:
            tasks = [task for task in self.tasks if task.step == step]
            found.append(f"{step}: {sum(task.status in OVER for task in tasks)} of {len(tasks)}")
        found += [f"{task.key} failed: {task.words}" for task in self.tasks if task.status == "failed"]
        following = self.next_task()
        if following is None:
            return [*found, "the path is complete"]
        more = f": {following.words}" if following.act == "decide" and following.words else ""
        return [*found, f"next: {following.key}: {following.what}{more}"]
