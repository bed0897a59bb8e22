"""One long training under steady faults on a cluster of several nodes on this machine: nothing of it may grow.

python jobs/soak.py --minutes 60 [--every 30] [--seed 0] [--json FILE]

Every --every seconds a worker is killed or stopped, and replaced by a spare, or a holder of copies is killed, while the training evaluates, keeps copies in memory
and writes checkpoints. Memory, open files, threads and sockets of each kind of process, files of the run's folder and rows of
MLflow a step are sampled; each must be flat after the first third by a test of trend. Exit code 1 if one grows, if a step is
missing or recorded twice, or if the training ends in another way than by its last step.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from scaleray.common.guarded import GUARD_VARIABLE, guarded

SAMPLE_S = 5.0
WARM_UP = 1 / 3
"""Share of the training before the test of trend: caches, pools and histories fill first."""
SURE = 0.01
"""Probability of a trend by chance from which on it is none."""
GROWTH = 0.05
"""Growth from the beginning to the end of the tested part, as a share, that is too much."""
LEAST = {"MiB": 10.0, "files": 4.0, "threads": 4.0, "sockets": 4.0, "files of the run": 4.0, "rows a step": 0.1}
"""Growth that is too small to count: a process holds a few more or less at any moment."""
PAUSE_S = 0.15
"""Pause in each step."""
NAMES = {
    "Worker": "worker",
    "Holder": "holder",
    "Coordinator": "coordinator",
    "Recorder": "recorder",
    "Controller": "controller",
}


@dataclass(frozen=True)
class Trend:
    """Trend of a series. growth: of the line through the medians of all pairs (Theil and Sen), over the tested part.
    chance: two-sided probability of the order (Kendall's tau; Mann's test of trend) without a trend."""

    what: str
    samples: int
    median: float
    growth: float
    chance: float

    @property
    def grows(self) -> bool:
        """Whether it grows, beyond chance and by more than counts."""
        unit = self.what.rpartition(": ")[2]
        return self.chance < SURE and self.growth > max(LEAST[unit], GROWTH * abs(self.median))


def trend_of(what: str, points: Sequence[tuple[float, float]]) -> Trend:
    """Test of trend of (time, value) points. A series without two values has none."""
    from scipy.stats import kendalltau, theilslopes

    times, values = zip(*points, strict=True)
    if len(set(values)) < 2:
        return Trend(what, len(values), values[0], 0.0, 1.0)
    slope = float(theilslopes(values, times).slope)
    return Trend(
        what,
        len(values),
        statistics.median(values),
        slope * (times[-1] - times[0]),
        float(kendalltau(times, values).pvalue),
    )


def tested(series: Mapping[str, Sequence[tuple[float, float]]]) -> list[Trend]:
    """Trends of all series that have enough points after the warm-up."""
    begin, end = min(points[0][0] for points in series.values()), max(points[-1][0] for points in series.values())
    late = {what: [p for p in points if p[0] >= begin + WARM_UP * (end - begin)] for what, points in series.items()}
    return [trend_of(what, points) for what, points in sorted(late.items()) if len(points) >= 8]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training and print the table of trends; 0 if nothing grew and no step was lost."""
    from fault_suite.cluster import local_nodes
    from fault_suite.run import Failed, Run, Size
    from fault_suite.workload import STOP

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the training")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0, help="decides victims, kinds and moments")
    parser.add_argument("--json", type=Path, help="write all samples and trends to this file")
    options = parser.parse_args(arguments)
    draw, folder = random.Random(options.seed), Path(tempfile.mkdtemp(prefix="scaleray-soak-"))
    settings = {
        "recovery.spares": 1,
        "checkpoint.memory": {"every": "1 step"},
        "evaluation.every": "200 steps",
        "schedule.name": "constant",
        "data.reserved_cpus": 0,
    }
    struck: Counter[str] = Counter()
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    busy_s, began, failure = _busy_s(), time.monotonic(), ""
    with local_nodes() as nodes:
        run = Run(folder, nodes.environment(), Size(steps=10**7, checkpoint_every=300, pause_s=PAUSE_S), settings)
        try:
            run.start()
            run.wait_for(lambda: run.step() >= 5, "the fifth step", seconds=300)
            began, next_fault = time.monotonic(), options.every
            while run.driver is not None and run.driver.poll() is None:
                now = time.monotonic() - began
                if now >= 60 * options.minutes:
                    (run.diary / STOP).touch()
                elif now >= next_fault:
                    struck[_strike(run, draw)] += 1
                    next_fault = now + options.every * draw.uniform(0.5, 1.5)
                else:
                    _sample(run, series, now)
                time.sleep(SAMPLE_S)
            record = run.finish()
        except Failed as exc:
            record, failure = None, str(exc)
        finally:
            run.stop()
    trends = tested(series) if series else []
    steps, wrong = (record.steps, _wrong_steps(Path(record.run_dir), record.steps)) if record else (0, [])
    _print(trends)
    print(f"{steps} steps, {dict(struck)}, steps missing or twice: {len(wrong)} {wrong[:10]}")
    took = time.monotonic() - began
    print(f"{took:.0f} s, {_busy_s() - busy_s:.0f} CPU s of the machine, load {os.getloadavg()[0]:.1f}")
    if options.json:
        report = {"struck": dict(struck), "steps": steps, "wrong": wrong, "failure": failure}
        report["trends"] = [asdict(trend) | {"grows": trend.grows} for trend in trends]
        options.json.write_text(json.dumps(report | {"series": series}))
    is_good = not failure and not wrong and not any(trend.grows for trend in trends)
    if is_good:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"{failure}\nthe run is kept in {folder}")
    return 0 if is_good else 1


