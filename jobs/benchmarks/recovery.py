"""Kills workers at random moments: a training with spares, and the same one with torchft.

    pip install -r jobs/benchmarks/requirements.txt
    python jobs/benchmarks/recovery.py --kills 20 --seed 0

Three gloo processes train a network with dropout and BatchNorm. In each round both sides suffer the same number of
kills, each at a random moment after a random step, when the side is whole again after the last one. Other faults:
`python jobs/faults.py --spares`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from processes import CpuWatch

sys.path[:0] = [str(harness.REPOSITORY / "jobs"), str(Path(__file__).parent)]
os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])])

from fault_suite.members import Size  # noqa: E402
from fault_suite.spared import SparedTraining, differences  # noqa: E402
from fault_suite.step_faults import LAST_STEPS  # noqa: E402
from sides.with_torchft import HEARTBEAT_MS, JOIN_MS, Replicas  # noqa: E402

SIDES = {"scaleray": SparedTraining, "torchft": Replicas}
RULES = """\
{ranks} gloo processes of one thread each, {strategy}, a network of width {width} (512: 0.6 million parameters) with dropout and
BatchNorm, and a pause of {pause} s in each step; {steps} steps a training, SIGKILL to a
random worker at a random moment, up to {a_run} times, each when the side is whole again. scaleray has one spare; torchft starts the
killed replica again at once. New processes of both sides are forked with torch loaded. torchft: join timeout {join} ms,
heartbeat limit {heartbeat} ms. Seeds {seeds}.

