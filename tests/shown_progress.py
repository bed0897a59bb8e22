"""What somebody sees of the stages of a command at moments of its course, on a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from rich.console import Console

from scaleray.common import progress
from scaleray.records.terminal import progress_line
from scaleray.records.terminal.progress_line import StageDisplay

LATER_S = 600.0


class Shown:
    """Stages on a terminal of 80 columns, or in a pipe. views: what is to be seen whenever `look` was called."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.display = StageDisplay(Console(file=io.StringIO(), force_terminal=is_terminal, width=80))
        self.views: list[str] = []

    def look(self) -> None:
        """Take down what is to be seen now, ten minutes later: in a pipe the lines of stages that have been silent."""
        for stage in self.display.under_way:
            stage.started_at -= LATER_S
        if self.display.console.is_terminal:
            page = Console(file=io.StringIO(), width=80)
            page.print(self.display.view())
            self.views.append(page.file.getvalue())
        else:
            self.display.report_if_quiet()
            self.views.append(self.display.console.file.getvalue())


@contextlib.contextmanager
def shown(monkeypatch, *, is_terminal: bool) -> Iterator[Shown]:
    """Whoever sees the stages of this process meanwhile, for whom everything is long enough to be told of."""
    for name in ("QUIET_S", "EVERY_S", "BAR_S"):
        monkeypatch.setattr(progress_line, name, 0.0)
    seen = Shown(is_terminal=is_terminal)
    with progress.shown_by(seen.display):
        yield seen
