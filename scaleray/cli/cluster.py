"""`scaleray cluster`: the files and processes of the clusters that trainings run on."""

from __future__ import annotations

from cyclopts import App

from scaleray.cli.cluster_local import down, status, up
from scaleray.cli.cluster_write import check, write

cluster_app = App(
    name="cluster",
    help="Start a cluster on this machine; write what starts one elsewhere, and check what you made of it.",
    help_format="plaintext",
)
for command in (up, status, down, write, check):
    cluster_app.command(command)
