"""Show a command's current activity: rows with the remaining time on a terminal, occasional lines in a pipe."""

from __future__ import annotations

import contextlib
import textwrap
import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from scaleray.common.printed import inert
from scaleray.common.progress import Stage, shown_by

SAID_S = 1.0
"""Minimum seconds of a stage for its time to be reported."""
QUIET_S = 2.0
"""Seconds after which a pipe receives the current stage."""
EVERY_S = 15.0
"""Seconds of silence after which a pipe receives the progress."""
BAR_S = 5.0
"""Seconds after which a stage of known length gets a bar on a terminal."""
BAR_WIDTH, LEAST_BAR_WIDTH, BESIDE_BAR = 24, 6, 5
"""Columns of a bar, which is shorter or omitted on a short line, and columns of the spinner and gaps."""
LONGEST_WORD = 40
"""Characters above which a word counts as part of a path or an address."""


class StageDisplay:
    """Context that shows the stages of this process and prints lines between them. above: further terminal content,
    shown above the stages."""

    def __init__(self, console: Console, *, above: Callable[[], RenderableType | None] = lambda: None) -> None:
        self.console, self._above = console, above
        self._stages: list[Stage] = []
        self._spinner = Spinner("dots")
        self._reported: set[Stage] = set()
        """Stages that were reported in a pipe."""
        self._spoke_at = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.RLock()
        self._context = contextlib.ExitStack()

    def __enter__(self) -> StageDisplay:
        self._context.enter_context(shown_by(self))
        if self.console.is_terminal:
            # rows that are gone at the end leave no trace, and what stands above them stays
            live = Live(get_renderable=self.view, console=self.console, refresh_per_second=4)
            self._context.enter_context(live)
        else:
            threading.Thread(target=self._report_periodically, name="scaleray-stages", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._stages.clear()
        self._context.close()

    def say(self, text: str) -> None:
        """Print a line, which a terminal breaks between words."""
        self._spoke_at = time.monotonic()
        shown = "\n".join(self._fitted(line) for line in inert(text).split("\n"))
        self.console.print(shown, highlight=False, markup=False, soft_wrap=True)

    def _fitted(self, line: str) -> str:
        """The line, broken to the terminal's width; commands, paths and addresses stay in one piece for copying."""
        is_copied = "scaleray " in line or any(len(word) > LONGEST_WORD for word in line.split())
        if not self.console.is_terminal or is_copied or not line.strip():
            return line
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.fill(line, self.console.width, subsequent_indent=indent, break_long_words=False)

    def begin(self, stage: Stage) -> None:
        """Show a stage that has begun."""
        with self._lock:
            self._stages.append(stage)

    def end(self, stage: Stage) -> None:
        """Report the time of a finished stage."""
        with self._lock:
            if stage in self._stages:
                self._stages.remove(stage)
            took_s = stage.elapsed_s
            if took_s >= SAID_S and not self._stop.is_set():
                self.say(f"  {stage.name}: {duration(took_s)}")

    def forget(self, stage: Stage) -> None:
        """Remove a stage without a report."""
        with self._lock, contextlib.suppress(ValueError):
            self._stages.remove(stage)

    def report_if_quiet(self) -> None:
        """Report the current stage in a pipe after a long silence."""
        with self._lock:
            silent_s = time.monotonic() - self._spoke_at
            for stage in self._stages[-1:]:
                if stage not in self._reported and min(stage.elapsed_s, silent_s) >= QUIET_S:
                    self._reported.add(stage)
                    self.say(f"  {stage.name} ...")
                elif stage in self._reported and silent_s >= EVERY_S:
                    self.say(f"  {stage.name} ... {so_far(stage)}")

    def _report_periodically(self) -> None:
        while not self._stop.wait(0.5):
            self.report_if_quiet()

    @property
    def under_way(self) -> list[Stage]:
        """The stages that are under way, outermost first."""
        return list(self._stages)

    def view(self) -> RenderableType:
        """Current content for a terminal."""
        above, stages = self._above(), list(self._stages)
        rows = Table.grid(padding=(0, 1))
        for stage in stages:
            words = so_far(stage)
            width = min(BAR_WIDTH, self.console.width - len(stage.name) - len(words) - BESIDE_BAR)
            is_long = stage.total and (stage.elapsed_s + (stage.left_s or 0.0)) >= BAR_S
            has_bar = is_long and width >= LEAST_BAR_WIDTH
            bar = ProgressBar(total=stage.total, completed=stage.done, width=width) if has_bar else ""
            rows.add_row(self._spinner, Text(stage.name), bar, Text(words))
        return Group(*([above] if above is not None else []), *([rows] if stages else []))


def so_far(stage: Stage) -> str:
    """Time since the start of a stage, its progress and remaining time, as far as known."""
    left_s = stage.left_s
    parts = [
        duration(stage.elapsed_s),
        f"{_amount(stage.done, stage.unit)} of {_amount(stage.total, stage.unit)} {stage.unit}".rstrip()
        if stage.total and stage.unit
        else "",
        stage.note,
        f"about {duration(left_s)} left" if left_s is not None and left_s >= 1 else "",
    ]
    return ", ".join(part for part in parts if part)


def duration(seconds: float) -> str:
    """Seconds as rounded text, such as 3.2 s, 45 s, 2 min 10 s or 3 h 20 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _amount(value: float, unit: str) -> str:
    return f"{value:.1f}" if unit in ("MiB", "GiB") else f"{value:,.0f}"
