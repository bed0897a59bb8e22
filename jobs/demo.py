"""The first path through scaleray: a Ray head of its own, two submitted trainings, a proof, a scaling study, and one table.

Run by `make demo`. Digits on 1 and on 2 workers at the same global batch train the same, which `verify` proves in
float64, and gain nothing: a step is too short. A study of the byte-level language model, with a step of most of a second, shows what two workers give.
"""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scaleray.common.git_state import git_state
from scaleray.common.guarded import ending_like_ctrl_c, guarded
from scaleray.common.printed import quantity
from scaleray.launch.cluster.head import Head, local_head
from scaleray.recording.saved_views import trainings_link
from scaleray.records.certificate import EqualityCertificate
from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import Point, StudyRecord
from scaleray.records.text.headlines import study_headline

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".demo"
TRACKING_URI = f"sqlite:///{FOLDER / 'mlflow.db'}"
STUDY = (
    "study", "-c", "jobs/language_model.yaml", "--world-sizes", "1,2", "--repeats", "4",
    "--steps", "25",  # with fewer than 20 after the warm-up no measurement would be steady
    "--force",  # the demo measures, whatever an earlier one has found
    "--oversubscribe",  # on a machine with one core, whose figures are then marked
)  # fmt: skip
PROOF = ("verify", "-c", "jobs/digits.yaml", "--world-sizes", "1,2", "--steps", "5", "--local")
CPUS = 3  # two workers, and one for the input tasks


@dataclass(frozen=True)
class Job:
    """One submission: what the table calls it, its config and its options."""

    title: str
    config: str
    options: tuple[str, ...]


JOBS = (
    Job("digits", "jobs/digits.yaml", ("--scale.workers", "1")),
    Job("digits", "jobs/digits.yaml", ("--scale.workers", "2")),
)
NUM_JOBS = len(JOBS) + 2  # with the proof and the study