def _strike(run: Any, draw: random.Random) -> str:
    """Kill or stop the process of a random rank, after a random part of a step, or kill a holder of copies."""
    process = draw.choice(list(run.workers().values())).process
    what, kind = draw.choice(
        (
            *3 * (("worker killed", signal.SIGKILL),),
            ("worker stopped", signal.SIGSTOP),
            ("holder killed", signal.SIGKILL),
        )
    )
    if what.startswith("holder"):
        process = draw.choice([p.pid for p in psutil.Process().children(recursive=True) if _kind(p, run) == "holder"])
    time.sleep(draw.uniform(0.0, PAUSE_S))
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, kind)
    return what


def _sample(run: Any, series: dict[str, list[tuple[float, float]]], at: float) -> None:
    """Add a point to each series: the mean over the processes of one kind."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (kind := _kind(process, run)) and process.status() != psutil.STATUS_STOPPED:
                found[kind].append(_sizes(process))
    for kind, sizes in found.items():
        for unit in sizes[0]:
            series[f"{kind}: {unit}"].append((at, statistics.fmean(size[unit] for size in sizes)))
    steps = run.step()
    with contextlib.suppress(OSError, ValueError):
        series["all: files of the run"].append((at, float(sum(len(files) for _, _, files in os.walk(run.path)))))
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(run.folder / "mlflow.db", timeout=5)) as database,
    ):
        rows = database.execute("select count(*) from metrics").fetchone()[0]
        if steps > 500:
            series["MLflow: rows a step"].append((at, rows / steps))


def _kind(process: psutil.Process, run: Any) -> str:
    """Kind of a process of the training or the cluster; empty for others, such as idle workers of Ray."""
    words = process.cmdline()
    if process.pid == run.driver.pid:
        return "driver"
    if words and words[0].startswith("ray::"):
        return next((kind for part, kind in NAMES.items() if part in words[0]), "")
    program = words[0].rpartition("/")[2] if words else ""
    return {"raylet": "raylet", "gcs_server": "gcs"}.get(program, "")


def _sizes(process: psutil.Process) -> dict[str, float]:
    with process.oneshot():
        return {
            "MiB": process.memory_info().rss / 2**20,
            "files": float(process.num_fds()),
            "threads": float(process.num_threads()),
            "sockets": float(len(process.net_connections())),
        }


def _wrong_steps(folder: Path, steps: int) -> list[int]:
    """Numbers of steps that the record holds never or more than once."""
    with open(folder / "steps.csv", newline="") as file:
        counts = Counter(int(row["step"]) for row in csv.DictReader(file))
    return [step for step in range(1, steps + 1) if counts[step] != 1]


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def _print(trends: Sequence[Trend]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="trends after the first third")
    for column in ("of", "samples", "median", "growth", "by chance", ""):
        table.add_column(column, justify="right" if table.columns else "left")
    for trend in trends:
        table.add_row(
            trend.what,
            str(trend.samples),
            f"{trend.median:.1f}",
            f"{trend.growth:+.2f}",
            f"{trend.chance:.2g}",
            "grows" if trend.grows else "flat",
        )
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    # a cluster of several nodes: none of its processes may be left, however this one ends
    is_guarded = os.environ.get(GUARD_VARIABLE) == str(os.getppid())
    sys.exit(main() if is_guarded else subprocess.call(guarded([sys.executable, *sys.orig_argv[1:]])))
