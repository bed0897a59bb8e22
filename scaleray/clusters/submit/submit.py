"""Submission to a cluster, by its type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, assert_never

from scaleray.clusters.submit import to_kubernetes, to_ray, to_slurm
from scaleray.clusters.submit.clusters import KubernetesCluster, RayCluster, SlurmCluster, cluster_of
from scaleray.clusters.submit.jobs_api import Jobs
from scaleray.clusters.submit.kubernetes_jobs import KubernetesJobs
from scaleray.clusters.submit.slurm_jobs import SlurmJobs
from scaleray.clusters.submit.submission import Submission, prepare
from scaleray.clusters.submit.submitted_job import ClusterJobs, JobNow
from scaleray.common.installed import names_what_is_missing
from scaleray.errors import ConfigError
from scaleray.records.run_record import Say


@dataclass(frozen=True)
class Started:
    """A submitted job. jobs: of its cluster; None if the job was only written to a file. to_apply: command that applies
    this file."""

    name: str
    jobs: ClusterJobs | None
    to_apply: str = ""

    def now(self) -> JobNow:
        """Return the job's current state."""
        if self.jobs is None:
            return JobNow(self.name, "WRITTEN", message=self.to_apply)
        return self.jobs.job(self.name)

    def to_its_end(self, write: Callable[[str], None], say: Callable[[str], None]) -> JobNow:
        """Follow the job and return its final state."""
        return self.now() if self.jobs is None else self.jobs.follow(self.name, write, say)


def checked_and_started(
    submission: Submission, *, bring_missing: bool = False, allow_differences: bool = False, say: Say
) -> Started:
    """Check the cluster against the requirements, and start the job. Raises UsageError.

    allow_differences: report differences and missing packages, and continue.
    """
    cluster = submission.cluster
    jobs: ClusterJobs | None
    if isinstance(cluster, RayCluster):
        jobs, name = to_ray.checked_and_started(
            submission, cluster, bring_missing=bring_missing, allow_differences=allow_differences, say=say
        )
        return Started(name, jobs)
    if bring_missing:
        raise ConfigError.problem(
            "--bring-missing",
            f"needs a Ray cluster, unlike {submission.place}",
            "add the packages to the image, or to the environment of the nodes",
        )
    if isinstance(cluster, SlurmCluster):
        jobs, name = to_slurm.checked_and_started(submission, cluster, allow_differences=allow_differences, say=say)
        return Started(name, jobs)
    jobs, name = to_kubernetes.checked_and_started(submission, cluster, allow_differences=allow_differences, say=say)
    return Started(name, jobs, "" if jobs else to_kubernetes.to_apply(cluster, name))


def jobs_of(to: str | None) -> ClusterJobs:
    """Return the jobs interface of a cluster, by its name or address. Raises UsageError."""
    cluster = cluster_of(to)
    if isinstance(cluster, RayCluster):
        return Jobs(cluster.url)
    if isinstance(cluster, KubernetesCluster):
        return KubernetesJobs(cluster)
    if isinstance(cluster, SlurmCluster):
        return SlurmJobs(cluster)
    assert_never(cluster)


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
    say: Say = lambda text: None,
) -> JobNow:
    """Submit a command to a remote cluster with Ray's Jobs API, kubectl or sbatch; return the job's current state.

    config: a YAML file in the working directory. overrides: options of the command, such as "--scale.workers", "2". to:
    a Ray dashboard, http://HOST:8265, or a name in ~/.config/scaleray/clusters.yaml. wait: wait until the job has
    ended, passing its output to `say`. secret_env: names of environment variables to pass to the job as secrets.
    bring_missing: install packages that the cluster lacks. allow_differences: submit even if versions differ or
    packages are missing.

    Raises UsageError, before anything is started, if the job cannot run there.
    """
    folder = None if working_dir is None else Path(working_dir)
    prepared = prepare(
        Path(config),
        overrides,
        to=to,
        command=command,
        working_dir=folder,
        max_mib=max_mib,
        secret_env=secret_env,
        name=name,
    )
    started = checked_and_started(prepared, bring_missing=bring_missing, allow_differences=allow_differences, say=say)
    return started.to_its_end(say, say) if wait else started.now()


@names_what_is_missing
def list_jobs(to: str | None = None) -> list[JobNow]:
    """List the jobs submitted to a cluster, newest first. to: the cluster, as for `submit`."""
    return jobs_of(to).list()


@names_what_is_missing
def job_logs(job: str, *, to: str | None = None) -> str:
    """Return the output so far of a running or ended job. job: its name. to: as for `submit`."""
    return jobs_of(to).logs(job)


@names_what_is_missing
def stop_job(job: str, *, to: str | None = None) -> JobNow:
    """Stop a job after it has saved its state; return the job's current state. to: as for `submit`."""
    jobs = jobs_of(to)
    jobs.stop(job)
    return jobs.job(job)
