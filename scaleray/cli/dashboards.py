"""`scaleray dashboards`: the files that Grafana, Prometheus and Alertmanager read, and their way into a Grafana."""

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
    """Write the dashboards, the rules of alerts, and a configuration of Prometheus to begin with.

    Parameters
    ----------
    folder
        Where to. What else lies there stays.
    alerts
        File of rules to write instead of those with the usual limits, such as the alerts.yaml in the pipeline of a
        promoted model, whose limits were measured.
    grafana
        Address of the Grafana, such as http://127.0.0.1:3000, that the alerts' links to their panels begin with; they
        are paths within it otherwise.
    check
        Write nothing; exit with 1 where a file is missing or is not what would be written, as one edited by hand.
    """
    from scaleray.live.grafana.written_dashboards import write_dashboards

    paths = write_dashboards(folder, alerts=alerts, grafana=grafana, check=check)
    differ = paths if check else []
    if json:
        written = {} if check else {path.name: str(path.resolve()) for path in paths}
        print_json({"differ": [path.name for path in differ]}, written=written)
    elif check:
        for path in differ:
            print(f"{path} {'is not what scaleray writes' if path.exists() else 'is missing'}", file=sys.stderr)
        more = f" --alerts {alerts}" if alerts is not None else f" --grafana {grafana}" if grafana else ""
        print(f"run scaleray dashboards write --folder {folder}{more}" if differ else "all files are as written")
    else:
        print("\n".join(f"wrote {path}" for path in paths))
    return 1 if differ else 0


@dashboards_app.command
def install(*, grafana: str, token_env: str = "GRAFANA_TOKEN", folder: str = "scaleray", json: Json = False) -> int:
    """Import the dashboards by the HTTP API of a Grafana; those that are there already are replaced.

    Parameters
    ----------
    grafana
        Address of the Grafana, such as http://127.0.0.1:3000.
    token_env
        Name of the environment variable with the token of a service account that may edit dashboards.
    folder
        Folder within Grafana, made where there is none.
    """
    from scaleray.live.grafana.grafana_client import install_dashboards

    pages = install_dashboards(grafana, token_env=token_env, folder=folder)
    if json:
        print_json({"dashboards": pages}, written=pages)
    else:
        print("\n".join(f"{name}: {page}" for name, page in pages.items()))
    return 0
