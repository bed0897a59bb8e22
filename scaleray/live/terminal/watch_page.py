"""The page of a watched run: one screen of a terminal at least 40 columns wide."""

import math
import time
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from scaleray.common.printed import printable, quantity
from scaleray.records.alert_record import Alert
from scaleray.records.live_state import LOST, RUNNING, STARTING, LiveState, RankNow
from scaleray.records.phases import PART_IN_WORDS, Phase, to_text
from scaleray.records.terminal.progress_line import duration
from scaleray.records.text import units

BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-=+*#@"
LOG_FROM = 20.0
"""Ratio of the largest to the smallest value above which heights are logarithmic."""


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """A curve in at most `width` characters, each the mean of the values in its part, or `x` if none of them is a
    number.
    """
    if not values or width < 1:
        return ""
    columns = _columns(values, min(width, len(values)))
    known = [value for value in columns if value is not None]
    if not known:
        return "x" * len(columns)
    if min(known) > 0 and max(known) / min(known) >= LOG_FROM:
        columns = [None if value is None else math.log(value) for value in columns]
        known = [value for value in columns if value is not None]
    marks, low, high = ASCII if ascii_only else BLOCKS, min(known), max(known)
    scale = (len(marks) - 1) / (high - low) if high > low else 0.0
    return "".join("x" if value is None else marks[round((value - low) * scale)] for value in columns)


def _columns(values: Sequence[float | None], count: int) -> list[float | None]:
    """Mean of the numbers in each of `count` equal parts; None for a part without numbers."""
    found: list[float | None] = []
    for number in range(count):
        begin, end = number * len(values) // count, (number + 1) * len(values) // count
        part = [value for value in values[begin:end] if value is not None and math.isfinite(value)]
        found.append(sum(part) / len(part) if part else None)
    return found


STYLES = {STARTING: "cyan", RUNNING: "green", LOST: "red", "FINISHED": "green", "FAILED": "red", "KILLED": "yellow"}
SEVERITIES = {"critical": "bold red", "warning": "yellow"}
COLOURS = {
    Phase.INPUT: "yellow",
    Phase.COPY: "bright_yellow",
    Phase.FORWARD: "blue",
    Phase.BACKWARD: "bright_blue",
    Phase.COMMUNICATION: "red",
    Phase.STRAGGLER: "magenta",
    Phase.OPTIMIZER: "green",
    Phase.HOST: "cyan",
    Phase.EVALUATION: "bright_green",
    Phase.CHECKPOINT: "bright_magenta",
}
NARROW = 60
"""Width below which a page has one text column and omits less important rows."""
LEAST_SHARE = 0.005
"""Parts below this share of a step are not named."""
MOST_EVENTS = 3
SILENT_S = 5.0
"""Seconds without a heartbeat from which a page reports the silence."""


