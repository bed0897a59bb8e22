"""Discrete-event simulation of streams: each works through its tasks in order, and starts one when all it
depends on has ended.

A GPU runs its CUDA streams like that, and a pipeline its stages. Tasks of representative ranks are enough: replicas
do the same at the same time. `pipeline_schedule` and `data_schedule` write the tasks; `simulated_step` puts a
layout's step together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Task:
    """Work of `duration_s` on a stream. `after`: names of tasks, on any stream, that must have ended. Names are
    anything hashable."""

    name: Any
    stream: Any
    duration_s: float
    after: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """Start and end of each task, in seconds from the first."""

    tasks: dict[Any, Task]
    start_s: dict[Any, float]
    end_s: dict[Any, float]

    @cached_property
    def total_s(self) -> float:
        """The end of the last task, in seconds."""
        return max(self.end_s.values(), default=0.0)

    @cached_property
    def busy_s(self) -> dict[Any, float]:
        """Seconds in which each stream works."""
        found: dict[Any, float] = defaultdict(float)
        for task in self.tasks.values():
            found[task.stream] += task.duration_s
        return dict(found)


def simulate(tasks: Iterable[Task]) -> Timeline:
    """Run the tasks of all streams; those of one stream go in the order given.

    Raises ValueError for tasks that wait for each other, for a name that no task has, and for one that two have.
    """
    queues: dict[Any, list[Task]] = defaultdict(list)
    known: dict[Any, Task] = {}
    for task in tasks:
        if task.name in known:
            raise ValueError(f"two tasks are called {task.name!r}")
        known[task.name] = task
        queues[task.stream].append(task)
    start: dict[Any, float] = {}
    end: dict[Any, float] = {}
    place = dict.fromkeys(queues, 0)
    free = dict.fromkeys(queues, 0.0)
    waiting: dict[Any, list[Any]] = defaultdict(list)
    ready = list(queues)
    while ready:
        stream = ready.pop()
        queue = queues[stream]
        while place[stream] < len(queue):
            task = queue[place[stream]]
            missing = next((name for name in task.after if name not in end), None)
            if missing is not None:
                waiting[missing].append(stream)
                break
            start[task.name] = max([free[stream], *(end[name] for name in task.after)])
            free[stream] = end[task.name] = start[task.name] + task.duration_s
            place[stream] += 1
            ready += waiting.pop(task.name, ())
    if len(end) < len(known):
        stuck = [repr(queue[place[stream]].name) for stream, queue in queues.items() if place[stream] < len(queue)]
        raise ValueError(f"tasks wait for each other, or for one that is not there: {', '.join(stuck[:5])}")
    return Timeline(known, start, end)


def critical_path_s(tasks: Iterable[Task]) -> float:
    """Seconds of the longest chain of dependencies, streams left aside: no order of work is faster."""
    return simulate(Task(task.name, task.name, task.duration_s, task.after) for task in tasks).total_s
