"""`scaleray dashboards`: files for Grafana, Prometheus and Alertmanager, and their import into Grafana."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App

from scaleray.cli.options import Json
from scaleray.cli.output import print_json

dashboards_app = App(
    name="dashboards", help="Dashboards of runs for Grafana, and rules for Prometheus.", help_format="plaintext"
)


@dashboards_app.command
def write(
    *,
    folder: Path = Path("dashboards"),
    alerts: Path | None = None,
    grafana: str | None = None,
    check: bool = False,
    json: Json = False,
) -> int:
    """Write the dashboards, the alert rules, and a sample configuration of Prometheus.

    Parameters
    ----------
    folder
        Folder to write to. Other files in it are kept.
    alerts
        File of rules to write instead of those with the default thresholds, such as the alerts.yaml in the pipeline of
        a promoted model, whose thresholds were measured.
    grafana
        Address of the Grafana, such as http://127.0.0.1:3000, with which the alerts' links to panels begin; by default
        the links are relative.
    check
        Write nothing; exit with 1 if a file is missing or differs from the one that would be written.
    """
    from scaleray.live.grafana.written_dashboards import write_dashboards

    paths = write_dashboards(folder, alerts=alerts, grafana=grafana, check=check)
    differ = paths if check else []
    if json:
        written = {} if check else {path.name: str(path.resolve()) for path in paths}
        print_json({"differ": [path.name for path in differ]}, written=written)
    elif check:
        for path in differ:
            print(f"{path} {'differs from the generated file' if path.exists() else 'is missing'}", file=sys.stderr)
        more = f" --alerts {alerts}" if alerts is not None else f" --grafana {grafana}" if grafana else ""
        print(f"run scaleray dashboards write --folder {folder}{more}" if differ else "all files are up to date")
    else:
        print("\n".join(f"wrote {path}" for path in paths))
    return 1 if differ else 0


@dashboards_app.command
def install(*, grafana: str, token_env: str = "GRAFANA_TOKEN", folder: str = "scaleray", json: Json = False) -> int:
    """Import the dashboards through the HTTP API of a Grafana; existing ones are replaced.

    Parameters
    ----------
    grafana
        Address of the Grafana, such as http://127.0.0.1:3000.
    token_env
        Name of the environment variable with the token of a service account that may edit dashboards.
    folder
        Folder within Grafana; created if it does not exist.
    """
    from scaleray.live.grafana.grafana_client import install_dashboards

    pages = install_dashboards(grafana, token_env=token_env, folder=folder)
    if json:
        print_json({"dashboards": pages}, written=pages)
    else:
        print("\n".join(f"{name}: {page}" for name, page in pages.items()))
    return 0
