"""Submit to a Ray cluster through its Jobs API: compare versions in a separate job, then pack and start the job."""

import math
import shlex
import tempfile
from pathlib import Path
from typing import Any

from scaleray.clusters.manifests.grace import RAY_STOP, RAY_STOP_S, SAVING, SAVING_S
from scaleray.clusters.submit.clusters import RayCluster
from scaleray.clusters.submit.jobs_api import Jobs
from scaleray.clusters.submit.package import pack
from scaleray.clusters.submit.package_versions import Versions
from scaleray.clusters.submit.submission import Submission, refuse_differences, refuse_missing, with_missing
from scaleray.common.progress import stage
from scaleray.errors import UsageError
from scaleray.records.run_record import Say

SUBMITTED_BY = "scaleray submit"
REMEDY = "install the same versions here, or use an image with these (cluster/image)"


def checked_and_started(
    submission: Submission, cluster: RayCluster, *, bring_missing: bool, allow_differences: bool, say: Say
) -> tuple[Jobs, str]:
    """Check the cluster against the requirements, and start the job; return the cluster's jobs and the job's name.
    Raises UsageError.

    allow_differences: report differences and missing packages, and continue.
    """
    jobs = Jobs(cluster.url)
    try:
        submission = compare(submission, jobs, say=say)
        if not bring_missing:
            listed = ", ".join(f'"{one}"' for one in submission.requirements)
            brings = f'runtime_env={{"pip": [{listed}]}} installs them, as --bring-missing does'
            refuse_missing(submission, remedy=f"{brings}; or add them to its image")
    except UsageError as exc:
        if not allow_differences:
            raise
        say(f"  warning: {exc}")
    return jobs, start(submission, jobs, bring_missing=bring_missing)


def compare(submission: Submission, jobs: Jobs, *, say: Say) -> Submission:
    """Add packages that the cluster lacks to the submission. Raises ClusterError if its versions do not match."""
    here = Versions.here()
    quick = Versions(jobs.python_version, {"ray": jobs.ray_version})
    refuse_differences(submission, here, quick, remedy=REMEDY)
    with stage("querying the cluster's versions"):
        there = jobs.versions()
    refuse_differences(submission, here, there, remedy=REMEDY)
    say(f"  versions: {there.to_text()}")
    return with_missing(submission, here, there)


def start(submission: Submission, jobs: Jobs, *, bring_missing: bool = False) -> str:
    """Pack the working directory, send it, start the job, and return its name."""
    environment: dict[str, Any] = {"env_vars": {**time_to_save(submission.grace_s), **submission.variables}}
    if bring_missing and submission.missing:
        environment["pip"] = submission.requirements
    with tempfile.TemporaryDirectory(prefix="scaleray-submit-") as folder:
        package = Path(folder) / "working_dir.zip"
        with stage("packing the working directory"):
            pack(submission.contents, package)
        environment["working_dir"] = str(package)
        with stage(f"sending {package.stat().st_size / 2**20:.1f} MiB"):
            name = jobs.submit(
                shlex.join(["python", "-m", "scaleray", *submission.command]),
                name=submission.name,
                runtime_env=environment,
                metadata={"submitted_by": SUBMITTED_BY, "secrets": ",".join(submission.variables)},
            )
    jobs.forget_probes()
    return name


def time_to_save(grace_s: float | None) -> dict[str, str]:
    """Environment variables that give a stopped job time to save; by default Ray kills it after 3 s. grace_s: the
    config's time limit of the last checkpoint, if set."""
    if grace_s is None:
        return {RAY_STOP: str(RAY_STOP_S), SAVING: str(SAVING_S)}
    return {RAY_STOP: str(math.ceil(grace_s) + RAY_STOP_S - SAVING_S)}
