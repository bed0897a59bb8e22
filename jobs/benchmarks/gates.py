"""How often the gates pass what is worse by just their margin, and how often they pass what is as good.

    python jobs/benchmarks/gates.py [--trials 10000] [--only GATE ...]

Each trial draws runs, turns or rows whose truth is known and asks the real gate. Noise is normal, skewed (exponential
to either side, log-normal), autocorrelated (neighbours correlate by 0.3) and unequal: deviations of 1 to 5, numbers of
3 to 30. Rows go to a page and a JSON file under `results/`; with `--only` those of other gates stay as they are there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import scaleray
from scaleray.config.base import Target
from scaleray.data import ArraySource
from scaleray.data.column_distributions import columns_of
from scaleray.data.ragged import Ragged
from scaleray.records.gate_answer import Check, GateResult
from scaleray.release.gates import compared, drift, operations
from scaleray.release.gates import scaling as scaling_gates
from scaleray.release.gates.convergence import Learning, convergence_gate
from scaleray.release.gates.drift import data_gate, speed_gate
from scaleray.release.gates.operations import operations_gate
from scaleray.release.gates.policy import ConvergencePolicy, DriftPolicy, OperationsPolicy, ScalingPolicy
from scaleray.release.gates.scaling import scaling_gate
from scaleray.studies.curves.efficiency import curve_points

RESULTS = Path(__file__).parent / "results"
CORRELATION = 0.3
"""Correlation of neighbours that are autocorrelated: runs, turns, rows, evaluations."""
MARGIN = "at the margin"
TARGET = Target.parse("test/accuracy >= 0.95")
Random = np.random.Generator
Draw = Callable[[Random], GateResult]


@dataclass(frozen=True)
class Row:
    """A truth of which trials are drawn. sides: numbers, and deviations if those differ; cost: of a trial, by which
    the number of trials is divided."""

    gate: str
    truth: str
    noise: str
    sides: str
    draw: Draw
    cost: int = 1


def successive(random: Random, number: int) -> np.ndarray:
    """Normal noise of which neighbours correlate by CORRELATION."""
    found = random.normal(size=number)
    for one in range(1, number):
        found[one] = CORRELATION * found[one - 1] + math.sqrt(1 - CORRELATION**2) * found[one]
    return found


NOISES: dict[str, Callable[[Random, int], np.ndarray]] = {
    "normal": lambda random, number: random.normal(size=number),
    "exponential": lambda random, number: random.exponential(size=number) - 1,
    "exponential, to the good side": lambda random, number: 1 - random.exponential(size=number),
    "log-normal": lambda random, number: (np.exp(random.normal(0, 0.5, number)) - math.exp(0.125)) / 0.6039,
    "autocorrelated": successive,
}
"""Noise of mean 0 and deviation 1, of which large values are bad."""
SIDES = {
    "5 and 5": ((5, 1.0), (5, 1.0)),
    "5 and 5, the candidate's deviation 5 times as large": ((5, 5.0), (5, 1.0)),
    "5 and 5, the baseline's deviation 5 times as large": ((5, 1.0), (5, 5.0)),
    "3 and 30": ((3, 1.0), (30, 1.0)),
    "30 and 3": ((30, 1.0), (3, 1.0)),
    "3 and 30, the candidate's deviation 5 times as large": ((3, 5.0), (30, 1.0)),
    "20 and 20": ((20, 1.0), (20, 1.0)),
}
"""Number and relative deviation of the candidate's runs and of the baseline's."""


def cost_of(noise: str, sides: str) -> int:
    """1 for what passes most often, which takes many trials to be told from 5 %."""
    return 1 if noise == "autocorrelated" or ("exponential" in noise and "5 times" in sides) else 5


def rates(row: Row, *, trials: int, seed: int) -> dict[str, Any]:
    """Share of each answer."""
    random = np.random.default_rng(seed)
    found = Counter(row.draw(random).answer for _ in range(trials))
    return {"trials": trials, **{answer: found[answer] / trials for answer in ("pass", "fail", "inconclusive")}}


def interval(share: float, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was counted."""
    z = 1.96
    middle, half = share + z**2 / 2 / trials, z * math.sqrt(share * (1 - share) / trials + z**2 / 4 / trials**2)
    return (middle - half) / (1 + z**2 / trials), (middle + half) / (1 + z**2 / trials)