def main() -> int:
    """Run the demo; 0 when every job finished."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    started = time.monotonic()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    console.print("starting a Ray head of its own on this machine ...")
    records = []
    with ending_like_ctrl_c(), local_head(num_cpus=CPUS) as head:
        for number, job in enumerate(JOBS, start=1):
            name = f"{Path(job.config).stem}-w{job.options[1]}-{stamp}"
            words = ("train", "-c", job.config, *job.options)
            announce(console, number, f"{job.title} on {quantity(int(job.options[1]), 'worker')}", words)
            if not submit(words, name, head):
                return 1
            records.append(RunRecord.read(FOLDER / "runs" / name / "record.json"))
        proof = f"verify-{stamp}"
        announce(console, len(JOBS) + 1, "the proof that 2 workers train what 1 does", PROOF)
        if not submit(PROOF, proof, head):
            return 1
        name = f"study-{stamp}"
        announce(console, NUM_JOBS, "how a language model of 1.1 million parameters scales", STUDY)
        if not submit(STUDY, name, head):
            return 1
        console.print("\nstopping the Ray head ...")
    certificate = EqualityCertificate.read(FOLDER / "runs" / proof / "certificate.json")
    study = StudyRecord.read(FOLDER / "runs" / name / "record.json")
    console.print(table(records, study))
    for line in (*lessons(records, certificate, study), *places(records, study)):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"demo took {time.monotonic() - started:.0f} s")
    return 0


def announce(console: Console, number: int, title: str, words: tuple[str, ...]) -> None:
    """Say which of the jobs begins."""
    line = f"\n[{number}/{NUM_JOBS}] {title}: ray job submit ... scaleray {' '.join(words)}"
    console.print(line, markup=False, soft_wrap=True)


def submit(words: tuple[str, ...], name: str, head: Head) -> bool:
    """Submit one command as a job and show its output; false when it failed."""
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "job",
        "submit",
        "--address",
        head.dashboard,
        "--working-dir",
        str(ROOT),
        "--submission-id",
        name,
        "--runtime-env-json",
        json.dumps({"env_vars": _commit()}),
        "--",
        "python",
        "-m",
        "scaleray",
        *words,
        "--tracking.run-name",
        name,
        "--tracking.experiment",
        "demo",
        "--tracking.uri",
        TRACKING_URI,
        "--checkpoint.storage-path",
        str(FOLDER / "runs"),
    ]
    FOLDER.mkdir(exist_ok=True)
    noise = FOLDER / f"{name}.ray.log"
    with open(noise, "w") as stderr:
        process = subprocess.Popen(
            guarded(command), env=head.environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if not any(word in line for word in ("cli.py:", "job_manager.py:", "Running entrypoint")):
                print("   ", line.rstrip(), flush=True)
        code = process.wait()
    if code:
        print(f"{name} failed; Ray's own messages are in {noise}", file=sys.stderr)
        return False
    return True


def table(records: list[RunRecord], study: StudyRecord) -> Table:
    """The figures of both models on each number of workers. Speed-up is relative to one worker."""
    result = Table(title="scaleray demo")
    for number, column in enumerate(("model", "workers", "time of a step", "samples/s", "speed-up", "efficiency")):
        result.add_column(column, justify="right" if number else "left")
    alone = records[0].samples_per_s or math.inf
    rows = [("digits", r.workers, r.step_time_s or 0.0, r.samples_per_s or 0.0) for r in records]
    gains = [rate / alone for _, _, _, rate in rows] + _gains(study)
    rows += [("language model", p.workers, p.step_time_s.value, p.samples_per_s.value) for p in _points(study)]
    for (model, workers, step_s, rate), speedup in zip(rows, gains, strict=True):
        result.add_row(
            model,
            str(workers),
            f"{step_s * 1000:,.0f} ms",
            f"{rate:,.0f}",
            f"{speedup:.2f}",
            f"{speedup / workers:.0%}",
        )
    return result


def lessons(records: list[RunRecord], certificate: EqualityCertificate, study: StudyRecord) -> list[str]:
    """The proof that two workers train what one does, and what the table shows."""
    digits_s = (records[0].step_time_s or 0.0) * 1000
    alone = _points(study)[0].step_time_s.value
    gain = _gains(study)[-1]
    pays = (
        f"Scaling pays if a step is long: the language model takes {alone * 1000:,.0f} ms on one worker, digits "
        f"{digits_s:,.0f} ms, about as long as two workers need to exchange gradients"
    )
    busy = (
        f"Here two workers were {gain:.2f} times as fast as one on the language model, whose step of {alone * 1000:,.0f} "
        "ms is long enough to gain: other work took the cores, or there is one core. Repeat it on a quiet machine"
    )
    return [
        f"1. Proved in float64: {certificate.verdict}",
        f"   {equality(records[0], records[1])}",
        f"2. {pays if gain > 1 else busy}",
        f"   study: {study_headline(study)}",
    ]


def places(records: list[RunRecord], study: StudyRecord) -> list[str]:
    """Where the picture, the report and MLflow's pages are."""
    folder = FOLDER / "runs" / study.name
    pictures = sorted((folder / "figures").glob("*speedup*.png"))
    return [
        *(f"picture: {path}" for path in pictures[:1]),
        f"report:  {folder / 'report.html'}",
        f"MLflow:  run `make ui`, then open {trainings_link(TRACKING_URI, records[0].experiment_id)}",
    ]


def _points(study: StudyRecord) -> list[Point]:
    return [one.point for one in study.curves[0].points]


def _gains(study: StudyRecord) -> list[float]:
    """Speed-ups of the study."""
    return [one.speedup.value for one in study.curves[0].points]


def equality(one: RunRecord, two: RunRecord) -> str:
    """How far the per-step losses of two runs of the same training lie apart."""
    first, second = _losses(one), _losses(two)
    if len(first) != len(second):
        return f"the two digits runs took {len(first)} and {len(second)} steps: they are not the same training"
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    return (
        f"the two digits runs, in fp32: the largest difference of the loss over {len(first)} steps is "
        f"{differences[worst]:.2e} (step {worst + 1}, loss {first[worst]:.4f}), as rounding grows with the steps"
    )


def _losses(record: RunRecord) -> list[float]:
    with open(Path(record.run_dir) / "steps.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def _commit() -> dict[str, str]:
    # the job runs in a copy without .git, so the commit has to be told
    state = git_state(ROOT)
    return {"GIT_COMMIT": state["commit"]} if state else {}


if __name__ == "__main__":
    sys.exit(main())
