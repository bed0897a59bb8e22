"""What a step costs the CPU beyond forward, backward, clipping and a fused optimizer, in milliseconds.

A toy model, whose arithmetic is small beside what is to be measured, alone and on two gloo workers, with clipping and
without: by hand, with scaleray's loop, and with the loop of other checkouts. The workers of all sides stay up and take
turns in random order.

    python jobs/benchmarks/step_cost.py --before ../other-checkout
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

from scaleray.common.guarded import guarded

BASELINE, OURS = "plain", "scaleray"
SCRIPT = Path(__file__).resolve().parent / "sides" / "steps.py"
WORLD_SIZES = (1, 2)
RULES = """\
Three layers of 64 units, 32 rows a worker, one thread, {steps} steps a turn of which the first {warmup} are left out,
{repeats} turns of each side in random order (seed {seed}), by workers that stay up. Milliseconds of a step: the CPU time of
the training thread (median of the steps of a turn, then of turns), that of the whole process with the thread that reads
ahead (mean), and the time on the clock. `beyond`: less those of the loop by hand in the same turn. That loop has forward,
backward, clipping, fused AdamW, DDP on two workers, and batches that are there already; scaleray's has its input, its
learning rate, its records, its checkpointing at hand and its checks. Median (smallest-largest). With two workers the
figures are those of the slower one."""


class Worker:
    """A process that trains when it is told to."""

    def __init__(self, side: str, rank: int, world_size: int, source: Path, meeting: Path) -> None:
        kind = side if side == BASELINE else OURS
        places = [source, harness.REPOSITORY / "jobs" / "benchmarks"]
        self.process = subprocess.Popen(
            guarded([sys.executable, str(SCRIPT), kind, str(rank), str(world_size), str(meeting)]),
            cwd=source,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, places))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, task: dict[str, Any]) -> None:
        """Tell it to train."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it measured. Raises RuntimeError where it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a worker ended; its error stands above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextlib.contextmanager
def workers(sides: dict[str, Path], folder: str) -> Iterator[dict[tuple[str, int], list[Worker]]]:
    """The workers of every side and world size, which end with the context."""
    found: dict[tuple[str, int], list[Worker]] = {}
    try:
        for number, (side, source) in enumerate(sides.items()):
            for size in WORLD_SIZES:
                meeting = Path(folder) / f"{number}-{size}"
                found[side, size] = [Worker(side, rank, size, source, meeting) for rank in range(size)]
        yield found
    finally:
        for group in found.values():
            for worker in group:
                worker.process.terminate()


def turn(group: list[Worker], task: dict[str, Any]) -> harness.Measurement:
    """One training of all workers of a group; the figures of the slowest."""
    for worker in group:
        worker.begin(task)
    answers = [worker.answer() for worker in group]
    return {
        "thread_ms": max(statistics.median(a["thread_ms"]) for a in answers),
        "clock_ms": max(statistics.median(a["clock_ms"]) for a in answers),
        "process_ms": max(a["process_ms"] for a in answers),
    }


def describe(found: list[harness.Measurement], sides: list[str], arguments: argparse.Namespace) -> str:
    """The rules and the table."""
    rows = []
    for world_size in WORLD_SIZES:
        for clips in (False, True):
            own = [m for m in found if m["world_size"] == world_size and m["clips"] == clips]
            by_hand = {m["round"]: m for m in own if m["side"] == BASELINE}
            for side in sides:
                mine = [m for m in own if m["side"] == side]
                beyond = lambda key, mine=mine, by_hand=by_hand: [m[key] - by_hand[m["round"]][key] for m in mine]
                rows.append(
                    [
                        str(world_size),
                        "yes" if clips else "no",
                        side,
                        harness.show([m["thread_ms"] for m in mine], "{:.3f}"),
                        harness.show(beyond("thread_ms"), "{:.3f}") if side != BASELINE else "",
                        harness.show(beyond("process_ms"), "{:.3f}") if side != BASELINE else "",
                        harness.show(beyond("clock_ms"), "{:.3f}") if side != BASELINE else "",
                    ]
                )
    rules = RULES.format(
        steps=arguments.steps, warmup=arguments.warmup_steps, repeats=arguments.repeats, seed=arguments.seed
    )
    header = ["workers", "clips", "side", "thread's CPU, ms", "beyond", "process's CPU beyond", "on the clock beyond"]
    return f"{rules}\n\n{harness.table(header, rows)}"


def commit(folder: Path) -> str:
    """The commit of a checkout, as a name."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() or folder.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, action="append", default=[], help="another checkout; may be repeated")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    conditions = harness.conditions(["torch", "numpy"])
    others = {f"before ({commit(folder)})": folder.resolve() for folder in arguments.before}
    sides = {BASELINE: harness.REPOSITORY, OURS: harness.REPOSITORY, **others}
    settings = [f"{size} {clips:d}" for size in WORLD_SIZES for clips in (False, True)]
    found: list[harness.Measurement] = []
    with tempfile.TemporaryDirectory() as folder, workers(sides, folder) as groups:
        for number, setting in harness.interleaved(settings, repeats=arguments.repeats + 1, seed=arguments.seed):
            size, clips = (int(part) for part in setting.split())
            task = {"clips": bool(clips), "steps": arguments.steps, "warmup_steps": arguments.warmup_steps}
            for _, side in harness.interleaved(list(sides), repeats=1, seed=len(found) + arguments.seed):
                figures = turn(groups[side, size], task)
                if number:  # the first round fills caches
                    where = {"round": number, "side": side, "world_size": size, "clips": bool(clips)}
                    found.append({**where, **figures})
    record = {"conditions": conditions, "arguments": harness.arguments_of(arguments), "measurements": found}
    harness.write_report(
        "step_cost",
        title="What a step costs beside its arithmetic",
        text=describe(found, list(sides), arguments),
        record=record,
        folder=arguments.results,
    )


if __name__ == "__main__":
    main()