def convergence_rows() -> Iterator[Row]:
    """The gate `convergence`: samples to the target, and the last value."""
    policy = ConvergencePolicy(margin=0.2, metric_margin=0.02, min_runs=3)
    for sides, pair in SIDES.items():
        for noise in NOISES:
            if noise != "autocorrelated":  # other seeds, so that runs are independent
                cost, draw = cost_of(noise, sides), _learned(policy, noise, pair, more=0.2)
                yield Row("convergence, samples", MARGIN, noise, sides, draw, cost)
                if sides.startswith("5 and 5"):
                    draw = _learned(policy, noise, pair, worse=0.02)
                    yield Row("convergence, last value", MARGIN, noise, sides, draw, cost)
    evaluated = "autocorrelated evaluations"
    yield Row("convergence, samples", MARGIN, evaluated, "5 and 5", _crossed(policy, 5, more=0.2))
    for number in (5, 10, 20):
        pair, sides = ((number, 1.0), (number, 1.0)), f"{number} and {number}"
        for noise in ("normal", "exponential"):
            yield Row("convergence, samples", "as good, deviation 10 %", noise, sides, _learned(policy, noise, pair), 5)
            worse = _learned(policy, noise, pair, more=0.4)
            yield Row("convergence, samples", "40 % more samples, deviation 10 %", noise, sides, worse, 5)


def _learned(
    policy: ConvergencePolicy, noise: str, pair: tuple[tuple[int, float], ...], *, more: float = 0.0, worse: float = 0.0
) -> Draw:
    """Trials of runs that differ by `noise`: the logarithm of their samples by 10 %, or their last value by 0.01 if
    that is what is `worse`; the other one of both hardly differs."""
    of_samples, of_value = (0.001, 0.01) if worse else (0.1, 0.0001)

    def draw(random: Random) -> GateResult:
        sides = [
            [
                Learning(math.exp(7.6 + by + of_samples * size * bad), 0.97 - less - of_value * size * bad, 1.0)
                for bad in NOISES[noise](random, number)
            ]
            for (number, size), by, less in zip(pair, (math.log1p(more), 0.0), (worse, 0.0), strict=True)
        ]
        return convergence_gate(sides[0], sides[1], target=TARGET, policy=policy)

    return draw


def _crossed(policy: ConvergencePolicy, number: int, *, more: float) -> Draw:
    """Trials of runs whose accuracy is evaluated every 64 samples with autocorrelated noise until it is enough."""
    random = np.random.default_rng(0)
    at = 64.0 * np.arange(1, 80)
    pool = []
    for _ in range(4000):
        curve = 1 - 0.6 * np.exp(-at / (825 * math.exp(0.1 * random.normal()))) + 0.004 * successive(random, len(at))
        if (curve >= TARGET.value).any():
            pool.append(at[(curve >= TARGET.value).argmax()])

    def draw(random: Random) -> GateResult:
        sides = [
            [Learning(float(one) * by, 0.97, 64.0) for one in random.choice(pool, size=number)] for by in (1 + more, 1)
        ]
        return convergence_gate(sides[0], sides[1], target=TARGET, policy=policy)

    return draw


def scaling_rows() -> Iterator[Row]:
    """The gate `scaling`: the efficiency of 4 workers, in turns of 6 steps that correlate."""
    limit = ScalingPolicy().min_efficiency
    pairs = {
        "3 and 3": ((3, 0.05), (3, 0.05)),
        "5 and 5": ((5, 0.05), (5, 0.05)),
        "5 and 5, of 4 workers the deviation 5 times as large": ((5, 0.01), (5, 0.05)),
        "5 and 5, of 1 worker the deviation 5 times as large": ((5, 0.05), (5, 0.01)),
        "3 and 30": ((3, 0.05), (30, 0.05)),
    }
    for sides, pair in pairs.items():
        for noise in ("normal", "exponential", "exponential, to the good side", "autocorrelated"):
            yield Row("scaling", MARGIN, noise, sides, _scaled(limit, noise, pair), 20)
    for sides in ("3 and 3", "5 and 5"):
        for efficiency in (0.8, 0.9):
            truth = f"efficiency {efficiency:g}, asked {limit:g}, deviation 5 %"
            yield Row("scaling", truth, "normal", sides, _scaled(efficiency, "normal", pairs[sides]), 20)


