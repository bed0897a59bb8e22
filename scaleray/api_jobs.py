"""`scaleray submit` and `scaleray jobs` as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scaleray.installed import names_what_is_missing

if TYPE_CHECKING:
    from scaleray.launch.submit.job import JobNow


@names_what_is_missing
def submit(
    config: str | Path,
    *overrides: str,
    to: str | None = None,
    wait: bool = False,
    command: Literal["train", "study", "sweep", "verify", "profile"] = "train",
    working_dir: str | Path | None = None,
    max_mib: float = 100.0,
    secret_env: Sequence[str] = (),
    bring_missing: bool = False,
    allow_differences: bool = False,
    name: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> JobNow:
    """Submit a command to a cluster that is elsewhere, by Ray's Jobs API, kubectl or sbatch; the job as it is then.

    config: a YAML file in the working directory. overrides: options of the command, such as "--scale.workers", "2". to:
    a Ray's dashboard, http://HOST:8265, or a name of ~/.config/scaleray/clusters.yaml. wait: until it has ended;
    `say` hears what it prints. secret_env: names of environment variables whose values the job gets. bring_missing:
    install packages that the cluster lacks. allow_differences: although versions differ or packages are missing.

    Raises UsageError, before anything is started, where it cannot run there.
    """
    from scaleray.launch.submit.submission import prepare
    from scaleray.launch.submit.submit import checked_and_started

    prepared = prepare(
        Path(config),
        overrides,
        to=to,
        command=command,
        working_dir=None if working_dir is None else Path(working_dir),
        max_mib=max_mib,
        secret_env=secret_env,
        name=name,
    )
    started = checked_and_started(prepared, bring_missing=bring_missing, allow_differences=allow_differences, say=say)
    return started.to_its_end(say, say) if wait else started.now()


@names_what_is_missing
def list_jobs(to: str | None = None) -> list[JobNow]:
    """The jobs that were submitted to a cluster, the newest first. to: as for `submit`."""
    from scaleray.launch.submit.submit import jobs_of

    return jobs_of(to).list()


@names_what_is_missing
def job_logs(job: str, *, to: str | None = None) -> str:
    """All that a job has printed so far, whether it has ended or not. job: its name. to: as for `submit`."""
    from scaleray.launch.submit.submit import jobs_of

    return jobs_of(to).logs(job)


@names_what_is_missing
def stop_job(job: str, *, to: str | None = None) -> JobNow:
    """Ask a job to end, which saves its state first, and give what the cluster knows of it. to: as for `submit`."""
    from scaleray.launch.submit.submit import jobs_of

    jobs = jobs_of(to)
    jobs.stop(job)
    return jobs.job(job)
