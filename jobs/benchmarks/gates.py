"""How often the gates pass what is worse by their margin, and refuse what is as good, on the noise of real runs.

    python jobs/benchmarks/gates.py --runs FOLDER --study FOLDER [--train 24] [--trials 2000] [--only GATE ...]

FOLDER of `--runs` holds trainings that differ in their seed alone; `--train` makes those of the digits that it lacks (one
worker, an evaluation after every step). The study's folder is that of a scaling study. Each trial draws runs (or turns)
with replacement, moves one side so that the truth is known, and asks the gate. Rows go to a page and a JSON file under
`results/`; with `--only` those of other gates stay as they are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import scaleray
from scaleray.config.base import Target
from scaleray.data import ArraySource
from scaleray.data.described import columns_of
from scaleray.data.ragged import Ragged
from scaleray.gates import compared, operations
from scaleray.gates import scaling as scaling_gates
from scaleray.gates.answer import GateResult
from scaleray.gates.convergence import Learning, convergence_gate
from scaleray.gates.drift import data_gate, speed_gate
from scaleray.gates.operations import Operated, operations_gate
from scaleray.gates.policy import ConvergencePolicy, DriftPolicy, OperationsPolicy, ScalingPolicy
from scaleray.gates.scaling import scaling_gate
from scaleray.launch.gate.evidence import learning
from scaleray.records.read import FILE, read_record
from scaleray.records.run import RunRecord
from scaleray.records.study import StudyRecord
from scaleray.scaling.curves.efficiency import curve_points
from scaleray.tracking.find_record import find_run

STEPS = 8
"""Steps of a turn that are kept, evenly over it: what turns differ by counts, and bootstraps of long ones take long."""
TARGET = Target.parse("test/accuracy >= 0.95")
MARGIN, METRIC_MARGIN = 0.2, 0.02
QUIET = 0.05
"""Standard deviation of the logarithm to which noise is scaled, for machines of one's own."""
RESULTS = Path(__file__).parent / "results"
Draw = Callable[[np.random.Generator], GateResult]
Row = tuple[str, str, str, Draw]
"""Gate, truth, number of runs or turns, and what draws a trial."""


def rates(draw: Draw, *, trials: int, seed: int) -> dict[str, float]:
    """Share of each answer."""
    random = np.random.default_rng(seed)
    found = Counter(draw(random).answer for _ in range(trials))
    return {answer: found[answer] / trials for answer in ("pass", "fail", "inconclusive")}


