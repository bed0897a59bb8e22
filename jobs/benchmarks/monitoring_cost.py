"""What watching a run costs a step: samples of a worker and their way to Ray's metrics, and what heartbeats tell of the
last steps.

One training, whose steps come in blocks of three kinds, in random order: a sample after every step, a telling of the last
steps after every step, neither. At every step either costs so much; at its own interval a step has its part of it. Exits
with 1 where a block did not do after each of its steps what its kind says, or where the aim is missed.

    python jobs/benchmarks/monitoring_cost.py [--pairs 60]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

from scaleray.common.callbacks import Callback
from scaleray.config.tracking_monitoring_study import MonitoringSettings
from scaleray.live.state.rank_series import rank_series
from scaleray.records.published import RankSample
from scaleray.training.profile.rank_samples import TOLD_EVERY_S, RankSamples
from scaleray.training.ray_metrics import RayMetrics
from scaleray.training.setup.rank_context import RankContext

AIM, STEP_S = 0.005, 0.008
WARM_UP, BLOCK, LEFT_OUT = 80, 24, 4
SAMPLES, TELLS, NEITHER = "samples", "tells", "neither"
INTERVALS = {
    SAMPLES: {"samples_s": 0.0, "told_s": math.inf},
    TELLS: {"samples_s": math.inf, "told_s": 0.0},
    NEITHER: {"samples_s": math.inf, "told_s": math.inf},
}
RULES = """\
A training of three layers of 1,100, 32 rows, one thread. Steps come in blocks of {block}, of which the first {left_out} are
left out; of each three blocks one takes after every step a sample, makes its series and sets them in Ray's metrics on
the training thread, one tells after every step of the last ones, and one does neither, in random order. Milliseconds of CPU
time of the training thread, medians of blocks; `more`: the median of {pairs} differences of blocks [95 % of 2,000 draws of
them anew]. In a run a sample is taken every {every_s:g} s, which a thread of its own publishes, and the last steps are told
of every {told_s:g} s. Counted: one sample in each step of the blocks with samples and none in the others, the same of
tellings. Left out: the marks of a step's parts and the hooks on arrivals, which a run has whether it is watched or not;
they are in what step_cost.py measures of the whole loop.
Load of the machine before: {before:.1f}, after: {after:.1f}. Aim: below {aim:.1%} of a step of {step_ms:g} ms."""


class Switches(Callback):
    """Begins a block after so many steps, and turns samples and tellings on or off for it."""

    def __init__(self) -> None:
        self.steps, self.draw, self.kinds = 0, random.Random(0), list(INTERVALS)
        self.blocks: list[tuple[int, str]] = []
        self.done: dict[str, Counter[int]] = {SAMPLES: Counter(), TELLS: Counter()}
        """What was done after which steps."""
        self.samples: RankSamples | None = None

    def on_step(self, run: Any) -> None:
        self.steps += 1
        if self.steps < WARM_UP or (self.steps - WARM_UP) % BLOCK:
            return
        turn = len(self.blocks) % len(self.kinds)
        if not turn:
            self.draw.shuffle(self.kinds)
        assert self.samples is not None
        self.samples.set_intervals(**INTERVALS[self.kinds[turn]])
        self.blocks.append((self.steps, self.kinds[turn]))

    def problems(self) -> list[str]:
        """Blocks that did not do what their kind says after each step that counts."""
        found = []
        for first, kind in self.blocks:
            steps = range(first + LEFT_OUT, first + BLOCK)
            for what, done in self.done.items():
                counts = {done[step] for step in steps}
                if counts != {int(what == kind)}:
                    found.append(f"block of {kind} at step {first}: {what} a step: {sorted(counts)}")
        return found


def measured(triples: int) -> tuple[dict[str, list[float]], list[float], int, list[str]]:
    """Milliseconds of a step in blocks by kind, of the making and setting of series alone, the number of series, and
    what was not as it should be."""
    sys.path.insert(0, str(Path(__file__).parent / "sides"))
    from steps import Toy, with_scaleray

    from scaleray.training.profile import profiler

    switches, metrics, published, count = Switches(), RayMetrics(), [], [0]

    class Watched(Toy):
        def callbacks(self) -> list[Callback]:
            return [switches]

    class Samples(RankSamples):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            switches.samples = self
            self._emit, self._heartbeat, self._tell = publish, self._tell, self._count

        def _count(self, recent: Any) -> None:
            switches.done[TELLS][switches.steps] += 1
            self._heartbeat(recent)

    def publish(message: Any) -> None:
        if isinstance(message, RankSample):
            begun = time.thread_time()
            series = rank_series(message, run_name="run", run_id="0123456789abcdef")
            metrics.publish(series)
            published.append(1e3 * (time.thread_time() - begun))
            count[0] = len(series)
            switches.done[SAMPLES][switches.steps] += 1

    profiler.RankSamples = Samples  # type: ignore[misc]
    toy = Watched(1100)
    with_scaleray(toy, RankContext(), clips=False, steps=WARM_UP + (3 * triples + 1) * BLOCK)
    switches.blocks = switches.blocks[: 3 * triples]
    times: dict[str, list[float]] = {kind: [] for kind in INTERVALS}
    for first, kind in switches.blocks:
        thread = np.diff(np.array(toy.at[first + LEFT_OUT : first + BLOCK])[:, 0] * 1e3)
        times[kind].append(float(np.median(thread)))
    return times, published, count[0], switches.problems()


def more_of(on: list[float], off: list[float]) -> tuple[float, float, float]:
    """Median of the differences, and the 95 % of it."""
    more = np.array(on) - np.array(off)
    draws = np.random.default_rng(0).integers(0, len(more), (2000, len(more)))
    low, high = np.percentile(np.median(more[draws], axis=1), [2.5, 97.5])
    return float(np.median(more)), float(low), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    conditions = harness.conditions(["torch", "numpy", "ray"])
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    times, published, num_series, problems = measured(arguments.pairs)
    if problems:
        print("\n".join([f"nothing was measured: {len(problems)} blocks were not as they should be", *problems[:5]]))
        return 1
    every_s = MonitoringSettings().every_s
    rules = RULES.format(
        block=BLOCK, left_out=LEFT_OUT, pairs=arguments.pairs, every_s=every_s, told_s=TOLD_EVERY_S, before=before,
        after=os.getloadavg()[0], aim=AIM, step_ms=1e3 * STEP_S,
    )  # fmt: skip
    header = ["after every step", "step with neither, ms", "more, ms", "every", "of the time, in a run", "at most"]
    rows, share, most = [], 0.0, 0.0
    for kind, what, apart_s in (
        (SAMPLES, "a sample, published", every_s),
        (TELLS, "the last steps told", TOLD_EVERY_S),
    ):
        more, low, high = more_of(times[kind], times[NEITHER])
        share, most = share + more / 1e3 / apart_s, most + high / 1e3 / apart_s
        rows.append([
            what, f"{np.median(times[NEITHER]):.3f}", f"{more:+.3f} [{low:+.3f}, {high:+.3f}]", f"{apart_s:g} s",
            f"{more / 1e3 / apart_s:.4%}", f"{high / 1e3 / apart_s:.4%}",
        ])  # fmt: skip
    rows.append(["both", "", "", "", f"{share:.4%}", f"{most:.4%}"])
    own = f"Of a sample, to make its {num_series} series and set them in Ray's metrics: {np.median(published):.3f} ms."
    text = f"{rules}\n\n{harness.table(header, rows)}\n\n{own}"
    record = {"conditions": conditions, "arguments": harness.arguments_of(arguments), "ms": times, "share": share}
    harness.write_report(
        "monitoring_cost", title="What watching a run costs a step", text=text, record=record, folder=arguments.results
    )
    print(json.dumps({"share": share, "at_most": most}))
    return int(most >= AIM)


if __name__ == "__main__":
    sys.exit(main())
