"""What a profile costs a step: one training, in which everything that measures phases, memory and arrivals is taken away
and put back every 24 steps.

A toy model, whose steps take less than a millisecond, and one of about 8 ms a step, alone and on two gloo workers.

    chrt -f 20 python jobs/benchmarks/profile_cost.py [--pairs 200,100]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import numpy as np

from scaleray.common.guarded import guarded

AIM_MS, AIM_SHARE = 0.05, 0.01
SCRIPT = Path(__file__).resolve().parent / "sides" / "switched.py"
WORLD_SIZES = (1, 2)
FIGURES = {"thread_ms": "CPU of the training thread", "process_ms": "CPU of the process", "clock_ms": "on the clock"}
RULES = """\
Three layers, 32 rows a worker, one thread. Steps come in blocks of 24, of which the first 4 are left out; each pair of
blocks has one with the profile and one without, in random order. Milliseconds of a step: the CPU time of the training
thread and the time on the clock (median of a block), and the CPU time of the whole process (mean). `more`: with the
profile less without it in the same pair; median of all pairs [95 % of 2,000 draws of pairs anew], of the worker for which
that is more. Load of the machine before: {before:.1f}, after: {after:.1f}.
Aim: at most {aim_ms} ms, and at most {aim:.0%} of a step of 8 ms."""


def measured(width: int, world_size: int, pairs: int, folder: str) -> list[list[dict[str, Any]]]:
    """The blocks of each worker of a training."""
    places = [harness.REPOSITORY, SCRIPT.parent]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, places))}
    meeting = Path(folder) / f"{width}-{world_size}"
    group = [
        subprocess.Popen(
            guarded([sys.executable, *map(str, (SCRIPT, rank, world_size, meeting, width, pairs))]),
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    answers = [worker.communicate()[0] for worker in group]
    if any(worker.returncode for worker in group):
        raise RuntimeError("a worker ended; its error stands above")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def more(blocks: list[dict[str, Any]], figure: str) -> tuple[float, float, float]:
    """What the profile adds to a figure: the median of all pairs, and the ends of its interval."""
    pairs = [sorted(pair, key=lambda block: block["is_on"]) for pair in zip(blocks[::2], blocks[1::2], strict=True)]
    differences = np.array([on[figure] - off[figure] for off, on in pairs])
    draws = np.random.default_rng(0).integers(0, len(differences), (2000, len(differences)))
    low, high = np.percentile(np.median(differences[draws], axis=1), [2.5, 97.5])
    return float(np.median(differences)), float(low), float(high)


def row_of(training: dict[str, Any]) -> list[str]:
    """A training in the table."""
    workers = training["workers"]
    off = {name: [np.median([b[name] for b in worker if not b["is_on"]]) for worker in workers] for name in FIGURES}
    step_ms = max(off["clock_ms"])
    cells = [str(training["width"]), str(training["world_size"]), str(len(workers[0]) // 2), f"{step_ms:.2f}"]
    for name in FIGURES:
        median, low, high = max(more(worker, name) for worker in workers)
        cells.append(f"{median:+.4f} [{low:+.4f}, {high:+.4f}]")
        if name != "process_ms":
            cells.append(f"{median / step_ms:+.2%} [{low / step_ms:+.2%}, {high / step_ms:+.2%}]")
    return cells


def describe(found: list[dict[str, Any]], loads: tuple[float, float]) -> str:
    """The rules and the table."""
    rules = RULES.format(before=loads[0], after=loads[1], aim_ms=AIM_MS, aim=AIM_SHARE)
    header = ["width", "workers", "pairs", "step without, ms"]
    for name, title in FIGURES.items():
        header += [f"more {title}, ms"] if name == "process_ms" else [f"more {title}, ms", "of a step"]
    return f"{rules}\n\n{harness.table(header, [row_of(training) for training in found])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,1100")
    parser.add_argument("--pairs", default="200,100", help="of blocks, for each width")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    conditions = harness.conditions(["torch", "numpy"])
    settings = list(zip(map(int, arguments.widths.split(",")), map(int, arguments.pairs.split(",")), strict=True))
    found: list[dict[str, Any]] = []
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        for width, pairs in settings:
            for world_size in WORLD_SIZES:
                workers = measured(width, world_size, pairs, folder)
                found.append({"width": width, "world_size": world_size, "workers": workers})
                harness.log(" | ".join(row_of(found[-1])))
    text = describe(found, (before, os.getloadavg()[0]))
    for training in found:  # each block in three figures
        training["workers"] = [
            [[block["is_on"], *(round(block[name], 4) for name in FIGURES)] for block in worker]
            for worker in training["workers"]
        ]
    record = {"conditions": conditions, "arguments": harness.arguments_of(arguments), "measurements": found}
    harness.write_report(
        "profile_cost", title="What a profile costs a step", text=text, record=record, folder=arguments.results
    )


if __name__ == "__main__":
    main()
