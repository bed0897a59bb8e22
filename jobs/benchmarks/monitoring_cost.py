"""What watching a run costs a step: samples of a worker, and their way to Ray's metrics.

One training, in which every step of one block takes and publishes a sample and no step of the next one does, in random
order. A sample at every step costs so much; at `monitoring.every_s` a step has its part of it.

    python jobs/benchmarks/monitoring_cost.py [--pairs 60]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

from scaleray.callbacks import Callback
from scaleray.config.monitoring import MonitoringSettings
from scaleray.monitoring.live.rank_series import rank_series
from scaleray.records.published import RankSample
from scaleray.training.profile.rank_samples import RankSamples
from scaleray.training.ray_metrics import RayMetrics
from scaleray.training.setup.place import Place

AIM, STEP_S = 0.005, 0.008
WARM_UP, BLOCK, LEFT_OUT = 80, 24, 4
RULES = """\
A training of three layers of 1,100, 32 rows, one thread. Steps come in blocks of {block}, of which the first {left_out} are
left out; each pair of blocks has one whose every step takes a sample, makes its series and sets them in Ray's metrics on
the training thread, and one without, in random order. Milliseconds of CPU time of the training thread, medians of blocks;
`more`: the median of {pairs} pairs [95 % of 2,000 draws of pairs anew]. In a run a sample is taken every {every_s:g} s, and
a thread of its own publishes it. Load of the machine before: {before:.1f}, after: {after:.1f}.
Aim: below {aim:.1%} of a step of {step_ms:g} ms."""


class Switches(Callback):
    """Begins a block after so many steps, and turns samples on or off for it."""

    def __init__(self) -> None:
        self.steps, self.draw, self.next = 0, random.Random(0), [True, False]
        self.blocks: list[tuple[int, bool]] = []
        self.samples: RankSamples | None = None

    def on_step(self, run: Any) -> None:
        self.steps += 1
        if self.steps < WARM_UP or (self.steps - WARM_UP) % BLOCK:
            return
        if not len(self.blocks) % 2:
            self.draw.shuffle(self.next)
        is_on = self.next[len(self.blocks) % 2]
        assert self.samples is not None
        self.samples.every_s = 0.0 if is_on else 1e9
        self.blocks.append((self.steps, is_on))


def measured(pairs: int) -> tuple[list[float], list[float], list[float], int]:
    """Milliseconds of a step in blocks without samples and with them, of the making and setting of series alone, and
    the number of series."""
    sys.path.insert(0, str(Path(__file__).parent / "sides"))
    from steps import Toy, with_scaleray

    from scaleray.training.profile import profile

    switches, metrics, published, count = Switches(), RayMetrics(), [], [0]

    class Watched(Toy):
        def callbacks(self) -> list[Callback]:
            return [switches]

    class Samples(RankSamples):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            switches.samples = self
            self._emit = publish

    def publish(message: Any) -> None:
        if isinstance(message, RankSample):
            begun = time.perf_counter()
            series = rank_series(message, run_name="run", run_id="0123456789abcdef")
            metrics.publish(series)
            published.append(1e3 * (time.perf_counter() - begun))
            count[0] = len(series)

    profile.RankSamples = Samples  # type: ignore[misc]
    toy = Watched(1100)
    with_scaleray(toy, Place(), clips=False, steps=WARM_UP + (2 * pairs + 1) * BLOCK)
    off, on = [], []
    for first, is_on in switches.blocks[: 2 * pairs]:
        thread = np.diff(np.array(toy.at[first + LEFT_OUT : first + BLOCK])[:, 0] * 1e3)
        (on if is_on else off).append(float(np.median(thread)))
    return off, on, published, count[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    conditions = harness.conditions(["torch", "numpy", "ray"])
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    off, on, published, num_series = measured(arguments.pairs)
    more = np.array(on) - np.array(off)
    draws = np.random.default_rng(0).integers(0, len(more), (2000, len(more)))
    low, high = np.percentile(np.median(more[draws], axis=1), [2.5, 97.5])
    every_s = MonitoringSettings().every_s
    share = float(np.median(more)) / 1e3 / every_s
    rules = RULES.format(
        block=BLOCK, left_out=LEFT_OUT, pairs=arguments.pairs, every_s=every_s, before=before,
        after=os.getloadavg()[0], aim=AIM, step_ms=1e3 * STEP_S,
    )  # fmt: skip
    header = [
        "step without, ms",
        "more with a sample in every step, ms",
        "of it series and Ray, ms",
        "series",
        "of the time, in a run",
    ]
    row = [
        f"{np.median(off):.3f}", f"{np.median(more):+.3f} [{low:+.3f}, {high:+.3f}]", f"{np.median(published):.3f}",
        str(num_series), f"{share:.4%}",
    ]  # fmt: skip
    text = f"{rules}\n\n{harness.table(header, [row])}"
    record = {"conditions": conditions, "arguments": harness.arguments_of(arguments), "off_ms": off, "on_ms": on}
    harness.write_report(
        "monitoring_cost", title="What watching a run costs a step", text=text, record=record, folder=arguments.results
    )
    print(json.dumps({"share": share}))


if __name__ == "__main__":
    main()
