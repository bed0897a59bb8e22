"""Clusters by names of the user's own: a file in the user's folder of settings, `NAME: URL` a line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from scaleray.errors import ConfigError

DASHBOARD_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")


def clusters_file() -> Path:
    """Where names of clusters stand."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "scaleray" / "clusters.yaml"


def dashboard_of(to: str | None) -> str:
    """URL of the dashboard of a cluster that is given by name or address, or by Ray's variables. Raises ConfigError."""
    if to is None:
        given = next((os.environ[name] for name in DASHBOARD_VARIABLES if _is_url(os.environ.get(name, ""))), None)
        if given is None:
            raise ConfigError(
                "--to",
                None,
                "there is no cluster to submit to",
                f"give its dashboard (http://HOST:8265), a name of {clusters_file()}, or set RAY_API_SERVER_ADDRESS",
            )
        return given.rstrip("/")
    if _is_url(to):
        return to.rstrip("/")
    names = _names()
    if to in names:
        return names[to].rstrip("/")
    if "://" in to or ":" in to:
        raise ConfigError(
            "--to",
            to,
            "jobs are submitted to a dashboard, whose address begins with http:// or https://",
            "for example http://HOST:8265",
        )
    known = f"known are {', '.join(sorted(names))}" if names else "there is none"
    raise ConfigError("--to", to, f"no cluster of this name is in {clusters_file()}; {known}", "add a line NAME: URL")


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _names() -> dict[str, str]:
    path = clusters_file()
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(str(path), "not readable", f"it holds names and URLs: {exc}") from exc
    if not isinstance(values, Mapping) or not all(isinstance(url, str) and _is_url(url) for url in values.values()):
        raise ConfigError(str(path), values, "each line is NAME: URL", "for example  mine: http://10.0.0.1:8265")
    return {str(name): url for name, url in values.items()}