def interval(share: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was counted."""
    z = 1.96
    middle, half = share + z**2 / 2 / trials, z * math.sqrt(share * (1 - share) / trials + z**2 / 4 / trials**2)
    return (middle - half) / (1 + z**2 / trials), (middle + half) / (1 + z**2 / trials)


def train(folder: Path, number: int) -> None:
    """The trainings of the digits that a folder lacks, one after the other."""
    for seed in range(number):
        if (folder / f"seed-{seed}" / FILE).is_file():
            continue
        words = ["train", "-c", "jobs/digits.yaml", "--local", "--evaluation.every", "1 steps", "--seed", str(seed),
                 "--checkpoint.storage-path", str(folder), "--tracking.run-name", f"seed-{seed}",
                 "--tracking.uri", f"sqlite:///{folder.absolute().parent}/mlflow.db"]  # fmt: skip
        subprocess.run([sys.executable, "-m", "scaleray", *words], check=True)


def convergence_rows(folder: Path, notes: list[str]) -> Iterator[Row]:
    """The gate `convergence`, asked for not worse and for equal."""
    runs = [learning(find_run(str(path.parent)), TARGET, None) for path in sorted(folder.glob(f"*/{FILE}"))]
    pool = [run for run in runs if run.samples_to_target is not None]
    efforts = [run.samples_to_target for run in pool if run.samples_to_target is not None]
    notes.append(
        f"convergence: {len(runs)} trainings, {len(pool)} reached {TARGET} after {statistics.mean(efforts):.0f} samples "
        f"(standard deviation {statistics.stdev(efforts):.0f}, evaluations {pool[0].every_samples:.0f} apart); margins "
        f"{MARGIN:.0%} of the samples and {METRIC_MARGIN:g} of the last value"
    )
    base = ConvergencePolicy(margin=MARGIN, metric_margin=METRIC_MARGIN)
    alone = base.model_copy(update={"not_faster_than_chance": False})
    for number in (5, 10):
        for truth, effort, value, policy in (
            ("as good", 1.0, 0.0, base),
            ("as good, without MLPerf's test", 1.0, 0.0, alone),
            (f"{MARGIN:.0%} more samples", 1 + MARGIN, 0.0, alone),
            (f"{METRIC_MARGIN:g} worse at the end", 1.0, METRIC_MARGIN, alone),
            (f"{2 * MARGIN:.0%} more samples", 1 + 2 * MARGIN, 0.0, alone),
        ):
            yield "convergence", truth, f"{number}", _learned(pool, policy, number, effort=effort, value=value)
    equal = alone.model_copy(update={"ask_for": "equal"})
    for number in (5, 10, 20):
        for truth, effort in (("as good", 1.0), (f"{MARGIN:.0%} more samples", 1 + MARGIN),
                              (f"{MARGIN:.0%} fewer samples", 1 - MARGIN)):  # fmt: skip
            yield "convergence, equal", truth, f"{number}", _learned(pool, equal, number, effort=effort, value=0.0)


def _learned(pool: list[Learning], policy: ConvergencePolicy, number: int, *, effort: float, value: float) -> Draw:
    worse = -value if TARGET.comparison == ">=" else value

    def draw(random: np.random.Generator) -> GateResult:
        sides = [[pool[i] for i in random.integers(len(pool), size=number)] for _ in range(2)]
        candidates = [
            dataclasses.replace(run, samples_to_target=run.samples_to_target * effort, value=run.value + worse)  # type: ignore[operator]
            for run in sides[0]
        ]
        return convergence_gate(candidates, sides[1], target=TARGET, policy=policy)

    return draw


def scaling_rows(folder: Path, notes: list[str]) -> Iterator[Row]:
    """The gate `scaling` on the turns of a study, as they were and with their noise scaled down."""
    study = read_record(folder)
    assert isinstance(study, StudyRecord)
    policy = ScalingPolicy()
    curve = next(one for one in study.curves if one.mode == policy.mode)
    largest = curve.points[-1].point
    medians = [math.log(statistics.median(turn)) for turn in largest.turns]
    spread = statistics.stdev(medians)
    notes.append(
        f"scaling: {len(medians)} turns of 1 and {largest.workers} workers of the digits; medians of turns of the larger "
        f"size differ by {spread:.0%} (standard deviation of the logarithm), scaled to {QUIET:.0%} where a row says quiet"
    )
    for quiet, scale in (("", 1.0), (", quiet", QUIET / spread)):
        for turns in (3, 5):
            for efficiency in (policy.min_efficiency, 0.9):
                truth = f"efficiency {efficiency:g}, asked {policy.min_efficiency:g}{quiet}"
                yield "scaling", truth, f"{turns}", _scaled(study, policy, efficiency, turns, scale)


def _scaled(study: StudyRecord, policy: ScalingPolicy, efficiency: float, turns: int, scale: float) -> Draw:
    """Trials on the largest point of the study, whose true efficiency is given: turns are drawn with replacement, those
    of the larger point with their time scaled. scale: factor of the noise, as of its logarithm."""
    curve = next(one for one in study.curves if one.mode == policy.mode)
    points = [curve.points[0].point, curve.points[-1].point]
    logs = [[np.log(turn[:: len(turn) // STEPS or 1]) for turn in one.turns] for one in points]
    # what the truth is of: the median over all steps, of which drawn turns are a sample
    middle = [float(np.median(np.concatenate(one))) for one in logs]
    ratio = math.log(points[0].workers / points[1].workers / efficiency)

    def draw(random: np.random.Generator) -> GateResult:
        drawn = []
        for point, turned, center, moved in zip(points, logs, middle, (0.0, ratio), strict=True):
            chosen = [turned[i] for i in random.integers(len(turned), size=turns)]
            steps = [list(np.exp(scale * (one - center) + moved)) for one in chosen]
            drawn.append(dataclasses.replace(point, turns=steps, rounds=[], marks=[]))
        record = dataclasses.replace(study, curves=[dataclasses.replace(curve, points=curve_points(drawn))])
        return scaling_gate(record, workers=points[1].workers, policy=policy)

    return draw


def operations_rows(folder: Path, notes: list[str]) -> Iterator[Row]:
    """The goodput of `operations`, whose mean is moved beside a limit."""
    pool = [run for run in _records(folder) if run.profile and run.profile.goodput]
    shares = [run.profile.goodput.shares()["productive"] for run in pool if run.profile and run.profile.goodput]
    mean, limit = statistics.mean(shares), 0.5
    spread = statistics.stdev(shares) / mean
    notes.append(f"operations: goodput of {len(pool)} trainings, which differ by {spread:.0%} of their mean")
    for number in (3, 5):
        for truth, to in (
            ("goodput at the limit", limit),
            ("20 % above it", 1.2 * limit),
            ("20 % below it", 0.8 * limit),
        ):

            def draw(random: np.random.Generator, to: float = to, number: int = number) -> GateResult:
                chosen = random.integers(len(pool), size=number)
                runs = [_with_goodput(pool[i], shares[i] * to / mean) for i in chosen]
                policy = OperationsPolicy(min_goodput=limit, no_alerts_of=())
                return operations_gate([Operated(run) for run in runs], policy=policy)

            yield "operations, goodput", truth, f"{number}", draw


def _with_goodput(run: RunRecord, share: float) -> RunRecord:
    assert run.profile is not None and run.profile.goodput is not None
    goodput = dataclasses.replace(run.profile.goodput, elapsed_s=1.0, seconds={"productive": share})
    return dataclasses.replace(run, status="FINISHED", profile=dataclasses.replace(run.profile, goodput=goodput))


def speed_rows(folder: Path, notes: list[str]) -> Iterator[Row]:
    """The gate `speed` of drift, with the noise as it was and scaled down."""
    pool, policy = [run for run in _records(folder) if run.samples_per_s], DriftPolicy()
    logs = np.log([run.samples_per_s or 1.0 for run in pool])
    spread = float(logs.std(ddof=1))
    notes.append(
        f"drift, speed: {len(pool)} trainings, whose speeds differ by {spread:.0%} (standard deviation of the logarithm), "
        f"scaled to {QUIET:.0%} where a row says quiet; margin {policy.margin_slower:.0%}"
    )
    for quiet, scale in (("", 1.0), (", quiet", QUIET / spread)):
        times = np.exp(-scale * (logs - logs.mean()))
        for today, then in ((3, 5), (3, 10), (5, 5)):
            for slower in (0.0, policy.margin_slower, 2 * policy.margin_slower):

                def draw(
                    random: np.random.Generator,
                    times: np.ndarray = times,
                    sizes: tuple[int, int] = (today, then),
                    factors: tuple[float, float] = (1 + slower, 1.0),
                ) -> GateResult:
                    sides = [
                        [dataclasses.replace(pool[0], samples_per_s=1 / (times[i] * by))
                         for i in random.integers(len(times), size=size)]
                        for size, by in zip(sizes, factors, strict=True)
                    ]  # fmt: skip
                    return speed_gate(sides[0], sides[1], policy=policy)

                truth = f"{slower:.0%} slower{quiet}" if slower else f"as fast{quiet}"
                yield "drift, speed", truth, f"{today}, {then}", draw


def _tokens(random: np.random.Generator, rows: int, by: float) -> Ragged:
    lengths = np.clip(random.normal(200 + 80 * by, 80, rows), 1, None).astype(int)
    return Ragged(random.integers(50_000, size=lengths.sum()), np.concatenate([[0], np.cumsum(lengths)]))


KINDS: dict[str, Callable[[np.random.Generator, int, float], Any]] = {
    "normal": lambda random, rows, by: random.normal(size=rows) + by,
    "log-normal": lambda random, rows, by: np.exp(random.normal(size=rows) + by),
    "ages": lambda random, rows, by: np.clip(random.normal(40 + 15 * by, 15, rows), 0, 99).astype(int),
    "counts of mean 3": lambda random, rows, by: random.poisson(3 + math.sqrt(3) * by, rows),
    "counts of mean 20": lambda random, rows, by: random.poisson(20 + math.sqrt(20) * by, rows),
    "labels, one of 1 in 1,000": lambda random, rows, by: _labels(random, rows, by),
    "floats, 1 in 1,000 missing": lambda random, rows, by: _with_missing(random, rows, by),
    "texts": lambda random, rows, by: np.array(["w" * n for n in _tokens(random, rows, by).lengths]),
    "images": lambda random, rows, by: (
        random.normal(size=(rows, 8, 8)) + (random.normal(size=rows) + by)[:, None, None]
    ),
    "tokens": _tokens,
}
"""Columns of rows that have moved by so many of their standard deviations, or lengths."""


def _labels(random: np.random.Generator, rows: int, by: float) -> np.ndarray:
    """Five labels and a rare one; as many rows as move below the median of a normal column get a new label."""
    found = np.where(random.random(rows) < 0.001, 7, random.integers(5, size=rows))
    return np.where(random.random(rows) < math.erf(by / 2 / math.sqrt(2)) / 2, 8, found)


def _with_missing(random: np.random.Generator, rows: int, by: float) -> np.ndarray:
    return np.where(random.random(rows) < 0.001, np.nan, random.normal(size=rows) + by)


def data_rows(folder: Path, notes: list[str]) -> Iterator[Row]:
    """The gate `data` of drift on columns of all kinds at once, and on each of them as it moves."""
    run, policy = _records(folder)[0], DriftPolicy()
    notes.append(
        f"drift, data: columns {', '.join(KINDS)}; shares of rows may differ by {policy.margin_shares:g}, and "
        f"{policy.max_new:.0%} may be new"
    )

    def drawn(kinds: Sequence[str], rows: int, runs: int, by: float) -> Draw:
        def draw(random: np.random.Generator) -> GateResult:
            then, *today = (
                columns_of(ArraySource({name: KINDS[name](random, rows, moved) for name in kinds}, allows_text=True))
                for moved in (0.0, *[by] * runs)
            )
            records = [
                dataclasses.replace(run, data={"x": {"rows": rows, "columns": facts}}) for facts in (then, *today)
            ]
            return data_gate(records[1:], records[:1], policy=policy)

        return draw

    for rows in (400, 1000, 3000):
        for runs in (1, 5):
            yield (
                "drift, data",
                f"all {len(KINDS)} kinds as they were, {runs} runs",
                f"{rows} rows",
                drawn(list(KINDS), rows, runs, 0.0),
            )
    for by in (0.25, 0.38, 0.5, 0.75):
        for kind in KINDS:
            yield "drift, data", f"{kind}, moved by {by:g} deviations", "3000 rows", drawn([kind], 3000, 1, by)


def _records(folder: Path) -> list[RunRecord]:
    found = [read_record(path.parent) for path in sorted(folder.glob(f"*/{FILE}"))]
    return [run for run in found if isinstance(run, RunRecord)]


def skip_what_changes_no_answer() -> None:
    """Leave out the power and the runs that it takes, which cost most of a trial's time and decide nothing."""
    compared.power = compared.power_of_both = lambda *sides, **more: math.nan  # type: ignore[assignment]
    compared.runs_needed = lambda enough: None
    for gate in (scaling_gates, operations):
        gate.power_above, gate.runs_needed_above = (lambda *more: math.nan), (lambda *more: None)  # type: ignore[attr-defined]


def page(found: dict[str, dict]) -> str:
    """The results as Markdown."""
    lines = ["# How often the gates err", "", "`python jobs/benchmarks/gates.py --runs FOLDER --study FOLDER`", ""]
    lines += [f"On {os.cpu_count()} cores, with scaleray {scaleray.__version__}.", ""]
    lines += [f"- {note}" for part in found.values() for note in part["notes"]]
    lines += ["", "In brackets: Wilson's 95 % interval of the share that was counted, in %.", ""]
    lines += ["| gate | truth | runs of each side, or turns | trials | pass | fail | inconclusive |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for part in found.values():
        for row in part["rows"]:
            shares = []
            for answer in ("pass", "fail", "inconclusive"):
                low, high = interval(row[answer], row["trials"])
                shares.append(f"{100 * row[answer]:.1f} % ({100 * max(low, 0):.1f} to {100 * min(high, 1):.1f})")
            lines.append(
                f"| {row['gate']} | {row['truth']} | {row['number']} | {row['trials']} | {' | '.join(shares)} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train what lacks, simulate, and write page and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--study", type=Path)
    parser.add_argument("--train", type=int, default=0, help="number of trainings that the folder is to hold")
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="GATE")
    parser.add_argument("--out", type=Path, default=RESULTS / f"gates-{time.strftime('%Y-%m-%d')}.md")
    options = parser.parse_args()
    train(options.runs, options.train)
    skip_what_changes_no_answer()
    parts = {"convergence": convergence_rows, "operations": operations_rows, "speed": speed_rows, "data": data_rows}
    asked: dict[str, tuple] = {name: (rows, options.runs) for name, rows in parts.items()}
    if options.study:
        asked["scaling"] = (scaling_rows, options.study)
    for name, (rows, folder) in asked.items():
        if options.only and name not in options.only:
            continue
        notes: list[str] = []
        done = []
        for gate, truth, number, draw in rows(folder, notes):
            shares = rates(draw, trials=options.trials, seed=options.seed)
            done.append({"gate": gate, "truth": truth, "number": number, "trials": options.trials, **shares})
            print(done[-1], flush=True)
        kept = options.out.with_suffix(".json")
        found = json.loads(kept.read_text()) if kept.is_file() else {}
        found[name] = {"notes": notes, "rows": done}
        ordered = {
            part: found[part] for part in ("convergence", "scaling", "operations", "speed", "data") if part in found
        }
        kept.write_text(json.dumps(ordered, indent=1) + "\n")
        options.out.write_text(page(ordered))


if __name__ == "__main__":
    main()
