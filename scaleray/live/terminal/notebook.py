"""Display of a training started from Python: a table that is updated in a notebook cell or on a terminal; otherwise
nothing.
"""

import contextlib
import html
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from scaleray.live.state.run_state import RunState
from scaleray.records.run_record import EventRecord

REDRAWN_S = 0.3
"""Seconds between two updates of a notebook's table."""
MOST_LINES = 8
INTERVAL_S = 10.0
"""Seconds between two lines without a terminal."""


class Silent:
    """A display that shows nothing."""

    def show(self, messages: Sequence[Any]) -> None:
        """Ignore messages of the run."""

    def say(self, text: str) -> None:
        """Ignore a line."""

    def expect_steps(self, total_steps: int) -> None:
        """Ignore the number of steps of the whole training."""


class NotebookTable(Silent):
    """A table in a cell's output that is updated during the run. display: IPython's `display`."""

    def __init__(self, display: Any) -> None:
        self._total = 0
        self._state = RunState()
        self._lines: list[str] = []
        self._drawn_at = 0.0
        self._handle = display(_Html(self.html()), display_id=True)

    def show(self, messages: Sequence[Any]) -> None:
        for message in messages:
            self._state.take(message)
            if isinstance(message, EventRecord):
                self._lines.append(f"{message.kind}: {message.text}")
        if time.monotonic() - self._drawn_at >= REDRAWN_S:
            self.draw()

    def say(self, text: str) -> None:
        self._lines.append(text)
        self.draw()

    def expect_steps(self, total_steps: int) -> None:
        self._total = total_steps

    def draw(self) -> None:
        """Update the output."""
        self._drawn_at = time.monotonic()
        if self._handle is not None:
            self._handle.update(_Html(self.html()))

    def html(self) -> str:
        """The table, followed by the last lines."""
        rows: dict[str, str] = {}
        if (step := self._state.last) is not None:
            rows = {
                "step": f"{step.step}/{self._total or '?'}",
                "loss": f"{step.loss:.4f}",
                "learning rate": f"{step.learning_rate:.2e}",
                "samples/s": f"{self._state.window.rates().get('samples_per_s', 0.0):.4g}",
            }
        rows |= {name: f"{value:.4g}" for name, value in sorted(self._state.evaluated.items())}
        head, body = (
            "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)
            for tag, texts in (("th", rows), ("td", rows.values()))
        )
        lines = html.escape("\n".join(self._lines[-MOST_LINES:]))
        return f"<table><tr>{head}</tr><tr>{body}</tr></table><pre>{lines}</pre>"


class _Html:
    """HTML for IPython; frontends without HTML show nothing."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_html_(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return ""


@contextlib.contextmanager
def watching(*, always: bool) -> Iterator[Any]:
    """Display of a run. always: show lines even without a terminal or notebook."""
    if (display := notebook_display()) is not None:
        table = NotebookTable(display)
        try:
            yield table
        finally:
            table.draw()
    elif always or sys.stderr.isatty():
        from rich.console import Console

        from scaleray.live.terminal.live_table import Terminal

        with Terminal(Console(stderr=True), interval_s=INTERVAL_S) as terminal:
            yield terminal
    else:
        yield Silent()


def notebook_display() -> Any:
    """IPython's `display` if this process is a notebook kernel; otherwise None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display
