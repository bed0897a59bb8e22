"""Clusters that the user has named in a file of the settings folder, with one line or section per cluster."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scaleray.clusters.manifests.file_versions import KUBERAY
from scaleray.common.parsing import load_yaml_with_lines
from scaleray.errors import ConfigError

DASHBOARD_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
FORMS = "write NAME: URL, or under NAME set kind (ray, kubernetes or slurm) and its keys (docs/cluster.md)"
Text = Annotated[str, Field(min_length=1)]


class _Cluster(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    """Name of the cluster in the file; empty for a bare address."""


class RayCluster(_Cluster):
    """A Ray cluster with a reachable dashboard."""

    kind: Literal["ray"] = "ray"
    url: Text


class KubernetesCluster(_Cluster):
    """A Kubernetes cluster with KubeRay, reached by kubectl."""

    kind: Literal["kubernetes"]
    context: str | None = None
    """Context of kubectl; by default its current one."""
    namespace: Text = "scaleray"
    manifest: str | None = None
    """File, or folder for kustomize, with one RayJob; by default generated from image, gpus and nodes."""
    image: str | None = None
    gpus: str | None = None
    """GPUs per node and their type, such as 8xh100; by default nodes without GPUs."""
    nodes: Annotated[int, Field(ge=1)] = 2
    kuberay: str | None = None
    """Release of the operator; by default it is queried or, if that is not permitted, assumed to be the tested one."""
    secret: Text = "scaleray-env"
    """Secret that contains the keys given with `--secret-env`."""
    queue: str | None = None
    """Kueue's local queue."""

    @property
    def tested_kuberay(self) -> str:
        """Operator release against which manifests are checked: the configured one, or else the tested one."""
        return self.kuberay or KUBERAY


class SlurmCluster(_Cluster):
    """A Slurm cluster whose commands run here or, over ssh, on a login node."""

    kind: Literal["slurm"]
    folder: Text
    """Folder visible to all nodes, in which each job gets a subfolder."""
    ssh: str | None = None
    """Host on which to run sbatch over ssh; by default this machine."""
    environment: str | None = None
    """Virtual environment with scaleray, as a path on the nodes; by default the batch script finds one."""
    options: tuple[str, ...] = ()
    """Options of sbatch, such as --partition=gpu."""
    gpus: str = "8xh100"
    nodes: Annotated[int, Field(ge=1)] = 2


Cluster = RayCluster | KubernetesCluster | SlurmCluster
KINDS: dict[str, type[Cluster]] = {"ray": RayCluster, "kubernetes": KubernetesCluster, "slurm": SlurmCluster}


def clusters_file() -> Path:
    """File with the names of clusters."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "scaleray" / "clusters.yaml"


def cluster_of(to: str | None) -> Cluster:
    """Return the cluster for a name, an address or Ray's environment variables. Raises ConfigError."""
    if to is None:
        given = next((os.environ[name] for name in DASHBOARD_VARIABLES if _is_url(os.environ.get(name, ""))), None)
        if given is None:
            raise ConfigError(
                "--to",
                None,
                "no cluster is configured",
                f"give its dashboard (http://HOST:8265) or a name in {clusters_file()}, or set RAY_API_SERVER_ADDRESS",
            )
        return RayCluster(url=given.rstrip("/"))
    if _is_url(to):
        return RayCluster(url=to.rstrip("/"))
    named = _named()
    if to in named:
        return _read(to, *named[to])
    if "://" in to or ":" in to:
        raise ConfigError(
            "--to", to, "a dashboard's address must begin with http:// or https://", "for example http://HOST:8265"
        )
    known = f"it has {', '.join(sorted(named))}" if named else "it has none"
    raise ConfigError("--to", to, f"no cluster in {clusters_file()} has this name; {known}", FORMS)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _named() -> dict[str, tuple[Any, int]]:
    """Sections of the user's file, each with its line."""
    path = clusters_file()
    try:
        values, lines = load_yaml_with_lines(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise ConfigError.problem(str(path), f"cannot be read: {exc}") from exc
    if not isinstance(values, Mapping):
        raise ConfigError(str(path), values, "it must map names to clusters", FORMS)
    return {str(name): (value, lines.get(str(name), 1)) for name, value in values.items()}


def is_named(url: str) -> bool:
    """Whether the user's file contains a Ray cluster with this address."""
    with contextlib.suppress(ConfigError):
        given = (
            one.get("url") if isinstance(one, Mapping) else one for one in (section for section, _ in _named().values())
        )
        return any(str(one).rstrip("/") == url.rstrip("/") for one in given)
    return False


def _read(name: str, given: Any, line: int) -> Cluster:
    """Parse a section of the file. Raises ConfigError if it is invalid."""
    where = f"{clusters_file()}:{line} {name}"
    if isinstance(given, str) and _is_url(given):
        return RayCluster(name=name, url=given.rstrip("/"))
    if not isinstance(given, Mapping):
        raise ConfigError(
            where, given, "it must be a URL or a mapping", f"{FORMS}; for example {name}: http://10.0.0.1:8265"
        )
    kind = given.get("kind", "ray")
    if kind not in KINDS:
        raise ConfigError(f"{where}.kind", kind, f"it must be one of {', '.join(KINDS)}")
    try:
        found = KINDS[kind].model_validate({**given, "kind": kind, "name": name})
    except ValidationError as exc:
        first = exc.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(one for one in KINDS[kind].model_fields if one != "name")
        value = None if first["type"] == "missing" else first["input"]
        raise ConfigError(
            f"{where}.{key}", value, first["msg"].lower(), f"a cluster of this kind has: {known}"
        ) from exc
    if isinstance(found, RayCluster) and not _is_url(found.url):
        raise ConfigError(f"{where}.url", found.url, "it must begin with http:// or https://", "http://HOST:8265")
    return found
