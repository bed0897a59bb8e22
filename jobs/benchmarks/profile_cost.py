"""What a profile costs a step: the loop with and without what measures phases, memory and arrivals, turn by turn.

A toy model, whose steps take less than a millisecond, and one of about 8 ms a step, alone and on two gloo workers. The
workers of both sides stay up and take turns in random order.

    python jobs/benchmarks/profile_cost.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import harness
from step_cost import OURS, WORLD_SIZES, turn, workers

WITHOUT = "unprofiled"
AIM_MS, AIM_SHARE = 0.05, 0.01
RULES = """\
Three layers, 32 rows a worker, one thread; {turns} turns of each side in random order (seed {seed}), by workers that stay
up, the first steps of each left out. Milliseconds of a step, of the slower worker: the time on the clock (median of a
turn), the CPU time of the training thread (median) and of the whole process (mean). `more`: with the profile less
without it in the same round. Median (smallest-largest). Load of the machine before: {before:.1f}, after: {after:.1f}.
Aim: at most {aim_ms} ms, and at most {aim:.0%} of a step of 8 ms."""


def describe(found: list[harness.Measurement], arguments: argparse.Namespace, loads: tuple[float, float]) -> str:
    """The rules and the table."""
    rows = []
    for width in arguments.widths:
        for size in WORLD_SIZES:
            own = [m for m in found if m["width"] == width and m["world_size"] == size]
            base = {m["round"]: m for m in own if m["side"] == WITHOUT}
            ours = [m for m in own if m["side"] == OURS]
            more = {
                key: [m[key] - base[m["round"]][key] for m in ours] for key in ("clock_ms", "thread_ms", "process_ms")
            }
            ratios = [m["clock_ms"] / base[m["round"]]["clock_ms"] for m in ours]
            without = statistics.median(m["clock_ms"] for m in base.values())
            rows.append(
                [
                    f"{width}",
                    str(size),
                    f"{without:.3f}",
                    harness.show(more["clock_ms"], "{:+.3f}"),
                    harness.show(ratios, "{:.4f}"),
                    harness.show(more["thread_ms"], "{:+.4f}"),
                    harness.show(more["process_ms"], "{:+.4f}"),
                    f"{statistics.median(more['thread_ms']) / without:+.2%}",
                ]
            )
    rules = RULES.format(
        turns=arguments.repeats, seed=arguments.seed, before=loads[0], after=loads[1], aim_ms=AIM_MS, aim=AIM_SHARE
    )
    header = [
        "width", "workers", "step without, ms", "more on the clock", "ratio", "more CPU of the thread",
        "more CPU of the process", "thread's share of a step",
    ]  # fmt: skip
    return f"{rules}\n\n{harness.table(header, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 1100])
    parser.add_argument("--seconds", type=float, default=0.9, help="of a turn, as far as it can be told before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    conditions = harness.conditions(["torch", "numpy"])
    sides = {OURS: harness.REPOSITORY, WITHOUT: harness.REPOSITORY}
    settings = [f"{width} {size}" for width in arguments.widths for size in WORLD_SIZES]
    found: list[harness.Measurement] = []
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, workers(sides, folder) as groups:
        for number, setting in harness.interleaved(settings, repeats=arguments.repeats + 1, seed=arguments.seed):
            width, size = (int(part) for part in setting.split())
            steps = max(60, int(arguments.seconds * 1e3 / (0.9 if width <= 64 else 8.0)))
            task = {"clips": False, "steps": steps, "warmup_steps": steps // 5, "width": width}
            for _, side in harness.interleaved(list(sides), repeats=1, seed=len(found) + arguments.seed):
                figures = turn(groups[side, size], task)
                if number:  # the first round fills caches
                    found.append({"round": number, "side": side, "world_size": size, "width": width, **figures})
    record = {"conditions": conditions, "arguments": harness.arguments_of(arguments), "measurements": found}
    text = describe(found, arguments, (before, os.getloadavg()[0]))
    harness.write_report(
        "profile_cost", title="What a profile costs a step", text=text, record=record, folder=arguments.results
    )


if __name__ == "__main__":
    main()
