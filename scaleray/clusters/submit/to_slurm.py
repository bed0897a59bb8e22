"""Submit to Slurm: compare versions in its environment, then queue a batch script in the job's own folder."""

import re
import tempfile
from pathlib import Path

from scaleray.clusters.manifests.cluster_spec import ClusterSpec
from scaleray.clusters.manifests.written_files import files
from scaleray.clusters.submit.clusters import SlurmCluster
from scaleray.clusters.submit.package import Contents, pack
from scaleray.clusters.submit.package_versions import Versions
from scaleray.clusters.submit.slurm_jobs import SCRIPT, SlurmJobs
from scaleray.clusters.submit.submission import Submission, refuse_differences, refuse_missing, with_missing
from scaleray.common.progress import stage
from scaleray.errors import ConfigError, UsageError
from scaleray.records.run_record import Say

NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
TAKES_COMMANDS = "SUBCOMMAND"
"""Environment variable that passes the command to the batch script."""


def checked_and_started(
    submission: Submission, cluster: SlurmCluster, *, allow_differences: bool, say: Say
) -> tuple[SlurmJobs, str]:
    """Compare versions if they are available, and queue the job; return the cluster's jobs and the job's name.

    Raises UsageError.
    """
    _check_name(submission.name)
    jobs = SlurmJobs(cluster)
    scripts = _scripts(submission.contents, cluster)
    try:
        _compare(submission, jobs, say)
    except UsageError as exc:
        if not allow_differences:
            raise
        say(f"  warning: {exc}")
    command, *words = submission.command
    resumes = command == "train" and not any(one.startswith("--resume") for one in words)
    with tempfile.TemporaryDirectory(prefix="scaleray-submit-") as folder:
        package = Path(folder) / "working_dir.zip"
        with stage("packing the working directory"):
            pack(submission.contents, package, scripts)
        with stage(f"sending {package.stat().st_size / 2**20:.1f} MiB"):
            number = jobs.submit(
                submission.name,
                package.read_bytes(),
                words=words,
                command=f"{command} --resume auto" if resumes else command,
                secrets=submission.variables,
            )
    say(f"  Slurm's job {number}; its code and log: {cluster.folder.rstrip('/')}/{submission.name}")
    return jobs, submission.name


def _check_name(name: str) -> None:
    """Raise ConfigError for a name that is unsuitable for a job's folder, log and list entry."""
    if not NAME.fullmatch(name) or name.isdigit():
        raise ConfigError(
            "--name",
            name,
            "on Slurm it must begin with a letter or digit, must not be a number, and may have at most 100 "
            "letters, digits, dots, - and _",
            "for example digits-2",
        )


def _compare(submission: Submission, jobs: SlurmJobs, say: Say) -> None:
    with stage("querying the cluster's versions"):
        there = jobs.versions()
    if there is None:
        say("  versions: not compared, since the cluster has no `environment` and the batch script chooses one")
        return
    here = Versions.here()
    refuse_differences(submission, here, there, remedy="install the cluster's versions here, or yours there")
    say(f"  versions: {there.to_text()}")
    submission = with_missing(submission, here, there)
    pip = f"{jobs.cluster.environment}/bin/pip install {' '.join(submission.requirements)}"
    refuse_missing(submission, remedy=f"on the cluster: {pip}")


def _scripts(contents: Contents, cluster: SlurmCluster) -> dict[str, str]:
    """The batch script and its files, unless the user uploads their own."""
    if SCRIPT not in contents.files:
        texts = files(ClusterSpec(gpus=cluster.gpus, nodes=cluster.nodes), ["slurm"])
        return {f"cluster/{name}": text for name, text in texts.items() if "try_on" not in name}
    if TAKES_COMMANDS not in (contents.folder / SCRIPT).read_text(errors="replace"):
        raise ConfigError.problem(
            SCRIPT,
            f"lacks the variable {TAKES_COMMANDS}: an older scaleray wrote it, or it was edited",
            "rewrite it: scaleray cluster write --kind slurm --overwrite",
        )
    return {}
