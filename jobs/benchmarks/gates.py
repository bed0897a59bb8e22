"""How often the gates pass what is worse by their margin, and refuse what is as good, on the noise of real runs.

    python jobs/benchmarks/gates.py --runs FOLDER [--study FOLDER] [--trials 2000] [--drift]

FOLDER holds trainings that differ in their seed alone (and their records); the study's folder a scaling study. Each
trial draws runs (or turns) with replacement, moves one side so that the truth is known, and asks the gate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scaleray.config.base import Target
from scaleray.data import ArraySource
from scaleray.data.described import columns_of
from scaleray.gates.answer import GateResult
from scaleray.gates.convergence import Learning, convergence_gate
from scaleray.gates.drift import data_gate, speed_gate
from scaleray.gates.policy import ConvergencePolicy, DriftPolicy, ScalingPolicy
from scaleray.gates.scaling import scaling_gate
from scaleray.launch.gate.evidence import learning
from scaleray.records.read import FILE, read_record
from scaleray.records.run import RunRecord
from scaleray.records.study import StudyRecord
from scaleray.scaling.curves.efficiency import curve_points
from scaleray.tracking.find_record import find_run

STEPS = 40
"""Steps of a turn that are kept, evenly over it: what turns differ by counts, and bootstraps of long ones take long."""
Draw = Callable[[np.random.Generator], GateResult]


def rates(draw: Draw, *, trials: int, seed: int) -> dict[str, float]:
    """Share of each answer."""
    random = np.random.default_rng(seed)
    found = Counter(draw(random).answer for _ in range(trials))
    return {answer: found[answer] / trials for answer in ("pass", "fail", "inconclusive")}


def pool_of(folder: Path, target: Target) -> list[Learning]:
    """How each training in the folder learned; those that never reached the target are left out, and counted."""
    runs = [learning(find_run(str(path.parent)), target, None) for path in sorted(folder.glob(f"*/{FILE}"))]
    reached = [run for run in runs if run.samples_to_target is not None]
    print(f"{len(runs)} trainings, {len(reached)} reached {target}")
    efforts = [run.samples_to_target for run in reached if run.samples_to_target is not None]
    print(f"samples to it: mean {statistics.mean(efforts):.0f}, standard deviation {statistics.stdev(efforts):.0f}, "
          f"evaluations {reached[0].every_samples:.0f} apart")  # fmt: skip
    return reached


def convergence(pool: list[Learning], target: Target, policy: ConvergencePolicy, number: int, *, effort: float,
                value: float) -> Draw:  # fmt: skip
    """Trials of the gate `convergence`. effort: true samples of the candidate over the baseline's; value: by how much
    its metric is truly worse."""
    worse = -value if target.comparison == ">=" else value
    assert all(run.value is not None for run in pool)

    def draw(random: np.random.Generator) -> GateResult:
        sides = [[pool[i] for i in random.integers(len(pool), size=number)] for _ in range(2)]
        candidates = [
            dataclasses.replace(run, samples_to_target=run.samples_to_target * effort, value=run.value + worse)  # type: ignore[operator]
            for run in sides[0]
        ]
        return convergence_gate(candidates, sides[1], target=target, policy=policy)

    return draw


def scaling(study: StudyRecord, policy: ScalingPolicy, *, efficiency: float, turns: int) -> Draw:
    """Trials of the gate `scaling` on the largest point of the study, whose true efficiency is given: turns are drawn
    with replacement, those of the larger point with their time scaled."""
    curve = next(one for one in study.curves if one.mode == policy.mode)
    base, largest = curve.points[0].point, curve.points[-1].point
    pooled = [statistics.median(step for turn in one.turns for step in turn) for one in (base, largest)]
    factor = pooled[0] * base.workers / largest.workers / efficiency / pooled[1]

    def draw(random: np.random.Generator) -> GateResult:
        points = [
            dataclasses.replace(
                one,
                turns=[
                    [step * scale for step in one.turns[i][:: len(one.turns[i]) // STEPS or 1]]
                    for i in random.integers(len(one.turns), size=turns)
                ],
                rounds=[],
                marks=[],
            )
            for one, scale in ((base, 1.0), (largest, factor))
        ]
        drawn = dataclasses.replace(study, curves=[dataclasses.replace(curve, points=curve_points(points))])
        return scaling_gate(drawn, workers=largest.workers, policy=policy)

    return draw


def speed(pool: list[RunRecord], policy: DriftPolicy, *, number: int, slower: float) -> Draw:
    """Trials of drift's gate `speed`: `number` runs of today, whose samples truly take so much longer, against five."""

    def draw(random: np.random.Generator) -> GateResult:
        today, then = ([pool[i] for i in random.integers(len(pool), size=size)] for size in (number, 5))
        changed = [dataclasses.replace(run, samples_per_s=(run.samples_per_s or 0) / (1 + slower)) for run in today]
        return speed_gate(changed, then, policy=policy)

    return draw


