"""`scaleray cluster`: the files and processes of the clusters that trainings run on."""

from __future__ import annotations

from cyclopts import App

from scaleray.cli.cluster_write import check, write

cluster_app = App(
    name="cluster", help="Write what starts a cluster, and check what you made of it.", help_format="plaintext"
)
cluster_app.command(write)
cluster_app.command(check)
