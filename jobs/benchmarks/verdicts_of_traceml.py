"""What TraceML (`traceml-ai`) says of planted faults, beside scaleray's verdict on the same ones.

    pip install --target=FOLDER traceml-ai==0.5.0
    chrt -f 20 python jobs/benchmarks/verdicts_of_traceml.py --traceml FOLDER [--seeds 2] [--size 0.25]

Each fault is planted in a training of ddp on two gloo processes twice: in scaleray's own loop (`verdicts.py`), and in a
plain loop that TraceML watches (`sides/with_traceml.py`). Model, rows, delays and what sleeps are the same.
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
from planted.faults import BY_NAME, FAULTS
from planted.runs import WARM_UP, cases, measured, step_time, verdict_on

from scaleray.launch.workers.gloo import UserCode, gloo_processes

SCRIPT = Path(__file__).resolve().parent / "sides" / "with_traceml.py"
RESIDUAL = "RESIDUAL_HEAVY"
ITS_CLASS = {
    "healthy": "COMPUTE_BOUND",
    "slow reader": "INPUT_BOUND",
    "slow decode on one rank": "INPUT_STRAGGLER",
    **dict.fromkeys(("python overhead", "device synchronisation", "pauses of the garbage collector"), RESIDUAL),
    **dict.fromkeys(("synchronous checkpoint", "heavy evaluation"), RESIDUAL),
    **dict.fromkeys(("straggler in forward", "straggler in backward", "straggler in optimizer"), "COMPUTE_STRAGGLER"),
    "two at once": "COMPUTE_STRAGGLER",
}
"""What its documentation would call a fault. It has no class for links and memory retries, and none on CPUs for copies."""
RULES = """\
TraceML {version}: `mode="auto"`, a plain loop of DDP with a DataLoader that reads beside it, 60 steps; what comes between two
steps is outside of `trace_step`, as its documentation has it. Planted are {size:.0%} of a step, in {seeds} trainings of each
fault, with two gloo processes. `its class`: what its documentation would call the fault. Load of the machine: {load:.1f}."""


class Missing(SystemExit):
    """TraceML is not there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"--traceml {folder}: no traceml_ai is there, or something that it needs is missing; "
            f"pip install --target={folder} traceml-ai==0.5.0"
        )


def version_of(folder: Path) -> str:
    """The version of TraceML in a folder. Raises Missing."""
    code = "import importlib.metadata, traceml_ai.launcher.cli; print(importlib.metadata.version('traceml-ai'))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(folder), capture_output=True, text=True)
    if done.returncode:
        raise Missing(folder)
    return done.stdout.strip()


def environment(folder: Path) -> dict[str, str]:
    """Variables of a process that has TraceML."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(harness.REPOSITORY), str(folder)])}


def theirs(settings: dict[str, Any], folder: Path, logs: Path) -> dict[str, Any]:
    """TraceML's primary diagnosis of a training."""
    name = f"{settings['fault']}-{settings['seed']}".replace(" ", "-").replace(",", "")
    launch = ["-m", "traceml_ai.launcher.cli", "run", str(SCRIPT), "--nproc-per-node", "2"]
    options = ["--logs-dir", str(logs), "--run-name", name, "--args", json.dumps(settings)]
    command = [sys.executable, *launch, *options]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=180)
    summary = logs / name / "final_summary.json"
    if done.returncode or not summary.exists():
        raise RuntimeError(
            f"{name} under TraceML ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}"
        )
    found: dict[str, Any] = json.loads(summary.read_text())["primary_diagnosis"]
    return {key: found.get(key) for key in ("kind", "severity", "summary")}


def row_of(fault: str, of_fault: list[dict[str, Any]]) -> list[str]:
    """A fault in the table."""
    ours = [f"{one['ours']}" + (f", rank {one['ranks'][0]}" if one["ranks"] else "") for one in of_fault]
    kinds = [f"{one['theirs']['kind']} ({one['theirs']['severity']})" for one in of_fault]
    expected = ITS_CLASS.get(fault, "none")
    right = sum(one["ours"] == BY_NAME[fault].limit for one in of_fault)
    theirs_right = sum(one["theirs"]["kind"] == expected for one in of_fault)
    return [
        fault,
        f"{right} of {len(of_fault)}",
        "; ".join(dict.fromkeys(ours)),
        expected,
        f"{theirs_right} of {len(of_fault)}" if expected != "none" else "-",
        "; ".join(dict.fromkeys(kinds)),
        of_fault[0]["theirs"]["summary"] or "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traceml", type=Path, required=True, help="folder of `pip install --target`")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--size", type=float, default=0.25, help="planted delay, as a share of a healthy step")
    parser.add_argument("--only", default="", help="faults whose name contains this, and the healthy trainings")
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    version = version_of(arguments.traceml.resolve())
    conditions = harness.conditions(["torch", "numpy"])
    found: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as logs,
        gloo_processes(2, UserCode(None, {}, None, None), timeout_s=60) as processes,
    ):
        measured(processes, WARM_UP)
        for settings in cases(["ddp"], [arguments.size], range(arguments.seeds)):
            if settings["fault"] == "healthy":
                step_s = 0.0
            elif arguments.only not in settings["fault"]:
                continue
            planted = {**settings, "step_s": step_s}
            ours = measured(processes, planted)
            if settings["fault"] == "healthy":
                step_s = step_time(ours)
            one = verdict_on(ours).primary
            diagnosis = theirs(planted, arguments.traceml.resolve(), Path(logs))
            found.append({**planted, "ours": str(one.limit), "ranks": list(one.ranks), "theirs": diagnosis})
            harness.log(f"{settings['fault']}, seed {settings['seed']}: {one.limit}; TraceML: {diagnosis}")
    names = [fault.name for fault in FAULTS if any(one["fault"] == fault.name for one in found)]
    rows = [row_of(name, [one for one in found if one["fault"] == name]) for name in names]
    header = ["planted", "scaleray right", "says", "its class", "TraceML right", "says", "in its words"]
    rules = RULES.format(version=version, size=arguments.size, seeds=arguments.seeds, load=conditions["load_before"])
    harness.write_report(
        "verdicts_of_traceml",
        title="TraceML's verdicts on planted faults",
        text=f"{rules}\n\n{harness.table(header, rows)}",
        record={"conditions": conditions, "arguments": harness.arguments_of(arguments), "trainings": found},
        folder=arguments.results,
    )


if __name__ == "__main__":
    main()