def watch_page(state: LiveState, *, width: int, where: str = "") -> RenderableType:
    """The page of a run. width: number of columns. where: source of the state."""
    rows = Table.grid(padding=(0, 1))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(ratio=1, overflow="fold")
    inner = max(10, width - 12)
    for name, value in _rows(state, inner, is_narrow=width < NARROW):
        rows.add_row(name, Text(printable(value), overflow="fold") if isinstance(value, str) else value)  # no markup
    parts: list[RenderableType] = [_title(state), rows]
    parts += [_alert(alert) for alert in state.firing]
    if state.ranks and (len(state.ranks) > 1 or not state.has_ended):
        parts += ["", ranks_table(state, width=width)]
    if lines := [*state.events[-MOST_EVENTS:], *state.notes]:
        parts += ["", *(Text(printable(line.splitlines()[0]), style="dim") for line in lines if line)]
    if where:
        parts.append(Text(f"source: {where}", style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def result_of(state: LiveState) -> str:
    """Last value of the run's target metric, and its best value if that differs; empty before the first one."""
    if (last := state.metrics.get(state.judged_by)) is None:
        return ""
    words = f"{state.judged_by} {units.figure(last)}"
    return words if state.best in (None, last) else f"{words}, best {units.figure(state.best)}"


def _title(state: LiveState) -> Text:
    title = Text(printable(state.name), style="bold")
    title.append(f"  {state.status}", style=STYLES.get(state.status, ""))
    many = quantity(state.workers, "worker") if state.workers else ""
    for word in (state.kind if state.kind != "train" else "", many, state.strategy):
        title.append(f"  {word}" if word else "", style="dim")
    return title


def _rows(state: LiveState, width: int, *, is_narrow: bool) -> Iterator[tuple[str, RenderableType]]:
    """Rows of a page: name and value."""
    if state.verdict and state.has_ended:
        yield "end", state.verdict.splitlines()[0]
    if state.status == LOST:
        yield "", Text(f"silent for {_ago(state)}: it was killed, or its machine is gone", style="red")
    elif not state.has_ended and _age_s(state) > SILENT_S:
        yield "", Text(f"silent for {_ago(state)}", style="yellow")
    if result := result_of(state):
        yield "result", result
    yield "progress", _progress(state, width, is_narrow=is_narrow)
    if state.curve:
        yield "loss", _loss(state, width)
    if others := [f"{n} {units.figure(value)}" for n, value in sorted(state.metrics.items()) if n != state.judged_by]:
        yield "evaluated", ", ".join(others)
    if state.samples_per_s:
        yield "speed", _speed(state)
    if sum(state.phases.values()) > 0:
        yield "step", PhaseBar(state.phases)
        yield "", Legend(state.phases)
    if health := _health(state):
        yield "health", ", ".join(health)
    if not is_narrow and state.mlflow_link:
        yield "MLflow", Text(state.mlflow_link, style="dim", overflow="fold")
    if not is_narrow and state.run_dir:
        yield "folder", Text(state.run_dir, style="dim", overflow="fold")


def _progress(state: LiveState, width: int, *, is_narrow: bool) -> RenderableType:
    done, total = (state.done or 0.0, state.total) if state.unit else (state.step, state.total_steps)
    words = f"{done:,.0f} of {total:,.0f} {state.unit or 'steps'}" if total else f"step {done:,.0f}"
    parts = [words]
    if state.epoch is not None:
        parts.append(f"epoch {state.epoch:.4g}")
    if state.started_at is not None and state.seen_at is not None:
        parts.append(duration(max(0.0, state.seen_at - state.started_at)))
    if state.left_s is not None:
        parts.append(f"about {duration(state.left_s)} left")
    text = Text(", ".join(parts))
    if not total:
        return text
    return Group(Bar(done, total, min(width, 30 if is_narrow else 60)), text)


def _loss(state: LiveState, width: int) -> RenderableType:
    values = [loss for _, loss in state.curve]
    known = [loss for loss in values if loss is not None]
    words = [units.figure(state.loss) if state.loss is not None else "not finite"]
    if known:
        words += [f"from {units.figure(known[0])}", f"lowest {units.figure(min([*known, state.loss or known[0]]))}"]
    if state.learning_rate is not None:
        words.append(f"lr {state.learning_rate:.3g}")
    if state.grad_norm is not None:
        words.append(f"grad {state.grad_norm:.3g}")
    return Group(Spark(values, min(width, 80)), Text(", ".join(words)))


def _speed(state: LiveState) -> str:
    rate = state.samples_per_s or 0.0
    words = [f"{units.count(rate)} samples/s"]
    if state.tokens_per_s:
        words.append(f"{units.count(state.tokens_per_s)} tokens/s")
    if state.expected_samples_per_s:
        expected = state.expected_samples_per_s
        words.append(f"{rate / expected:.0%} of the {units.count(expected)} predicted")
    elif state.best_samples_per_s and not state.has_ended and rate < 0.9 * state.best_samples_per_s:
        words.append(f"{rate / state.best_samples_per_s:.0%} of its best")
    if state.step_time_s:
        words.append(f"{units.seconds(state.step_time_s)} a step")
    if state.input_wait_share is not None:
        words.append(f"input {state.input_wait_share:.1%}")
    return ", ".join(words)


def _health(state: LiveState) -> list[str]:
    words = []
    if state.goodput is not None:
        words.append(f"goodput {state.goodput:.0%} (share of the time in steps)")
    if state.checkpoint_step is not None:
        ago = "" if state.has_ended or not state.checkpoint_at else f", {duration(_since(state.checkpoint_at))} ago"
        words.append(f"checkpoint of step {state.checkpoint_step:,}{ago}")
    if state.loss_scale is not None:
        words.append(f"loss scale {state.loss_scale:.4g}")
    if state.nonfinite_steps:
        words.append(f"not finite in {state.nonfinite_steps:,} steps")
    if state.attempts > 1:
        words.append(quantity(state.attempts - 1, "restart"))
    if state.repeated_steps:
        words.append(f"{state.repeated_steps:,} steps repeated")
    if state.waiting_points:
        words.append(f"MLflow is unreachable: {state.waiting_points:,} points are waiting")
    return words


def _alert(alert: Alert) -> Text:
    style = SEVERITIES.get(alert.severity, "cyan")
    return Text.assemble((f"{alert.severity.upper()} {alert.name}", style), f": {printable(alert.summary)}")


def _age_s(state: LiveState) -> float:
    return 0.0 if state.seen_at is None else _since(state.seen_at)


def _ago(state: LiveState) -> str:
    return duration(_age_s(state))


def _since(at: float) -> float:
    return max(0.0, time.time() - at)


def _colour(phase: str) -> str:
    return COLOURS.get(Phase(phase), "white") if phase in set(Phase) else "white"


class Bar:
    """Progress bar on its own line."""

    def __init__(self, done: float, total: float, width: int) -> None:
        self.bar, self.width = ProgressBar(total=total, completed=done, width=width), width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.bar.__rich_console__(console, options)
        yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, min(self.width, options.max_width))


class PhaseBar:
    """A step as a bar divided into its parts."""

    def __init__(self, phases: dict[str, float]) -> None:
        self.phases = phases

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, whole = min(60, options.max_width), sum(self.phases.values())
        ordered = [str(part) for part in PART_IN_WORDS if str(part) in self.phases]
        mark, at, drawn = "=" if options.ascii_only else "█", 0.0, 0
        for name in ordered:
            at += self.phases[name]
            end = round(at / whole * width)
            yield Segment(mark * (end - drawn), Style.parse(_colour(name)))
            drawn = end
        yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, options.max_width)


