"""Where a command prints: lines for people, or JSON on stdout with everything else on stderr."""

from __future__ import annotations

import contextlib
import json as json_library
import sys
from collections.abc import Iterator, Mapping
from typing import Any

STOPPED = 130
"""Exit code of a command that Ctrl-C ended, as of other programs (128 + SIGINT)."""


class Output:
    """json: stdout is for JSON alone. width: columns of a console that is no terminal; None leaves rich's own."""

    def __init__(self, *, json: bool, width: int | None = None) -> None:
        from rich.console import Console

        from scaleray.reports.terminal.progress_line import StageDisplay

        self.console, self._json = Console(stderr=json), json
        self._stages = StageDisplay(self.console)
        if width is not None and not self.console.is_terminal:
            self.console.width = width

    def say(self, text: str) -> None:
        """Print a line as it is."""
        self._stages.say(text)

    def show(self, view: Any) -> None:
        """Print a line as it is, or a table."""
        if isinstance(view, str):
            self.say(view)
        else:
            self.console.print(view)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which a command shows what it is doing, and nothing but its record reaches a stdout that is for
        JSON: Ray prints there what its daemons say."""
        with self.kept_clean(), self._stages:
            yield

    def kept_clean(self) -> contextlib.AbstractContextManager[object]:
        """A context in which nothing else reaches a stdout that is for JSON: Ray prints there what its daemons say."""
        return contextlib.redirect_stdout(sys.stderr) if self._json else contextlib.nullcontext()


@contextlib.contextmanager
def with_stages() -> Iterator[None]:
    """A context in which a command that prints its result as plain lines says on stderr what it is doing."""
    from scaleray.common.progress import are_shown

    if are_shown():
        yield
        return
    from rich.console import Console

    from scaleray.reports.terminal.progress_line import StageDisplay

    with StageDisplay(Console(stderr=True)):
        yield


def print_json(
    values: Mapping[str, Any], *, written: Mapping[str, str] | None = None, summary: str = "", in_a_line: bool = False
) -> None:
    """Print what `--json` promises of every command: one object with the version of its keys, and by name the absolute
    paths or URIs of what the command wrote. summary: of a record, in a line. in_a_line: for a command that prints one
    again and again."""
    from scaleray.records.json_record import SCHEMA_VERSION

    told = {"summary": summary} if summary else {}
    whole = {"schema_version": SCHEMA_VERSION, **values, **told, "written": dict(written or {})}
    print(json_library.dumps(whole, indent=None if in_a_line else 2), flush=in_a_line)


def written_in(folder: str) -> dict[str, str]:
    """Folder of a run, study or sweep and its files by name; the folder alone if it cannot be listed."""
    from scaleray.common.filesystems import open_filesystem

    found = {"folder": folder}
    with contextlib.suppress(OSError, ValueError):
        import pyarrow.fs

        filesystem, inner = open_filesystem(folder)
        names = sorted(one.base_name for one in filesystem.get_file_info(pyarrow.fs.FileSelector(inner)))
        found |= {name: f"{folder.rstrip('/')}/{name}" for name in names if not name.startswith(".")}
    return found
