"""Print the result of `scaleray doctor`: a row for each check, the checks that do not apply, and the verdict."""

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from scaleray.records.doctor_record import GREEN, NOT_APPLICABLE, RED, YELLOW, DoctorRecord, PreflightCheck
from scaleray.records.terminal.printed_record import print_whole

STYLES = {RED: "bold red", YELLOW: "yellow", GREEN: "green"}
NARROWEST_WHOLE = 100
"""Terminal width below which the limit is shown in brackets after the finding."""


def show_preflight(console: Console, record: DoctorRecord) -> None:
    """Print the table, the reasons for checks that do not apply, and the verdict."""
    print_whole(console, preflight_table(record, has_room=not console.is_terminal or console.width >= NARROWEST_WHOLE))
    reasons: dict[str, list[str]] = {}
    for check in record.checks:
        if check.verdict == NOT_APPLICABLE:
            reasons.setdefault(check.found, []).append(check.name)
    for reason, names in reasons.items():
        _say(console, f"not applicable ({reason}): {', '.join(names)}")
    if record.mlflow_link:
        _say(console, f"MLflow: {record.mlflow_link}")
    _say(console, f"{record.verdict}; {record.duration_s:.1f} s", style=STYLES.get(record.worst, ""))


def preflight_table(record: DoctorRecord, *, has_room: bool = True) -> RenderableType:
    """Table with a row for each applicable check, with a remedy if it is not green. has_room: whether limits have their
    own column."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("check", max_width=16)
    table.add_column("found" if has_room else "found (allowed)", overflow="fold")
    if has_room:
        table.add_column("allowed", overflow="fold")
    for check in record.checks:
        if check.verdict == NOT_APPLICABLE:
            continue
        cells = [Text(check.verdict, style=STYLES[check.verdict]), Text(check.name), _found(check, has_room)]
        table.add_row(*cells, *([Text(check.allowed, style="dim")] if has_room else []))
    return table


def _found(check: PreflightCheck, has_room: bool) -> Text:
    text = Text(check.found)
    if not has_room and check.allowed:
        text.append(f" ({check.allowed})", style="dim")
    if check.remedy:
        text.append(f"\n-> {check.remedy}", style="italic")
    return text


def _say(console: Console, text: str, *, style: str = "") -> None:
    console.print(text, style=style or None, highlight=False, markup=False, soft_wrap=True)
