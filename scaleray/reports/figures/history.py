"""A figure over the months: a point for each measurement, the levels between its changes, and where they are."""

from __future__ import annotations

import itertools
from datetime import datetime
from typing import Any

from scaleray.reports.page.drawing import BLUE, GREEN, INK, VERMILION, Drawing, draw
from scaleray.scaling.curves.history import Course


def course_drawing(course: Course, *, name: str) -> Drawing:
    """The course as a figure. name: the stem of its file's name."""
    import numpy as np

    moments: list[Any] = [datetime.fromisoformat(str(one.values["started"])) for one in course.points]
    values = course.values
    ends = [0, *(one.index for one in course.changes), len(values)]

    def paint(ax: Any) -> None:
        ax.plot(moments, values, "o", color=BLUE, markersize=4.5, zorder=3)
        for start, end in itertools.pairwise(ends):
            level = float(np.median(values[start:end]))
            ax.plot([moments[start], moments[end - 1]], [level, level], color=INK, linewidth=1.3, zorder=2)
        for change in course.changes:
            colour = VERMILION if course.is_worse(change) else GREEN
            ax.axvline(moments[change.index], color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        ax.set_ylabel(course.figure.replace("_", " "))
        if course.figure in ("efficiency", "mfu"):
            ax.set_ylim(0, max(1.05, 1.05 * max(values)))
        ax.tick_params(axis="x", rotation=20)

    caption = "A dot for each measurement, lines for the levels; dashed where one changes beyond noise, red for worse."
    return draw(name, course.title, caption, paint, is_wide=True)
