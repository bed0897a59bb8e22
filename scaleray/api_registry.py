"""`scaleray registry curve` as a function."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scaleray.installed import names_what_is_missing

if TYPE_CHECKING:
    from scaleray.scaling.curves.history import Course


@names_what_is_missing
def experiment_curves(
    *,
    model: str | None = None,
    gpus: int | None = None,
    since: str | None = None,
    figure: str = "efficiency",
    html: str | Path | None = None,
    uri: str | None = None,
) -> list[Course]:
    """How a figure of the same training on the same machines went over time, with its changes: `scaleray registry
    curve`.

    model: a part of the workload's name. gpus: number of workers. since: a date such as 2026-11-01, or how long ago, as
    in 7d. figure: efficiency, samples_per_s, mfu, speedup or step_time_s. html: a file for the page. A change of level
    is a `ChangePoint` of `.changes`, found by the E-divisive method. Raises UsageError where nothing has the figure.
    """
    from scaleray.cli.registry_curve import curves, write_page

    found = curves(model=model, gpus=gpus, since=since, figure=figure, uri=uri)
    if html is not None:
        write_page(found, Path(html), command="scaleray.experiment_curves(...)")
    return found