- stand-still: the longest time between two steps after a kill and before the next one, less a usual step.
- lost: sum of the times between steps there that are longer than three usual ones, less a usual step each.
- back: from the kill to the first step of all ranks.
- wrong batch: steps in which not all samples of the global batch were summed.
- equal: trainings whose weights (scaleray: and losses) are those of its undisturbed one, bit for bit.
- speed: of the trainings with kills, as a share of the undisturbed one's, from their first steps to their last ones.
- CPU s: of all processes of the side in its trainings with kills; foreign CPU s: of all others on the machine."""


def train(
    side: str, size: Size, kills: int, draw: random.Random, apart: Sequence[int] = (3, 25)
) -> tuple[SparedTraining, dict[str, Any]]:
    """One training of a side, and what its kills cost. apart: fewest and most steps between two kills."""
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    started_at = time.time()
    with CpuWatch(os.getpid()) as watch:
        training = SIDES[side](size, folder)
        killed: list[float] = []
        back: list[float] = []
        try:
            for _ in range(kills):
                due = training.newest + draw.randint(*apart)
                training.wait_for(lambda due=due: training.is_over or is_ready(training, due), "whole group")
                training.pause(draw.uniform(0.0, 0.1))
                if training.newest > size.steps - LAST_STEPS:
                    break
                victim = training.members[draw.randrange(size.ranks)]
                killed.append(training.signal(victim, signal.SIGKILL))
                training.wait_for(lambda v=victim: v not in training.running, "end of the victim")
                if side == "torchft":
                    training.wait_for(lambda: training.is_whole, "whole group")
                    back.append(time.time() - killed[-1])
            training.wait_for(lambda: training.is_over, "step")
        finally:
            training.close()
    shutil.rmtree(folder, ignore_errors=True)
    ends = [*killed[1:], float("inf")][: len(killed)]
    steps = sorted(training.ended.values())
    return training, {
        "steps_ms": 1000 * training.step_s,
        "training_s": training.training_s,
        "still_s": [training.still_s(at, min(end, at + 20)) for at, end in zip(killed, ends, strict=True)],
        "lost_s": [training.lost_s(at, min(end, at + 20)) for at, end in zip(killed, ends, strict=True)],
        "back_s": back or [next((b - at for b in steps if b > at + 0.05), 0.0) for at in killed],
        "partial_steps": len(getattr(training, "partial_steps", ())),
        "stuck": training.stuck,
        "cpu_s": sum(watch.cpu_s().values()),
        "foreign_cpu_s": watch.foreign_s(),
        "wall_s": time.time() - started_at,
        "load": os.getloadavg()[0],
    }


def whole_numbers(text: str) -> list[int]:
    """Numbers with a comma between them."""
    return [int(number) for number in text.split(",")]


def is_ready(training: SparedTraining, due: int) -> bool:
    """Whether a side is whole again, after a step."""
    return training.newest >= due and training.is_whole


def summary(side: str, runs: Sequence[dict[str, Any]], steps: int) -> list[str]:
    """A line of the table."""
    kills = sum(len(run["still_s"]) for run in runs)
    figures = []
    for name in ("still_s", "lost_s", "back_s"):
        values = sorted(value for run in runs for value in run[name])
        p95 = values[min(len(values) - 1, int(0.95 * len(values)))]
        figures.append(f"{statistics.median(values):.2f} / {p95:.2f} / {values[-1]:.2f}")
    partial, taken = sum(run["partial_steps"] for run in runs), steps * len(runs)
    equal = f"{sum(run['equal'] for run in runs)} of {len(runs)}"
    cpu = [f"{sum(run[name] for run in runs):.0f}" for name in ("cpu_s", "foreign_cpu_s")]
    speeds = [run["speed_kept"] for run in runs if "speed_kept" in run]  # reports from before have none
    kept = f"{100 * statistics.fmean(speeds):.1f} %" if speeds else "-"
    return [side, str(kills), *figures, f"{partial} of {taken}", equal, kept, *cpu]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="workers to kill in all, a side")
    parser.add_argument("--a-run", type=int, default=10, help="kills in each training")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--apart", type=whole_numbers, default=[3, 25], help="fewest and most steps between two kills")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument(
        "--strategy", default="ddp", help="of scaleray; another one keeps copies of its state in memory"
    )
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of each step that take no core")
    parser.add_argument("--width", type=int, default=512, help="of the network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sides", default=",".join(SIDES), help="comma between them")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no training after so many")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="reports whose runs belong to this one")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the report")
    given = parser.parse_args()
    sides = given.sides.split(",")
    if "torchft" in sides and importlib.util.find_spec("torchft") is None:
        print("torchft is not installed; see jobs/benchmarks/requirements.txt")
        sides.remove("torchft")
    conditions = harness.conditions(["scaleray", "torch", "torchft-nightly"])
    earlier = [json.loads(file.read_text()) for file in given.earlier]
    size = Size(
        **{name: getattr(given, name) for name in ("steps", "ranks", "strategy", "width")},
        rows=min(32, 960 // given.ranks),  # of 1,000 in all
        pause_s=given.pause,
        spares=1,
        silent_s=10.0,
        evaluation_every=None,
        checkpoint_every=None,
    )
    draw = random.Random(given.seed)
    started = time.time()
    calm: dict[str, SparedTraining] = {}
    runs: list[dict[str, Any]] = []
    for side in sides if given.kills else ():
        calm[side], found = train(side, size, 0, draw)
        harness.log(f"{side} undisturbed: steps of {found['steps_ms']:.1f} ms, load {found['load']:.1f}")
    for number, side in harness.interleaved(sides, repeats=-(-given.kills // given.a_run), seed=given.seed):
        if time.time() - started > 60 * given.minutes:
            break
        training, found = train(side, size, given.a_run, random.Random(f"{given.seed} {number}"), given.apart)
        wrong = differences(calm[side], training)
        kept = calm[side].training_s / training.training_s
        run = {"side": side, "seed": given.seed, "round": number, **found, "equal": not wrong, "differences": wrong}
        run["speed_kept"] = kept
        runs.append(run)
        harness.log(json.dumps({name: value for name, value in run.items() if name != "differences"}))
    runs += [run for report in earlier for run in report["runs"]]
    seeds = sorted({run["seed"] for run in runs})
    rows = [summary(side, [run for run in runs if run["side"] == side], given.steps) for side in sides]
    header = [
        "side",
        "kills",
        "stand-still p50 / p95 / longest (s)",
        "lost (s)",
        "back (s)",
        "wrong batch",
        "equal",
        "speed",
    ]
    rules = RULES.format(**vars(given), join=JOIN_MS, heartbeat=HEARTBEAT_MS, seeds=", ".join(map(str, seeds)))
    text = f"{harness.table([*header, 'CPU s', 'foreign CPU s'], rows)}\n\n{rules}"
    given.earlier = len(earlier)
    record = {"conditions": conditions, "arguments": harness.arguments_of(given), "runs": runs}
    harness.write_report("recovery", title="Recovery from killed workers", text=text, record=record, folder=given.out)


if __name__ == "__main__":
    main()