def _scaled(efficiency: float, noise: str, pair: tuple[tuple[int, float], ...]) -> Draw:
    """Trials of turns of 1 and 4 workers. The truth is of medians, which is what the study compares."""
    median = {"exponential": math.log(2) - 1, "exponential, to the good side": 1 - math.log(2)}.get(noise, 0.0)
    policy = ScalingPolicy()

    def draw(random: Random) -> GateResult:
        points = []
        for workers, (number, size), time_s in zip((1, 4), pair, (0.1, 0.1 / 4 / efficiency), strict=True):
            turns = [
                [time_s * math.exp(size * (bad - median) + 0.01 * step) for step in successive(random, 6)]
                for bad in NOISES[noise](random, number)
            ]
            points.append(SimpleNamespace(workers=workers, turns=turns, rounds=[], marks=[], global_batch_size=64))
        curve = SimpleNamespace(mode=policy.mode, points=curve_points(points))  # type: ignore[arg-type]
        study: Any = SimpleNamespace(name="a study", command="", curves=[curve])
        return scaling_gate(study, workers=4, policy=policy)

    return draw


def operations_rows() -> Iterator[Row]:
    """The goodput of `operations`: the mean of its candidates, with a deviation of 7 % of the limit."""
    for noise in NOISES:
        for number in (3, 5, 10, 30):
            yield Row(
                "operations, goodput",
                MARGIN,
                noise,
                f"{number}",
                _goodput(noise, number, 1.0),
                1 if noise == "exponential" else 5,
            )
    for number in (3, 5, 10):
        for noise in ("normal", "exponential"):
            yield Row("operations, goodput", "20 % above the limit, deviation 7 %", noise, f"{number}",
                      _goodput(noise, number, 1.2), 5)  # fmt: skip


def _goodput(noise: str, number: int, times: float) -> Draw:
    policy = OperationsPolicy(min_goodput=0.5, no_alerts_of=())

    def draw(random: Random) -> GateResult:
        runs: list[Any] = []
        for bad in NOISES[noise](random, number):
            shares = {"productive": 0.5 * (times - 0.07 * bad)}
            goodput = SimpleNamespace(shares=lambda shares=shares: shares)
            profile = SimpleNamespace(goodput=goodput)
            runs.append(SimpleNamespace(name="a run", status="FINISHED", nonfinite_steps=0, profile=profile))
        return operations_gate(runs, policy=policy)

    return draw


def speed_rows() -> Iterator[Row]:
    """The gate `speed` of drift: the logarithm of the time per sample."""
    slower = DriftPolicy().margin_slower
    for sides, pair in SIDES.items():
        for noise in NOISES:
            yield Row("drift, speed", MARGIN, noise, sides, _timed(noise, pair, slower, 0.05), cost_of(noise, sides))
    for size in (0.01, 0.05):
        for numbers in ((3, 5), (5, 5), (10, 10), (20, 20)):
            pair = tuple((number, 1.0) for number in numbers)
            sides = f"{numbers[0]} and {numbers[1]}"
            for truth, by in (("as fast", 0.0), (f"{2 * slower:.0%} slower", 2 * slower)):
                draw = _timed("normal", pair, by, size)
                yield Row("drift, speed", f"{truth}, deviation {size:.0%}", "normal", sides, draw, 5)


def _timed(noise: str, pair: tuple[tuple[int, float], ...], slower: float, deviation: float) -> Draw:
    policy = DriftPolicy()

    def draw(random: Random) -> GateResult:
        sides: list[Any] = [
            [SimpleNamespace(samples_per_s=1 / by / math.exp(deviation * size * bad))
             for bad in NOISES[noise](random, number)]
            for (number, size), by in zip(pair, (1 + slower, 1.0), strict=True)
        ]  # fmt: skip
        return speed_gate(sides[0], sides[1], policy=policy)

    return draw


def _tokens(random: Random, rows: int, by: float) -> Ragged:
    lengths = np.clip(random.normal(200 + 80 * by, 80, rows), 1, None).astype(int)
    return Ragged(random.integers(50_000, size=lengths.sum()), np.concatenate([[0], np.cumsum(lengths)]))


