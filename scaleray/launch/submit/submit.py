"""A command as a job of a cluster that is elsewhere: looked at from all sides before anything is started there."""

from __future__ import annotations

import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from scaleray.config import load_config
from scaleray.config.base import without_password
from scaleray.errors import ClusterError, ConfigError, UsageError
from scaleray.launch.submit.clusters import dashboard_of
from scaleray.launch.submit.jobs_api import Jobs
from scaleray.launch.submit.package import Contents, check_is_in, contents_of, pack
from scaleray.launch.submit.versions import Versions, differences, imported_packages, missing_packages, normalised
from scaleray.progress import stage
from scaleray.records.run import Say

Command = Literal["train", "study", "sweep", "verify", "profile"]
OWN_NEEDS = ("scaleray", "ray", "torch", "mlflow", "pyarrow", "pydantic", "cyclopts")
"""Packages without which no command of scaleray runs."""
DEFAULT_MAX_MIB = 100.0
SUBMITTED_BY = "scaleray submit"


@dataclass(frozen=True)
class Submission:
    """What is submitted, before it is. missing: packages that the cluster lacks, with the versions of this side."""

    url: str
    entrypoint: str
    name: str
    contents: Contents
    workload: Path | None
    """The workload's file; None for one of an installed module."""
    variables: Mapping[str, str] = field(repr=False)
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def requirements(self) -> list[str]:
        """The missing packages as pip takes them."""
        return [f"{name}=={version}" for name, version in self.missing.items()]


def prepare(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    to: str | None = None,
    command: Command = "train",
    working_dir: Path | None = None,
    max_mib: float = DEFAULT_MAX_MIB,
    secret_env: Sequence[str] = (),
    name: str | None = None,
) -> Submission:
    """Everything that can be looked at on this side. Raises UsageError."""
    if not max_mib > 0:
        raise ConfigError("--max-mib", max_mib, "it must be more than 0 MiB")
    url = dashboard_of(to)
    contents = contents_of(working_dir or Path.cwd(), max_mib=max_mib)
    relative = check_is_in(contents, config, what="--config")
    # the others have options of their own, which the command itself looks at
    checked = load_config(config, flags=tuple(overrides) if command == "train" else ())
    workload = _workload_file(contents, checked.workload.name, config)
    words = ["python", "-m", "scaleray", command, "-c", relative, *overrides]
    return Submission(
        url=url,
        entrypoint=shlex.join(words),
        name=name or f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        contents=contents,
        workload=workload,
        variables=_secrets(secret_env),
    )


def compare(submission: Submission, jobs: Jobs, *, say: Say) -> Submission:
    """The submission with what the cluster lacks. Raises ClusterError where its versions would not do."""
    here = Versions.here()
    quick = Versions(jobs.python_version, {"ray": jobs.ray_version})
    found = differences(here, quick)
    if not found:
        with stage("asking the cluster for its versions"):
            there = jobs.versions()
        found = differences(here, there)
    if found:
        raise ClusterError(
            "the cluster",
            without_password(submission.url),
            f"its versions differ: {'; '.join(found)}",
            "use the same here, or an image with these (cluster/image); --allow-differences submits all the same",
        )
    say(
        f"  versions: Python {there.python}, "
        + ", ".join(f"{n} {there.packages[n]}" for n in ("ray", "torch") if n in there.packages)
    )
    return with_missing(submission, here, there)


def with_missing(submission: Submission, here: Versions, there: Versions) -> Submission:
    """The submission with the packages that its code imports, or scaleray needs, and the cluster lacks."""
    contents = submission.contents
    imported = imported_packages(submission.workload, contents.folder) if submission.workload is not None else set()
    travels = normalised({name.partition("/")[0].removesuffix(".py"): "" for name in contents.files})
    needed = {name for name in {*imported, *OWN_NEEDS} if name not in travels}
    missing = missing_packages(needed, here, there)
    if "scaleray" not in there.packages and "scaleray" not in travels:
        missing["scaleray"] = here.packages.get("scaleray", "")
    return replace(submission, missing=missing)


def refuse_missing(submission: Submission) -> None:
    """Raise ClusterError where the cluster lacks packages, with the runtime_env that would bring them."""
    if not submission.missing:
        return
    listed = ", ".join(f'"{one}"' for one in submission.requirements)
    raise ClusterError(
        "the cluster",
        without_password(submission.url),
        f"it lacks {', '.join(submission.missing)}, which the job imports",
        f'runtime_env={{"pip": [{listed}]}} would bring them, as --bring-missing does; or put them into its image',
    )


def checked_and_started(
    submission: Submission, *, bring_missing: bool = False, allow_differences: bool = False, say: Say
) -> tuple[Jobs, str]:
    """Compare the cluster with what is needed, and start the job: the cluster's jobs, and its name. Raises UsageError.

    allow_differences: say what differs or is missing, and go on.
    """
    jobs = Jobs(submission.url)
    try:
        submission = compare(submission, jobs, say=say)
        if not bring_missing:
            refuse_missing(submission)
    except UsageError as exc:
        if not allow_differences:
            raise
        say(f"  warning: {exc}")
    return jobs, start(submission, jobs, bring_missing=bring_missing)


def start(submission: Submission, jobs: Jobs, *, bring_missing: bool = False) -> str:
    """Pack the working directory, send it, and start the job; its name."""
    environment: dict[str, Any] = {}
    if submission.variables:
        environment["env_vars"] = dict(submission.variables)
    if bring_missing and submission.missing:
        environment["pip"] = submission.requirements
    with tempfile.TemporaryDirectory(prefix="scaleray-submit-") as folder:
        package = Path(folder) / "working_dir.zip"
        with stage("packing the working directory"):
            pack(submission.contents, package)
        environment["working_dir"] = str(package)
        with stage(f"sending {package.stat().st_size / 2**20:.1f} MiB"):
            name = jobs.submit(
                submission.entrypoint,
                name=submission.name,
                runtime_env=environment,
                metadata={"submitted_by": SUBMITTED_BY, "secrets": ",".join(submission.variables)},
            )
    jobs.forget_probes()
    return name


def _workload_file(contents: Contents, name: str, config: Path) -> Path | None:
    """The workload's file, which must travel; None for a workload of a module. Its path is looked for where the config
    is, and where a command is started."""
    path, colon, _ = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        return None
    given = Path(path).expanduser()
    if given.is_absolute():
        hint = f"write its path from the working directory, such as {given.name}:..."
        raise ConfigError("workload.name", name, "a path of this machine means nothing on the cluster", hint)
    places = [contents.folder / given, config.resolve().parent / given]
    found = next((place for place in places if place.exists()), places[0])
    check_is_in(contents, found, what="workload.name")
    return found


def _secrets(names: Sequence[str]) -> dict[str, str]:
    """The values of these variables, which nobody prints."""
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        hint = "give names alone: values belong in the environment" if any("=" in name for name in missing) else ""
        raise ConfigError(
            "--secret-env", ", ".join(name.partition("=")[0] for name in missing), "it is not set here", hint
        )
    return {name: os.environ[name] for name in names}