class Legend:
    """The parts of a step with their shares, the largest first."""

    def __init__(self, phases: dict[str, float]) -> None:
        self.phases = phases

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole, line = sum(self.phases.values()), Text()
        for name, seconds in sorted(self.phases.items(), key=lambda pair: -pair[1]):
            if seconds / whole < LEAST_SHARE:
                continue
            words = PART_IN_WORDS.get(Phase(name), name) if name in set(Phase) else name
            mark = "#" if options.ascii_only else "■"
            part = Text.assemble((mark, _colour(name)), f" {words} {seconds / whole:.0%}")
            if line and len(line) + 2 + len(part) > options.max_width:  # a part is not torn from its colour
                yield line
                line = Text()
            line.append_text(Text("  ") + part if line else part)
        yield line


class Spark:
    """A curve on one line, in characters that the console supports."""

    def __init__(self, values: list[float | None], width: int) -> None:
        self.values, self.width = values, width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width, options.max_width)
        yield Text(sparkline(self.values, width, ascii_only=options.ascii_only), style="cyan", no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, min(self.width, options.max_width))


MOST_RANKS = 8
LATE_SHARE = 0.05
"""Lateness above this share of a step is highlighted."""


def ranks_table(state: LiveState, *, width: int) -> Table:
    """Table with one row per rank. Of many ranks, it shows the silent, late and delayed ones, and the first few."""
    is_narrow = width < NARROW
    has_late = any(rank.late_s is not None for rank in state.ranks)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for name in ("rank", *(["node"] if not is_narrow else []), "step", *(["late"] if has_late else [])):
        table.add_column(name, justify="left" if name == "node" else "right", no_wrap=True)
    if not is_narrow:
        table.add_column("step time", justify="right", no_wrap=True)
        table.add_column("memory", justify="right", no_wrap=True)
    if not state.has_ended:
        table.add_column("doing", overflow="ellipsis", no_wrap=True)
    shown = worth_showing(state)
    for rank in shown:
        table.add_row(*_cells(rank, state, is_narrow=is_narrow, has_late=has_late))
    if rest := len(state.ranks) - len(shown):
        table.caption = f"{rest:,} more ranks{_others(state, shown)}"
    return table


def worth_showing(state: LiveState) -> list[RankNow]:
    """The ranks that are most important to show, in rank order."""
    ranks = sorted(state.ranks, key=lambda rank: (-_silence(rank), rank.step, -(rank.late_s or 0.0), rank.rank))
    return sorted(ranks[:MOST_RANKS], key=lambda rank: rank.rank)


def _others(state: LiveState, shown: list[RankNow]) -> str:
    named = {rank.rank for rank in shown}
    late = [rank.late_s for rank in state.ranks if rank.rank not in named and rank.late_s is not None]
    return f", none later than {units.seconds(max(late))}" if late else ""


def _cells(rank: RankNow, state: LiveState, *, is_narrow: bool, has_late: bool) -> list[Text]:
    step_s = rank.step_time_s or state.step_time_s or 0.0
    is_late = rank.late_s is not None and step_s > 0 and rank.late_s / step_s >= LATE_SHARE
    cells = [Text(str(rank.rank))]
    if not is_narrow:
        cells.append(Text(rank.node))
    step = state.step if state.status == "FINISHED" else rank.step  # the last sample of a rank may be older
    cells.append(Text(f"{step:,}"))
    if has_late:
        cells.append(Text(units.seconds(rank.late_s) if rank.late_s else "-", style="bold yellow" if is_late else ""))
    if not is_narrow:
        cells.append(Text(units.seconds(rank.step_time_s)))
        cells.append(Text(units.memory(rank.memory.get("peak_bytes") or rank.memory.get("resident_bytes"))))
    if not state.has_ended:
        cells.append(_doing(rank))
    return cells


def _doing(rank: RankNow) -> Text:
    if rank.silent_s >= SILENT_S:
        return Text(f"silent for {rank.silent_s:.0f} s", style="bold red")
    words = to_text(rank.phase, rank.step)
    return Text(f"{words} for {rank.since_s:.0f} s" if rank.since_s >= SILENT_S else words)


def _silence(rank: RankNow) -> float:
    return rank.silent_s if rank.silent_s >= SILENT_S else 0.0
