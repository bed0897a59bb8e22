"""`scaleray submit`: run a command of this folder as a job on a cluster."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from scaleray.cli.options import Flag, Overrides, Several
from scaleray.cli.output import STOPPED, Output, print_json

FAILED = 1


def submit(
    *overrides: Overrides,
    config: Annotated[Path, Parameter(name=["--config", "-c"], help="YAML file of the run, in the working directory.")],
    to: str | None = None,
    wait: Flag = False,
    command: Literal["train", "study", "sweep", "verify", "profile"] = "train",
    working_dir: Path | None = None,
    max_mib: float = 100.0,
    secret_env: Several = (),
    bring_missing: Flag = False,
    allow_differences: Flag = False,
    name: str | None = None,
    json: Annotated[bool, Parameter(name="--json", negative="", help="Print the job as JSON on stdout.")] = False,
) -> int:
    """Submit a training to a remote cluster: Ray, Kubernetes with KubeRay, or Slurm.

    Before anything is started there, the config is read, the working directory is measured, the versions of Ray, Python
    and torch are compared as far as the cluster reports them, and missing packages are listed. Config keys can be given
    as options, as for train.

    Parameters
    ----------
    to
        Ray dashboard, http://HOST:8265, or the name of a Ray, Kubernetes or Slurm cluster in
        ~/.config/scaleray/clusters.yaml; by default the dashboard in RAY_API_SERVER_ADDRESS.
    wait
        Show the job's output until it ends; exit code 1 if it failed. Ctrl-C asks whether it should continue; if it
        does, the exit code is 130.
    command
        Command to run there.
    working_dir
        Folder to upload, without the files in .gitignore and .rayignore; by default the current one.
    max_mib
        Largest size of the upload in MiB.
    secret_env
        Environment variable to pass to the job with its value here, or on Kubernetes with its value in the cluster's
        Secret. Anyone who can view the jobs of a Ray cluster can see it.
    bring_missing
        Install packages that a Ray cluster lacks for this job, with pip.
    allow_differences
        Submit even if versions differ or packages are missing.
    name
        Name of the job; by default made from the config's name and the time.
    """
    output = Output(json=json)
    with output.running():
        from scaleray.clusters.submit.submission import prepare
        from scaleray.clusters.submit.submit import checked_and_started

        prepared = prepare(
            config,
            overrides,
            to=to,
            command=command,
            working_dir=working_dir,
            max_mib=max_mib,
            secret_env=secret_env,
            name=name,
        )
        output.say(f"job {prepared.name}: {command} -c {config} on {prepared.place}")
        output.say(f"  working directory: {prepared.contents.to_text()}")
        if prepared.settings:
            output.say(f"  from the environment here: {', '.join(prepared.settings)}")
        started = checked_and_started(
            prepared, bring_missing=bring_missing, allow_differences=allow_differences, say=output.say
        )
    if started.jobs is None:
        output.say(
            f"kubectl is not installed: the job is written to {started.name}; start it with\n  {started.to_apply}"
        )
        code = 0
    else:
        output.say(f"submitted; to follow it: scaleray jobs logs {started.name} --to {prepared.place}")
        code = _follow(started.jobs, started.name, output) if wait else 0
    if json:
        print_json(dataclasses.asdict(started.now()))
    return code


def _follow(jobs: Any, job: str, output: Output) -> int:
    """Show the output of a job; return the exit code."""
    stream = sys.stderr if output.console.stderr else sys.stdout

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    while True:
        try:
            ended = jobs.follow(job, write, output.say)
        except KeyboardInterrupt:
            if _is_to_stop():
                jobs.stop(job)
                output.say(f"job {job} was asked to save and stop")
                continue
            output.say(f"job {job} continues; scaleray jobs logs {job}, scaleray jobs stop {job}")
            return STOPPED
        code = f", exit code {ended.exit_code}" if ended.exit_code else ""
        reason = ended.message.partition(", last available logs")[0]  # Ray repeats the output that was shown
        output.say(f"job {job}: {ended.status}{code}" + (f" ({reason})" if reason else ""))
        return 0 if ended.status == "SUCCEEDED" else FAILED


def _is_to_stop() -> bool:
    """Ask on a terminal; otherwise leave the job running."""
    if not sys.stdin.isatty():
        return False
    try:
        answer = input("\nleave the job running, or stop it? [L/s] ")
    except (EOFError, KeyboardInterrupt):
        return False
    return answer.strip().lower() in ("s", "stop")
