"""The folder of dashboards and rules: written, or compared with what would be written."""

from __future__ import annotations

from pathlib import Path

from scaleray.errors import StorageError
from scaleray.monitoring.dashboards import files as dashboards
from scaleray.monitoring.rules import files as rules


def write_dashboards(folder: str | Path = "dashboards", *, check: bool = False) -> list[Path]:
    """Write the dashboards, the rules of alerts, and a configuration of Prometheus to begin with; gives the files.

    check: write nothing, and give the files that are missing or are not what would be written, as one edited by hand.
    Other files in the folder stay. Raises StorageError.
    """
    texts = {Path(folder) / name: text for name, text in {**dashboards.files(), **rules.files()}.items()}
    if check:
        return [path for path, text in texts.items() if _read(path) != text]
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text)
    except OSError as exc:
        raise StorageError("--folder", str(folder), f"it cannot be written: {exc.strerror}", "choose another") from exc
    return list(texts)


def _read(path: Path) -> str | None:
    """The text of a file; None where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
