"""A command to submit as a job to a remote cluster, with all checks that are possible before it is sent."""

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from scaleray.clusters.submit.clusters import Cluster, KubernetesCluster, RayCluster, cluster_of
from scaleray.clusters.submit.package import Contents, check_is_in, contents_of
from scaleray.clusters.submit.package_versions import (
    Versions,
    differences,
    imported_packages,
    missing_packages,
    normalised,
)
from scaleray.config import load_config
from scaleray.config.alerts import WEBHOOK, without_secrets
from scaleray.config.base import without_password
from scaleray.config.loading import ENV_PREFIX, read_environment, without_degrees
from scaleray.errors import ClusterError, ConfigError

Command = Literal["train", "study", "sweep", "verify", "profile"]
OWN_NEEDS = ("scaleray", "ray", "torch", "mlflow", "pyarrow", "pydantic", "cyclopts")
"""Packages required by every command of scaleray."""
DEFAULT_MAX_MIB = 100.0


@dataclass(frozen=True)
class Submission:
    """A submission before it is sent. missing: packages that the cluster lacks, with their versions here."""

    cluster: Cluster
    command: tuple[str, ...]
    """Arguments for scaleray: a command, its config and its options."""
    name: str
    contents: Contents
    workload: Path | None
    """The workload's file; None for an installed module."""
    variables: Mapping[str, str] = field(repr=False)
    """Secrets by name, without values if the cluster holds these."""
    settings: tuple[str, ...] = ()
    """Config keys that the environment here sets, which become options of the command there."""
    grace_s: float | None = None
    """Time limit of the last checkpoint in seconds, if the config sets one."""
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Value of `--to` for the cluster."""
        if self.cluster.name or not isinstance(self.cluster, RayCluster):
            return self.cluster.name
        return without_password(self.cluster.url)

    @property
    def requirements(self) -> list[str]:
        """The missing packages in pip's format."""
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
    """Run all checks that are possible on this side. Raises UsageError."""
    if not max_mib > 0:
        raise ConfigError("--max-mib", max_mib, "it must be more than 0 MiB")
    _refuse_secrets(overrides)
    cluster = cluster_of(to)
    contents = contents_of(working_dir or Path.cwd(), max_mib=max_mib)
    relative = check_is_in(contents, config, what="--config")
    # other commands have their own options, which they check themselves
    checked = load_config(config, flags=tuple(overrides) if command == "train" else (), planned=without_degrees)
    workload = _workload_file(contents, checked.workload.name, config)
    settings = _settings(secret_env)
    return Submission(
        cluster=cluster,
        command=(command, "-c", relative, *settings.values(), *overrides),
        name=name or f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        contents=contents,
        workload=workload,
        variables=_secrets(secret_env, are_here=not isinstance(cluster, KubernetesCluster)),
        settings=tuple(settings),
        grace_s=checked.checkpoint.grace_s if "grace_s" in checked.checkpoint.model_fields_set else None,
    )


def refuse_differences(submission: Submission, here: Versions, there: Versions, *, remedy: str) -> None:
    """Raise ClusterError if the cluster's versions do not match."""
    if found := differences(here, there):
        raise ClusterError.problem(
            "The cluster",
            f"{submission.place} has different versions: {'; '.join(found)}",
            f"{remedy}; --allow-differences submits anyway",
        )


def imported(submission: Submission) -> set[str]:
    """Packages that the workload imports and that are not uploaded with it."""
    if submission.workload is None:
        return set()
    return imported_packages(submission.workload, submission.contents.folder) - travelling(submission)


def travelling(submission: Submission) -> set[str]:
    """Packages in the working directory."""
    return {*normalised({name.partition("/")[0].removesuffix(".py"): "" for name in submission.contents.files})}


def with_missing(submission: Submission, here: Versions, there: Versions) -> Submission:
    """Add the packages to the submission that its code or scaleray needs and the cluster lacks."""
    travels = travelling(submission)
    needed = {name for name in {*imported(submission), *OWN_NEEDS} if name not in travels}
    missing = missing_packages(needed, here, there)
    if "scaleray" not in there.packages and "scaleray" not in travels:
        missing["scaleray"] = here.packages.get("scaleray", "")
    return replace(submission, missing=missing)


def refuse_missing(submission: Submission, *, remedy: str) -> None:
    """Raise ClusterError if the cluster lacks packages. remedy: how to install them."""
    if submission.missing:
        raise ClusterError.problem(
            "The cluster", f"{submission.place} lacks {', '.join(submission.missing)}, which the job imports", remedy
        )


def _refuse_secrets(overrides: Sequence[str]) -> None:
    """Raise ConfigError for options with a secret, since a cluster stores the command and shows it to its users."""
    shown = without_secrets(overrides)
    changed = next((at for at, word in enumerate(overrides) if shown[at] != word), None)
    if changed is None:
        return
    option, _, value = shown[changed].partition("=")
    if not option.startswith("--"):
        option, value = shown[changed - 1] if changed else "argument", shown[changed]
    hint = (
        f"put the address into an environment variable, and give --{WEBHOOK}_env NAME --secret-env NAME"
        if option == f"--{WEBHOOK}"
        else "remove the password, and pass it in an environment variable with --secret-env NAME"
    )
    raise ConfigError.problem(
        option, f"{value} contains a secret, but the cluster stores and shows a job's command", hint
    )


def _settings(secret_env: Sequence[str]) -> dict[str, str]:
    """Config keys that this environment sets, as options of the command, since the cluster's environment lacks them.
    Those named as secrets are sent as secrets. Raises ConfigError for any other secret."""
    found = {}
    for variable, text in sorted(os.environ.items()):
        if not variable.startswith(ENV_PREFIX) or variable in secret_env:
            continue
        [key] = read_environment({variable: text})
        found[key] = f"--{key}={text}"
        [shown] = without_secrets([found[key]])
        if shown != found[key]:
            raise ConfigError.problem(
                variable,
                f"{shown.partition('=')[2]} contains a secret, and the cluster stores and shows a job's command",
                f"--secret-env {variable} sends it as a secret",
            )
    return found


def _workload_file(contents: Contents, name: str, config: Path) -> Path | None:
    """The workload's file, which must be uploaded; None for a workload in a module. Its path is relative to the config
    or the current folder."""
    path, colon, _ = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        return None
    given = Path(path).expanduser()
    if given.is_absolute():
        hint = f"give its path relative to the working directory, such as {given.name}:..."
        raise ConfigError("workload.name", name, "a path on this machine does not exist on the cluster", hint)
    places = [contents.folder / given, config.resolve().parent / given]
    found = next((place for place in places if place.exists()), places[0])
    check_is_in(contents, found, what="workload.name")
    return found


def _secrets(names: Sequence[str], *, are_here: bool) -> dict[str, str]:
    """Values of these environment variables, which are never printed. are_here: whether to read them here."""
    if with_values := [name.partition("=")[0] for name in names if "=" in name]:
        raise ConfigError.problem(
            "--secret-env", f"takes only names, but {', '.join(with_values)} has a value", "set it in the environment"
        )
    if missing := [name for name in names if are_here and not os.environ.get(name)]:
        raise ConfigError.problem("--secret-env", f"names variables that are not set here: {', '.join(missing)}")
    return {name: os.environ[name] if are_here else "" for name in names}
