"""Output of a command: lines of text, or JSON on stdout with all else on stderr."""

from __future__ import annotations

import contextlib
import json as json_library
import sys
from collections.abc import Iterator, Mapping
from typing import Any

STOPPED = 130
"""Exit code of a command ended by Ctrl-C, as usual for programs (128 + SIGINT)."""


class Output:
    """Output of a command. json: stdout is only for JSON. width: of a console that is not a terminal; None for rich's
    default."""

    def __init__(self, *, json: bool, width: int | None = None) -> None:
        from rich.console import Console

        from scaleray.records.terminal.progress_line import StageDisplay

        self.console, self._json = Console(stderr=json), json
        self._stages = StageDisplay(self.console)
        if width is not None and not self.console.is_terminal:
            self.console.width = width

    def say(self, text: str) -> None:
        """Print a line unchanged."""
        self._stages.say(text)

    def show(self, view: Any) -> None:
        """Print a line unchanged, or a table."""
        if isinstance(view, str):
            self.say(view)
        else:
            self.console.print(view)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context that shows a command's progress and, with JSON, keeps everything but the record off stdout,
        to which Ray prints its daemons' output."""
        with self.kept_clean(), self._stages:
            yield

    def kept_clean(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that, with JSON, keeps other output off stdout, to which Ray prints its daemons' output."""
        return contextlib.redirect_stdout(sys.stderr) if self._json else contextlib.nullcontext()


@contextlib.contextmanager
def with_stages() -> Iterator[None]:
    """Context that shows a command's progress on stderr, for commands that print plain lines."""
    from scaleray.common.progress import are_shown

    if are_shown():
        yield
        return
    from rich.console import Console

    from scaleray.records.terminal.progress_line import StageDisplay

    with StageDisplay(Console(stderr=True)):
        yield


def print_json(
    values: Mapping[str, Any], *, written: Mapping[str, str] | None = None, summary: str = "", in_a_line: bool = False
) -> None:
    """Print the result of `--json`: one object with the version of its keys, and absolute paths or URIs of written
    files by name. summary: of a record, in one line. in_a_line: for commands that print objects repeatedly."""
    from scaleray.records.json_record import SCHEMA_VERSION

    more = {"summary": summary} if summary else {}
    whole = {"schema_version": SCHEMA_VERSION, **values, **more, "written": dict(written or {})}
    print(json_library.dumps(whole, indent=None if in_a_line else 2), flush=in_a_line)


def written_in(folder: str) -> dict[str, str]:
    """Folder of a run, study or sweep and its files, by name; only the folder if it cannot be listed."""
    from scaleray.common.filesystems import open_filesystem

    found = {"folder": folder}
    with contextlib.suppress(OSError, ValueError):
        import pyarrow.fs

        filesystem, inner = open_filesystem(folder)
        names = sorted(one.base_name for one in filesystem.get_file_info(pyarrow.fs.FileSelector(inner)))
        found |= {name: f"{folder.rstrip('/')}/{name}" for name in names if not name.startswith(".")}
    return found
