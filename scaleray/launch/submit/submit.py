"""Where a submission goes, by the kind of its cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from scaleray.errors import ConfigError
from scaleray.launch.submit import to_kubernetes, to_ray, to_slurm
from scaleray.launch.submit.clusters import KubernetesCluster, RayCluster, SlurmCluster, cluster_of
from scaleray.launch.submit.job import ClusterJobs, JobNow
from scaleray.launch.submit.jobs_api import Jobs
from scaleray.launch.submit.kubernetes_jobs import KubernetesJobs
from scaleray.launch.submit.slurm_jobs import SlurmJobs
from scaleray.launch.submit.submission import Submission
from scaleray.records.run import Say


@dataclass(frozen=True)
class Started:
    """A job that was submitted. jobs: those of its cluster; None where it was only written to a file. to_apply: the
    command that applies that file."""

    name: str
    jobs: ClusterJobs | None
    to_apply: str = ""

    def now(self) -> JobNow:
        """The job as it is now."""
        if self.jobs is None:
            return JobNow(self.name, "WRITTEN", message=self.to_apply)
        return self.jobs.job(self.name)

    def to_its_end(self, write: Callable[[str], None], say: Callable[[str], None]) -> JobNow:
        """Follow it; the job as it ended."""
        return self.now() if self.jobs is None else self.jobs.follow(self.name, write, say)


def checked_and_started(
    submission: Submission, *, bring_missing: bool = False, allow_differences: bool = False, say: Say
) -> Started:
    """Compare the cluster with the requirements, and start the job. Raises UsageError.

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
        raise ConfigError(
            "--bring-missing",
            submission.place,
            "packages can be brought to a Ray alone",
            "put them into the image, or into the environment of the nodes",
        )
    if isinstance(cluster, SlurmCluster):
        jobs, name = to_slurm.checked_and_started(submission, cluster, allow_differences=allow_differences, say=say)
        return Started(name, jobs)
    jobs, name = to_kubernetes.checked_and_started(submission, cluster, allow_differences=allow_differences, say=say)
    return Started(name, jobs, "" if jobs else to_kubernetes.to_apply(cluster, name))


def jobs_of(to: str | None) -> ClusterJobs:
    """The jobs of a cluster by its name or address. Raises UsageError."""
    cluster = cluster_of(to)
    if isinstance(cluster, RayCluster):
        return Jobs(cluster.url)
    if isinstance(cluster, KubernetesCluster):
        return KubernetesJobs(cluster)
    if isinstance(cluster, SlurmCluster):
        return SlurmJobs(cluster)
    assert_never(cluster)
