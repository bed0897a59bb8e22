"""The first path through scaleray: a Ray head of its own, three submitted trainings and a scaling study, and their tables.

Run by `make demo`. Digits on 1 and on 2 workers at the same global batch, the byte-level language model on 2, and a study of
how digits scales from 1 to 2.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scaleray.common.fingerprint import git_state
from scaleray.common.guarded import ending_like_ctrl_c, guarded
from scaleray.launch.cluster.head import Head, local_head
from scaleray.recording.store import experiment_link
from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import StudyRecord

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".demo"
TRACKING_URI = f"sqlite:///{FOLDER / 'mlflow.db'}"
LANGUAGE_MODEL_STEPS = 300
STUDY = (
    "study", "-c", "jobs/digits.yaml", "--world-sizes", "1,2", "--mode", "strong,weak", "--repeats", "8",
    "--seconds", "1",  # many short turns tell more than few long ones: it is turns that differ, not their steps
    "--force",  # the demo measures, whatever an earlier one has found
    "--oversubscribe",  # on a machine with one core, whose figures are then marked
)  # fmt: skip
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
    Job(
        "language model",
        "jobs/language_model.yaml",
        ("--scale.workers", "2", "--stop.after", f"{LANGUAGE_MODEL_STEPS} steps", "--tracking.interval-s", "10"),
    ),
)


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
            announce(console, number, job.title, words)
            if not submit(words, name, head):
                return 1
            records.append(RunRecord.read(FOLDER / "runs" / name / "record.json"))
        study = f"study-{stamp}"
        announce(console, len(JOBS) + 1, "how digits scales", STUDY)
        if not submit(STUDY, study, head):
            return 1
        console.print("\nstopping the Ray head ...")
    console.print(table(records))
    console.print(equality(records[0], records[1]))
    console.print(
        f"MLflow: run `make ui`, then open {experiment_link(TRACKING_URI, records[0].experiment_id)}", soft_wrap=True
    )
    for sentence in StudyRecord.read(FOLDER / "runs" / study / "record.json").words:
        console.print(f"study: {sentence}", markup=False, soft_wrap=True)
    console.print(f"report of the study: {FOLDER / 'runs' / study / 'report.html'}", soft_wrap=True)
    console.print(f"demo took {time.monotonic() - started:.0f} s")
    return 0


def announce(console: Console, number: int, title: str, words: tuple[str, ...]) -> None:
    """Say which of the jobs begins."""
    line = f"\n[{number}/{len(JOBS) + 1}] {title}: ray job submit ... scaleray {' '.join(words)}"
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


def table(records: list[RunRecord]) -> Table:
    """The figures of all runs. Speed-up and efficiency are relative to the same job on one worker."""
    result = Table(title="scaleray demo")
    columns = (
        "job",
        "workers",
        "samples/s",
        "speed-up",
        "efficiency",
        "test accuracy",
        "val bits/byte",
        "first step (s)",
        "time (s)",
    )
    for number, column in enumerate(columns):
        result.add_column(column, justify="right" if number else "left")
    alone = {job.config: record for job, record in zip(JOBS, records, strict=True) if record.workers == 1}
    for job, record in zip(JOBS, records, strict=True):
        base = alone.get(job.config)
        speedup = (
            record.samples_per_s / base.samples_per_s if base and base.samples_per_s and record.samples_per_s else None
        )
        accuracy, bits = record.metrics.get("test/accuracy"), record.metrics.get("val/bits_per_byte")
        result.add_row(
            job.title,
            str(record.workers),
            f"{record.samples_per_s:,.0f}" if record.samples_per_s else "-",
            f"{speedup:.2f}" if speedup else "-",
            f"{speedup / record.workers:.0%}" if speedup else "-",
            f"{accuracy:.2%}" if accuracy is not None else "-",
            f"{bits:.3f}" if bits is not None else "-",
            f"{record.time_to_first_step_s:.1f}",
            f"{record.total_time_s:.0f}",
        )
    return result


def equality(one: RunRecord, two: RunRecord) -> str:
    """How far the per-step losses of two runs of the same training lie apart."""
    first, second = _losses(one), _losses(two)
    if len(first) != len(second):
        return f"the two digits runs took {len(first)} and {len(second)} steps: they are not the same training"
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    return (
        f"digits on 1 and 2 workers: largest difference of the loss over {len(first)} steps is {differences[worst]:.2e} "
        f"(step {worst + 1}, loss {first[worst]:.4f}); first step {differences[0]:.2e}"
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
