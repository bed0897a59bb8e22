"""Where a command prints: lines for people, or JSON on stdout with everything else on stderr."""

from __future__ import annotations

import contextlib
import sys


class Output:
    """json: stdout is for JSON alone. width: columns of a console that is no terminal; None leaves rich's own."""

    def __init__(self, *, json: bool, width: int | None = None) -> None:
        from rich.console import Console

        self.console, self._json = Console(stderr=json), json
        if width is not None and not self.console.is_terminal:
            self.console.width = width

    def say(self, text: str) -> None:
        """Print a line as it is."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def kept_clean(self) -> contextlib.AbstractContextManager[object]:
        """A context in which nothing else reaches a stdout that is for JSON: Ray prints there what its daemons say."""
        return contextlib.redirect_stdout(sys.stderr) if self._json else contextlib.nullcontext()