def data(pool: list[RunRecord], policy: DriftPolicy, *, rows: int, shift: float) -> Draw:
    """Trials of drift's gate `data` on rows of the digits, of which those of today are moved by so many standard
    deviations of their means."""
    from sklearn.datasets import load_digits

    images = load_digits().data / 16
    moved = shift * float(images.mean(axis=1).std(ddof=1))

    def draw(random: np.random.Generator) -> GateResult:
        sides = [images[random.integers(len(images), size=rows)] + by for by in (moved, 0.0)]
        facts = [{"x": {"rows": rows, "columns": columns_of(ArraySource({"image": side}))}} for side in sides]
        today, then = (dataclasses.replace(pool[0], data=one) for one in facts)
        return data_gate([today], [then], policy=policy)

    return draw


def drift_rows(folder: Path, show: Callable[[str, str, int, Draw], None]) -> None:
    """Print the rows of drift's gates. show: prints one."""
    found = [read_record(path.parent) for path in sorted(folder.glob(f"*/{FILE}"))]
    pool = [run for run in found if isinstance(run, RunRecord) and run.samples_per_s]
    speeds = [run.samples_per_s or 0.0 for run in pool]
    print(
        f"{len(pool)} speeds, standard deviation {statistics.stdev(speeds) / statistics.mean(speeds):.1%} of the mean"
    )
    limit = DriftPolicy()
    for number in (3, 5):
        for slower in (0.0, limit.margin_slower, 2 * limit.margin_slower):
            show("speed", f"{slower:.0%} slower", number, speed(pool, limit, number=number, slower=slower))
    for shift in (0.0, limit.margin_shift, 2 * limit.margin_shift):
        show("data", f"mean moved by {shift:g} deviations", 1000, data(pool, limit, rows=1000, shift=shift))


def main() -> None:
    """Simulate and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--study", type=Path)
    parser.add_argument("--target", type=Target.parse, default=Target.parse("test/accuracy >= 0.95"))
    parser.add_argument("--margin", type=float, default=0.2)
    parser.add_argument("--metric-margin", type=float, default=0.02)
    parser.add_argument("--numbers", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drift", action="store_true", help="the gates of drift alone")
    options = parser.parse_args()
    policy = ConvergencePolicy(margin=options.margin, metric_margin=options.metric_margin, not_faster_than_chance=False)
    both = policy.model_copy(update={"not_faster_than_chance": True})
    print("| gate | truth | runs or turns | pass | fail | inconclusive |\n|---|---|---|---|---|---|")

    def show(gate: str, truth: str, number: int, draw: Draw, trials: int = options.trials) -> None:
        share = rates(draw, trials=trials, seed=options.seed)
        print(
            f"| {gate} | {truth} | {number} | " + " | ".join(f"{100 * share[a]:.1f} %" for a in share) + " |",
            flush=True,
        )

    if options.drift:
        drift_rows(options.runs, show)
        return
    pool = pool_of(options.runs, options.target)
    at = 1 + options.margin
    for number in options.numbers:
        one = lambda n=number, rule=both, **truth: convergence(pool, options.target, rule, n, **truth)
        show("convergence", "as good", number, one(effort=1.0, value=0.0))
        show("convergence", f"{options.margin:.0%} more samples", number, one(rule=policy, effort=at, value=0.0))
        show(
            "convergence",
            f"{options.metric_margin:g} worse at the end",
            number,
            one(effort=1.0, value=options.metric_margin),
        )
        show(
            "convergence",
            f"{2 * options.margin:.0%} more samples",
            number,
            one(effort=1 + 2 * options.margin, value=0.0),
        )
    if options.study:
        study = read_record(options.study)
        assert isinstance(study, StudyRecord), json.dumps(str(options.study))
        limit = ScalingPolicy()
        for turns in (3, 5):
            for efficiency in (limit.min_efficiency, limit.min_efficiency + 0.2):
                draw = scaling(study, limit, efficiency=efficiency, turns=turns)
                show("scaling", f"efficiency {efficiency:g}, asked {limit.min_efficiency:g}", turns, draw)


if __name__ == "__main__":
    main()
