"""Write the folder of dashboards and rules, or check it for changes."""

from __future__ import annotations

from pathlib import Path

from scaleray.common.parsing import load_yaml
from scaleray.config.alerts import check_grafana
from scaleray.config.base import without_password
from scaleray.errors import StorageError, UsageError, first_line
from scaleray.live.dashboards import dashboard_files as dashboards
from scaleray.live.rules import rule_files as rules


def write_dashboards(
    folder: str | Path = "dashboards",
    *,
    alerts: str | Path | None = None,
    grafana: str | None = None,
    check: bool = False,
) -> list[Path]:
    """Write dashboards, alert rules and a starter Prometheus config, and return the files.

    alerts: rule file that replaces the rules with default limits, such as a pipeline's `alerts.yaml`. grafana: base
    address of the links from alerts to panels. check: write nothing, and return files that are missing or were edited.
    Other files in the folder are unchanged. Raises StorageError, or UsageError for a file without rules or an invalid
    address."""
    if grafana is not None:
        _check(grafana, alerts)
    own = rules.files(grafana=grafana or "") if alerts is None else {rules.PATH: _rules(Path(alerts))}
    texts = {Path(folder) / name: text for name, text in {**dashboards.files(), **own}.items()}
    if check:
        return [path for path, text in texts.items() if _read(path) != text]
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text)
    except OSError as exc:
        raise StorageError.problem(
            "--folder", f"{folder} cannot be written: {exc.strerror}", "choose another folder"
        ) from exc
    return list(texts)


def _check(grafana: str, alerts: str | Path | None) -> None:
    """Raise UsageError if the address is invalid or --alerts is given, as the links in its file are fixed."""
    if alerts is not None:
        raise UsageError.problem(
            "--grafana", "cannot be combined with --alerts: the links in that file are fixed", "omit one of them"
        )
    try:
        check_grafana(grafana)
    except ValueError as exc:
        raise UsageError("--grafana", without_password(grafana), str(exc)) from exc


def _rules(file: Path) -> str:
    """Text of a rule file. Raises UsageError for any other file."""
    text = _read(file)
    if text is None:
        raise UsageError.problem(
            "--alerts", f"{file} cannot be read", "give the alerts.yaml of a promoted model's pipeline"
        )
    try:
        found = load_yaml(text)
    except ValueError as exc:
        raise UsageError.problem("--alerts", f"{file} is not YAML: {first_line(exc)}") from exc
    if not isinstance(found, dict) or not isinstance(found.get("groups"), list):
        raise UsageError.problem("--alerts", f"{file} has no Prometheus rules in `groups`")
    return text


def _read(path: Path) -> str | None:
    """Text of a file; None if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