KINDS: dict[str, Callable[[Random, int, float], Any]] = {
    "normal": lambda random, rows, by: random.normal(size=rows) + by,
    "log-normal": lambda random, rows, by: np.exp(random.normal(size=rows) + by),
    "ages": lambda random, rows, by: np.clip(random.normal(40 + 15 * by, 15, rows), 0, 99).astype(int),
    "counts of mean 3": lambda random, rows, by: random.poisson(3 + math.sqrt(3) * by, rows),
    "counts of mean 20": lambda random, rows, by: random.poisson(20 + math.sqrt(20) * by, rows),
    "labels, one of 1 in 1,000": lambda random, rows, by: _labels(random, rows, by),
    "floats, 1 in 1,000 missing": lambda random, rows, by: _with_missing(random, rows, by, 0.001),
    "floats, 1 in 1,000 there": lambda random, rows, by: _with_missing(random, rows, 0.0, 0.999 - _largest(by)),
    "texts": lambda random, rows, by: np.array(["w" * n for n in _tokens(random, rows, by).lengths]),
    "images": lambda random, rows, by: (
        random.normal(size=(rows, 8, 8)) + (random.normal(size=rows) + by)[:, None, None]
    ),
    "tokens": _tokens,
}
"""Columns of rows that have moved by so many of their standard deviations, or lengths; of labels and columns that are
mostly missing, shares move."""
AT_MARGIN: dict[str, Callable[[Random, int, bool], Any]] = {
    "normal": lambda random, rows, is_today: random.normal(size=rows) + 0.3782 * is_today,
    "log-normal": lambda random, rows, is_today: np.exp(random.normal(size=rows) + 0.3782 * is_today),
    "exponential": lambda random, rows, is_today: random.exponential(size=rows) * (1.5077 if is_today else 1),
    "autocorrelated": lambda random, rows, is_today: successive(random, rows) + 0.3782 * is_today,
    "two labels": lambda random, rows, is_today: (random.random(rows) < 0.425 + 0.15 * is_today).astype(int),
    "a new label": lambda random, rows, is_today: np.where(
        random.random(rows) < 0.01 * is_today, 9, random.integers(5, size=rows)
    ),
    "a new label, autocorrelated": lambda random, rows, is_today: np.where(
        successive(random, rows) < -2.3263 - (0 if is_today else 99), 9, random.integers(5, size=rows)
    ),
    "not finite": lambda random, rows, is_today: np.where(
        random.random(rows) < 0.01 * is_today, np.nan, random.normal(size=rows)
    ),
}
"""Columns of which today's have shares that differ by 0.15, or a share of 0.01 that is new."""


def _labels(random: Random, rows: int, by: float) -> np.ndarray:
    """Five labels and a rare one; as many rows as move below the median of a normal column get a new label."""
    found = np.where(random.random(rows) < 0.001, 7, random.integers(5, size=rows))
    return np.where(random.random(rows) < _largest(by) / 2, 8, found)


def _with_missing(random: Random, rows: int, by: float, missing: float) -> np.ndarray:
    return np.where(random.random(rows) < missing, np.nan, random.normal(size=rows) + by)


def _largest(by: float) -> float:
    """Largest difference of shares of a normal column that moved."""
    return math.erf(by / 2 / math.sqrt(2))


def data_rows() -> Iterator[Row]:
    """The gate `data` of drift: each kind of column at the margin, all kinds at once as they were, and moved."""
    for kind in AT_MARGIN:
        for today, then in ((2000, 2000), (400, 2000), (2000, 400)):
            draw = _drifted([kind], lambda *given, kind=kind: AT_MARGIN[kind](*given), (today, then))
            yield Row("drift, data", MARGIN, kind, f"{today} and {then} rows", draw, 20)
    every = list(KINDS)
    for rows, runs in ((400, 1), (1000, 1), (3000, 1), (3000, 5)):
        draw = _drifted(every, None, (rows, rows), runs=runs)
        truth = f"all {len(every)} kinds as they were, {runs} run{'s' * (runs > 1)}"
        yield Row("drift, data", truth, "of its kind", f"{rows} and {rows} rows", draw, 50)
    for by in (0.25, 0.5, 0.75):
        for kind in KINDS:
            draw = _drifted(
                [kind],
                lambda random, rows, is_today, kind=kind, by=by: KINDS[kind](random, rows, by * is_today),
                (3000, 3000),
            )
            yield Row("drift, data", f"moved by {by:g} deviations", kind, "3000 and 3000 rows", draw, 200)


def _drifted(
    kinds: list[str], column: Callable[[Random, int, bool], Any] | None, sizes: tuple[int, int], *, runs: int = 1
) -> Draw:
    """Trials of runs of today against one of then. column: how each column is made; None: each kind as it was."""
    policy = DriftPolicy()

    def facts(random: Random, is_today: bool) -> Any:
        rows = sizes[0 if is_today else 1]
        columns = {kind: column(random, rows, is_today) if column else KINDS[kind](random, rows, 0.0) for kind in kinds}
        described = columns_of(ArraySource(columns, allows_text=True))
        return SimpleNamespace(name="a run", data={"x": {"rows": rows, "columns": described}})

    def draw(random: Random) -> GateResult:
        return data_gate([facts(random, True) for _ in range(runs)], [facts(random, False)], policy=policy)

    return draw


