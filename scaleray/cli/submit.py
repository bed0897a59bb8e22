"""`scaleray submit`: a command of this folder as a job of a cluster."""

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
    """Submit a training to a cluster that is elsewhere: a Ray, a Kubernetes with KubeRay, or a Slurm.

    Before anything is started there: the config is read, the working directory measured, versions of Ray, Python and
    torch compared as far as the cluster tells them, and packages named that it lacks. Keys of the config can be given
    as options, as for train.

    Parameters
    ----------
    to
        A Ray's dashboard, http://HOST:8265, or a name of ~/.config/scaleray/clusters.yaml, which may be a Kubernetes or
        a Slurm; by default the dashboard of RAY_API_SERVER_ADDRESS.
    wait
        Show what the job prints until it has ended; exit code 1 if it failed. Ctrl-C asks whether it should continue;
        if it does, the exit code is 130.
    command
        Command that runs there.
    working_dir
        Folder that travels, without what .gitignore and .rayignore name; by default the current one.
    max_mib
        MiB that may travel.
    secret_env
        Name of an environment variable whose value the job gets: of this environment, and on Kubernetes of the
        cluster's Secret. Whoever may look at the jobs of a Ray can see it.
    bring_missing
        Install packages that a Ray lacks for this job, with pip.
    allow_differences
        Submit although versions differ or packages are missing.
    name
        Name of the job; by default made of the config's name and the time.
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
        output.say(f"  working directory: {prepared.contents.in_words()}")
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
    """Show what a job prints; the exit code."""
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
        output.say(f"job {job}: {ended.status}{code}" + (f" ({ended.message})" if ended.message else ""))
        return 0 if ended.status == "SUCCEEDED" else FAILED


def _is_to_stop() -> bool:
    """Ask, on a terminal; elsewhere a job is left alone."""
    if not sys.stdin.isatty():
        return False
    try:
        answer = input("\nleave the job running, or stop it? [L/s] ")
    except (EOFError, KeyboardInterrupt):
        return False
    return answer.strip().lower() in ("s", "stop")
