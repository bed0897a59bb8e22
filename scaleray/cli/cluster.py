"""`scaleray cluster`: the files and processes of the clusters that trainings run on."""

from __future__ import annotations

from cyclopts import App

from scaleray.cli.cluster_local import down, status, up
from scaleray.cli.cluster_write import write

cluster_app = App(
    name="cluster",
    help="Start a cluster on this machine; write the files that start one elsewhere.",
    help_format="plaintext",
)
for command in (up, status, down, write):
    cluster_app.command(command)