def skip_what_changes_no_answer() -> None:
    """Leave out the power and the runs that it takes, which cost most of a trial's time and decide nothing."""
    compared.power = compared.power_of_both = lambda *sides, **more: math.nan  # type: ignore[assignment]
    compared.runs_needed = lambda enough: None
    operations.power_above, operations.runs_needed_above = (lambda *more: math.nan), (lambda *more: None)
    scaling_gates._power, scaling_gates._turns_needed = (lambda *more: math.nan), (lambda *more: None)
    drift._same_hardware = lambda *sides: Check(what="the same hardware", answer="pass", words="")


def page(found: dict[str, list[dict[str, Any]]]) -> str:
    """The results as Markdown."""
    rows = [row for part in found.values() for row in part]
    at_margin = [row for row in rows if row["truth"] == MARGIN]
    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for row in at_margin:
        key = row["gate"], row["noise"]
        worst[key] = max(worst.get(key, row), row, key=lambda one: one["pass"])
    lines = ["# How often the gates err", "", "`python jobs/benchmarks/gates.py`", ""]
    lines += [f"With scaleray {scaleray.__version__}, one process on a machine of {os.cpu_count()} cores.", ""]
    lines += ["In brackets: Wilson's 95 % interval of the share that was counted, in %.", ""]
    lines += ["## Worse by just the margin: the sides of each noise that pass most often", ""]
    lines += [*table(list(worst.values()), ["gate", "noise", "sides", "trials"]), ""]
    lines += ["## Other truths", ""]
    others = [row for row in rows if row["truth"] != MARGIN]
    lines += [*table(others, ["gate", "truth", "noise", "sides", "trials"]), ""]
    lines += ["## Worse by just the margin: all", ""]
    return "\n".join([*lines, *table(at_margin, ["gate", "noise", "sides", "trials"]), ""])


def table(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Rows with these columns and the shares that pass and fail."""
    lines = [f"| {' | '.join(names)} | pass | fail |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        cells = [f"{row[name]:,}" if name == "trials" else row[name] for name in names]
        lines.append(f"| {' | '.join(cells)} | {shown(row, 'pass')} | {shown(row, 'fail')} |")
    return lines


def shown(row: dict[str, Any], answer: str) -> str:
    """A share with its interval."""
    low, high = interval(row[answer], row["trials"])
    return f"{100 * row[answer]:.1f} % ({100 * max(low, 0):.1f} to {100 * min(high, 1):.1f})"


def main() -> None:
    """Simulate, and write page and JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=10_000, help="of the cheapest rows; others have fewer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], metavar="GATE")
    parser.add_argument("--out", type=Path, default=RESULTS / f"gates-{time.strftime('%Y-%m-%d')}.md")
    options = parser.parse_args()
    skip_what_changes_no_answer()
    parts = {"convergence": convergence_rows, "scaling": scaling_rows, "operations": operations_rows,
             "speed": speed_rows, "data": data_rows}  # fmt: skip
    kept, ordered = options.out.with_suffix(".json"), {}
    for name, asked in parts.items():
        if options.only and name not in options.only:
            continue
        done, begun = [], time.process_time()
        for row in asked():
            shares = rates(row, trials=max(1, options.trials // row.cost), seed=options.seed)
            done.append({"gate": row.gate, "truth": row.truth, "noise": row.noise, "sides": row.sides, **shares})
            print(done[-1], flush=True)
        print(f"{name}: {time.process_time() - begun:.0f} s of processor time", flush=True)
        found = json.loads(kept.read_text()) if kept.is_file() else {}
        found[name] = done
        ordered = {part: found[part] for part in parts if part in found}
        kept.write_text(json.dumps(ordered, indent=1) + "\n")
        options.out.write_text(page(ordered))
    rows = [row for part in ordered.values() for row in part if row["truth"] == MARGIN]
    print(
        "may pass more often than 5 %:",
        *(row for row in rows if interval(row["pass"], row["trials"])[1] > 0.05),
        sep="\n",
    )


if __name__ == "__main__":
    main()
