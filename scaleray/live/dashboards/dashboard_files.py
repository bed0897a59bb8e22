"""Contents of the folder that `scaleray dashboards write` writes, and the addresses of panels."""

from __future__ import annotations

from scaleray.live.dashboards import cluster_dashboard, rank_dashboard, run_dashboard, scaling_dashboard, scraping
from scaleray.live.dashboards.grafana import as_json, panel_ids

DASHBOARDS = {
    one.name: one
    for one in (
        run_dashboard.DASHBOARD,
        rank_dashboard.DASHBOARD,
        cluster_dashboard.DASHBOARD,
        scaling_dashboard.DASHBOARD,
    )
}


def files() -> dict[str, str]:
    """The text of each file by its name."""
    return {
        **{f"{name}.json": as_json(dashboard) for name, dashboard in DASHBOARDS.items()},
        "prometheus.yml": scraping.as_yaml(),
        "dcgm_counters.csv": scraping.dcgm_counters(),
    }


def panel_path(dashboard: str, panel: str) -> str:
    """The address of a panel within a Grafana, linked from its alert. Raises KeyError if there is none."""
    one = DASHBOARDS[dashboard]
    return f"/d/{one.uid}?viewPanel={panel_ids(one)[panel]}"
