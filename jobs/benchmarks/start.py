"""The time from a command to its first step: scaleray, another checkout of it, and the barest Ray Train loop by hand.

python jobs/benchmarks/start.py --repeats 5 --before FOLDER
python jobs/benchmarks/start.py --on-cluster
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import training

from scaleray.common.guarded import guarded

BARE, BASELINE = "bare_ray_train", "bare_ray_train"
SIDES = ("scaleray", BARE, "torchrun")
STEPS = 20
RULES = """\
digits, 2 gloo workers with 1 torch thread each, {steps} steps{where}. Every measurement is a fresh command, sides in random order
in each round (seed {seed}), {repeats} rounds. Median (smallest-largest); ratios are taken in each round, to {baseline}.

- first step: from the start of the command to the end of the first optimizer step on rank 0.
- CPU s to it: CPU seconds of all processes of the command up to then{not_of_the_head}.
- foreign CPU s: of all other processes of the machine, over the whole command: what disturbed the measurement. load: the load
  average over the last minute, before the command."""


def measure(side: str, job: training.Job, before: Path | None) -> harness.Measurement:
    """One start of one side; of scaleray with the parts of its timeline."""
    load = os.getloadavg()[0]
    if side in ("scaleray", training.BEFORE):
        source = before if side == training.BEFORE and before is not None else harness.REPOSITORY
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            started_at = time.time()
            code, output, errors, watch = training.execute(training.command_of(side, job, Path(name)), source)
            if code != 0:
                harness.log(errors[-4000:])
                return {"not_run": f"exit code {code}: {training.reason(errors or output)}"}
            record = json.loads(output)
            with open(Path(record["run_dir"]) / "steps.csv", newline="") as file:
                num_steps = len(list(csv.DictReader(file)))
        assert num_steps == STEPS
        first_step_s = record["time_to_first_step_s"]
        found = {"first_step_s": first_step_s, "parts": record["start"]}
        found["steady_at"] = [started_at + first_step_s, time.time()]  # there is nothing after it but the end
        return training.with_cpu(found, watch, started_at) | {"load": load}
    return training.run(side, job, before) | {"load": load}


@contextlib.contextmanager
def cluster(is_asked_for: bool) -> Iterator[None]:
    """A head as users start it, up before the commands start, for as long as the context lasts, where it is asked for.

    Not a head of scaleray's own: that one listens on loopback alone, where a plain `ray.init` never gets its workers."""
    if not is_asked_for:
        yield
        return
    import ray.util

    ports = [harness.free_port() for _ in range(3)]
    settings = {"RAY_ADDRESS": f"{ray.util.get_node_ip_address()}:{ports[0]}", "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder, mock.patch.dict(os.environ):
        os.environ.pop("RAY_ADDRESS", None)
        words = [
            f"--port={ports[0]}", f"--dashboard-port={ports[1]}", f"--ray-client-server-port={ports[2]}",
            f"--num-cpus={(os.cpu_count() or 1) + 2}", f"--object-store-memory={2**29}", f"--temp-dir={folder}/ray",
        ]  # fmt: skip
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        head = subprocess.Popen(
            guarded([*command, *words]),
            env={**os.environ, "RAY_AUTH_MODE": "disabled"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert head.stdout is not None
        try:
            while "Ray runtime started" not in (line := head.stdout.readline()):
                if not line:
                    raise RuntimeError("ray start ended early")
            threading.Thread(target=head.stdout.read, daemon=True).start()  # or a full pipe would stop the head
            os.environ.update(settings)
            yield
        finally:
            head.terminate()
            head.wait()


def describe(found: Sequence[harness.Measurement], arguments: argparse.Namespace) -> str:
    """The rules, the table, and the timelines."""
    rows, parts, notes = [], {}, []
    for side in arguments.sides:
        own = [m for m in found if m["side"] == side and "not_run" not in m]
        notes += sorted({f"- {side} not run: {m['not_run']}" for m in found if m["side"] == side and "not_run" in m})
        if not own:
            continue
        ratio = harness.ratios(found, "first_step_s", side=side, baselines=[BASELINE])
        rows.append(
            [
                side,
                harness.show([m["first_step_s"] for m in own], "{:.1f}"),
                harness.show(ratio, "{:.2f}"),
                harness.show([m["start_cpu_s"] for m in own], "{:.1f}"),
                harness.show([m["foreign_cpu_s"] for m in own], "{:.1f}"),
                harness.show([m["load"] for m in own], "{:.1f}"),
            ]
        )
        parts[side] = [m["parts"] for m in own if "parts" in m]
    rules = RULES.format(
        steps=STEPS,
        where=", on a head that is up already" if arguments.on_cluster else "",
        not_of_the_head=", without those of the head, and of workers that the head starts"
        if arguments.on_cluster
        else "",
        seed=arguments.seed,
        repeats=arguments.repeats,
        baseline=BASELINE,
    )
    header = ["side", "first step, s", "ratio", "CPU s to it", "foreign CPU s", "load"]
    return "\n\n".join([rules, harness.table(header, rows), _timelines(parts), "\n".join(notes)]).rstrip()


def _timelines(parts: dict[str, list[dict[str, float]]]) -> str:
    """Medians of the parts of a start, in seconds."""
    names = list(dict.fromkeys(name for runs in parts.values() for run in runs for name in run))
    rows = [
        [side, *(f"{statistics.median(run.get(name, 0.0) for run in runs):.2f}" for name in names)]
        for side, runs in parts.items()
        if runs
    ]
    return harness.table(["seconds of each part", *names], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES), help=",".join(SIDES))
    parser.add_argument("--seed", type=int, default=0, help="of the training and of the order of sides")
    parser.add_argument("--on-cluster", action="store_true", help="on a head that is up already")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    parser.add_argument("--before", type=Path, help="another checkout of scaleray, to be measured as the side `before`")
    arguments = parser.parse_args()
    if arguments.before is not None:
        arguments.sides = [*arguments.sides, training.BEFORE]
    conditions = harness.conditions(["torch", "ray", "numpy"])
    settings: Any = argparse.Namespace(steps=STEPS, workers=2, seed=arguments.seed, loader_workers=0)
    job = training.make_job("digits", settings)
    found: list[harness.Measurement] = []
    with cluster(arguments.on_cluster):
        for number, side in harness.interleaved(arguments.sides, repeats=arguments.repeats, seed=arguments.seed):
            found.append({"round": number, "side": side, **measure(side, job, arguments.before)})
            harness.log(f"round {number + 1}: {json.dumps(found[-1])}")
    harness.write_report(
        "start-on-cluster" if arguments.on_cluster else "start",
        title="The time to the first step",
        text=describe(found, arguments),
        record={"conditions": conditions, "task": job.task, "measurements": found},
        folder=arguments.results,
    )


if __name__ == "__main__":
    main()
