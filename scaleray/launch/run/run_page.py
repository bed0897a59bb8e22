"""The report of one training, on the page that studies and sweeps use too."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaleray.common import metric_names as names
from scaleray.common.printed import quantity
from scaleray.live.steps_file import step_rows
from scaleray.profiling.report.profile_figure import profile_drawings
from scaleray.profiling.verdict.of_run import verdict_of_run
from scaleray.recording.study_values import thinned
from scaleray.records import start
from scaleray.records.page import drawing
from scaleray.records.page.drawing import BLUE, ORANGE, VERMILION, Drawing, draw
from scaleray.records.page.page import BESIDE, Fact, Page, Section, where, write
from scaleray.records.profile_record import MemoryNumbers, RunProfile
from scaleray.records.rows import by_metric
from scaleray.records.run_record import RunRecord
from scaleray.records.text.study_sweep_tables import Table, sentence_case
from scaleray.records.text.units import figure, memory, seconds, shown

MOST_POINTS = 600
"""Maximum number of points of a line; with more values, each point is the mean of a window."""
FACTS = (
    ("Throughput", names.POINT_SAMPLES_PER_S, "samples/s, steady state"),
    ("Step time", names.POINT_STEP_TIME_S, "median, steady state"),
    ("Waits for input", names.INPUT_WAIT_SHARE, "of the step time"),
    ("Peak memory", names.PEAK_MEMORY_BYTES, "of the largest worker"),
)
"""Heading of the page of a training, with a note on its meaning."""
MOST_EVALUATIONS = 40
"""Maximum number of evaluation figures on a page; each takes a quarter of a second to draw."""
LONGEST_HEADLINE = 80
"""Maximum characters of a verdict in the headline, such as `target reached`; an error gets its own paragraph."""


def write_run_report(
    record: RunRecord, folder: str | Path, *, steps: str | None, evaluations: Mapping[str, Sequence[tuple[int, float]]]
) -> list[Path]:
    """Write report.html, evaluations.csv and figures/ into the folder; returns their paths, report.html first.

    steps: text of steps.csv; curves over steps need it. evaluations: (step, value) by metric.
    """
    page = run_page(record, rows=step_rows(steps), evaluations=evaluations)
    points = [
        {"metric": name, "step": step, "value": value} for name, at in sorted(evaluations.items()) for step, value in at
    ]
    return write(page, folder, rows={"evaluations": points} if points else {})


def run_page(
    record: RunRecord,
    *,
    rows: Sequence[Mapping[str, float]],
    evaluations: Mapping[str, Sequence[tuple[int, float]]],
    closing: str = BESIDE,
) -> Page:
    """The page of a training. closing: the page's last line, about the files next to it."""
    judged = record.judged
    loss = [_line("loss", "Loss", rows, "loss", "loss", evaluations=_of(evaluations, "loss"))] if rows else []
    others = [(name, at) for name, at in sorted(evaluations.items()) if len(at) > 1 and not name.endswith("loss")]
    others.sort(key=lambda each: judged is None or each[0] != judged.name)
    drawn = [_evaluations(name, at) for name, at in others[:MOST_EVALUATIONS]]
    learning = [*drawn[:1], *loss, *drawn[1:]] if judged and others and others[0][0] == judged.name else [*loss, *drawn]
    left_out = (
        [f"{len(others) - MOST_EVALUATIONS} metrics of {len(others)} have no figure here: see evaluations.csv"]
        if len(others) > MOST_EVALUATIONS
        else []
    )
    if any(math.isfinite(row["grad_norm"]) for row in rows):
        learning.append(_line("grad-norm", "Gradient norm", rows, "grad_norm", "gradient norm before clipping"))
    if rows:
        learning.append(_line("learning-rate", "Learning rate", rows, "learning_rate", "learning rate", smooth=False))
    speed = [_step_times(rows, record.step_time_s), _throughput(rows)] if rows else []
    held = [_memory(record)] if any(record.memory) or any(record.peak_memory_bytes) else []
    sections = [
        Section("Learning", words=left_out, drawings=learning),
        Section("Speed", drawings=speed),
        Section("Memory", drawings=held),
    ]
    events = (
        [Section("What happened", tables=[Table("Events", ("event",), tuple((e,) for e in record.events))])]
        if record.events
        else []
    )
    values = ", ".join(f"{name} {figure(value)}" for name, value in sorted(record.metrics.items()))
    verdict, _, reason = record.verdict.partition("\n")
    if len(verdict) > LONGEST_HEADLINE:
        cut = f"{verdict[: LONGEST_HEADLINE - 3].rpartition(' ')[0]} ..."
        verdict, reason = (
            (f"{record.status.lower()}: {cut}" if record.status == "FAILED" else record.status.lower()),
            record.verdict,
        )
    result = sentence_case(verdict) if record.result == record.verdict else record.result
    headline = f"{result} after {quantity(record.steps, 'step')} in {seconds(record.total_time_s)}"
    return Page(
        kind="Training",
        name=record.name,
        when=f"{record.status.lower()}, took {seconds(record.total_time_s)}",
        headline=headline,
        verdicts=[
            text for text in (reason, f"At the end: {values}." if values else "", *_where_time_goes(record)) if text
        ],
        words=[
            *(f"Resumed after step {step}." for step in record.resumed_after),
            *([f"Alerts: {record.alerts_in_words()}."] if record.alerts else []),
            *([f"{sentence_case(start.to_text(record.start))}."] if record.start else []),
        ],
        marks=record.marks,
        figures=[*_result(record, evaluations), *_facts(record)],
        sections=[*(s for s in sections if s.drawings), *profile_section(record), *events],
        facts={
            "Environment": record.environment,
            "Data": record.data,
            "Derived": record.derived,
            "Config": record.config,
        },
        notes=where(record.mlflow_link, record.run_dir),
        closing=closing,
    )


def _where_time_goes(record: RunRecord) -> list[str]:
    """Verdict of the run's profile, if it has one."""
    return [] if record.profile is None else [sentence_case(verdict_of_run(record).sentence)]


def _result(record: RunRecord, evaluations: Mapping[str, Sequence[tuple[int, float]]]) -> list[Fact]:
    """The best and the last value of the decisive metric; without an evaluation, those of the loss."""
    judged = record.judged
    if judged is None:
        loss = shown(by_metric(record.rows())[names.RECORD_FINAL_LOSS])
        return [Fact("Final loss", loss)] if loss else []
    last, at = record.metrics[judged.name], evaluations.get(judged.name, ())
    best = judged.best([value for _, value in at])
    if best is None or best == last:
        return [Fact(judged.name, figure(last), "at the end" if best is None else "at the end, the best value")]
    step = next(step for step, value in at if value == best)
    return [Fact(judged.name, figure(best), f"best, after step {step}; {figure(last)} at the end")]


def _facts(record: RunRecord) -> list[Fact]:
    row_of = by_metric(record.rows())
    found = [Fact(title, shown(row_of[metric]), note) for title, metric, note in FACTS]
    return [*(fact for fact in found if fact.value), Fact("Workers", str(record.workers), record.strategy)]


def _line(
    name: str,
    title: str,
    rows: Sequence[Mapping[str, float]],
    key: str,
    label: str,
    *,
    smooth: bool = True,
    evaluations: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> Drawing:
    points = [(row["step"], row[key]) for row in rows if math.isfinite(row[key])]
    few = _means(points) if smooth else thinned(points, MOST_POINTS)
    others = dict(evaluations or {})
    colours = drawing.colours_of(["train", *others])

    def paint(ax: Any) -> None:
        ends = []
        if few:
            ax.plot([s for s, _ in few], [v for _, v in few], color=BLUE, linewidth=1.4)
            ends.append((few[-1][0], few[-1][1], "train" if others else figure(few[-1][1]), BLUE))
        for metric, at in others.items():
            finite = [(step, value) for step, value in thinned(at, MOST_POINTS) if math.isfinite(value)]
            if finite:
                ax.plot([s for s, _ in finite], [v for _, v in finite], color=colours[metric], marker="o", markersize=3)
                ends.append((finite[-1][0], finite[-1][1], metric.rpartition("/")[0] or metric, colours[metric]))
        values = [v for _, v in few if v > 0]
        if smooth and len(values) == len(few) and values and max(values) / min(values) > 20:
            drawing.log_axis(ax.yaxis)
        else:
            drawing.plain_axis(ax.yaxis)
        drawing.plain_axis(ax.xaxis)
        ax.set(xlabel="step", ylabel=label)
        drawing.label_ends(ax, ends)

    mean = (
        f" Each point is the mean of about {len(points) / max(1, len(few)):.0f} steps."
        if len(few) < len(points) and smooth
        else ""
    )
    missing = len(rows) - len(points)
    gaps = f" {missing} steps without a value are omitted." if 0 < missing < len(rows) else ""
    return draw(name, title, f"The value over the optimizer steps.{mean}{gaps}", paint)


def _evaluations(metric: str, at: Sequence[tuple[int, float]]) -> Drawing:
    finite = [(step, value) for step, value in thinned(at, MOST_POINTS) if math.isfinite(value)]

    def paint(ax: Any) -> None:
        ax.plot([s for s, _ in finite], [v for _, v in finite], color=BLUE, marker="o", markersize=3.5)
        drawing.plain_axis(ax.xaxis)
        drawing.plain_axis(ax.yaxis)
        if all(0 <= value <= 1 for _, value in finite):  # a share, whose axis ends where it does
            low, high = ax.get_ylim()
            ax.set_ylim(max(low, 0.0), min(high, 1.0))
        ax.set(xlabel="step", ylabel=metric)
        drawing.label_ends(ax, [(*finite[-1], figure(finite[-1][1]), BLUE)] if finite else [])

    return draw(
        "evaluation-" + "".join(c if c.isalnum() else "-" for c in metric),
        metric,
        "The value at each evaluation, over all workers.",
        paint,
    )


def _step_times(rows: Sequence[Mapping[str, float]], median_s: float | None) -> Drawing:
    """Step times with their median, which is taken from the run's record if it has one."""
    times = [(row["step"], 1e3 * row["step_time_s"], 1e3 * row["input_wait_s"]) for row in rows]
    few = thinned(times, MOST_POINTS)
    middle = statistics.median(t for _, t, _ in times) if median_s is None else 1e3 * median_s
    waited = statistics.median(w for *_, w in times)
    highest = sorted(t for _, t, _ in times)[max(0, math.ceil(0.99 * len(times)) - 1)]
    top = max(1.15 * highest, 1.3 * middle)  # a hiccup must not flatten all others

    def paint(ax: Any) -> None:
        ax.plot(
            [s for s, *_ in few],
            [t for _, t, _ in few],
            linestyle="",
            marker="o",
            markersize=2,
            color=BLUE,
            alpha=0.45,
            markeredgewidth=0,
        )
        ax.plot(
            [s for s, *_ in few],
            [w for *_, w in few],
            linestyle="",
            marker="o",
            markersize=2,
            color=ORANGE,
            alpha=0.45,
            markeredgewidth=0,
        )
        ax.plot([times[0][0], times[-1][0]], [middle, middle], color=VERMILION, linewidth=1.3)
        ax.set_ylim(0, top)
        drawing.plain_axis(ax.xaxis)
        drawing.plain_axis(ax.yaxis)
        ax.set(xlabel="step", ylabel="step time in ms")
        last = times[-1][0]
        drawing.label_ends(
            ax,
            [
                (last, middle, f"median {seconds(middle / 1e3)}", VERMILION),
                (last, max(waited, 0.04 * middle), "input wait", ORANGE),
            ],
        )

    over = sum(t > top for _, t, _ in times)
    above = f" {over} {'step is' if over == 1 else 'steps are'} slower than the axis shows." if over else ""
    drawn = f" {len(few)} of {len(times)} steps are shown." if len(few) < len(times) else ""
    return draw(
        "step-times", "Step times", f"One dot per step on rank 0, with its wait for input below.{above}{drawn}", paint
    )


def _throughput(rows: Sequence[Mapping[str, float]]) -> Drawing:
    rates = [(row["step"], row["num_samples"] / row["step_time_s"]) for row in rows if row["step_time_s"] > 0]
    few = _means(rates)

    def paint(ax: Any) -> None:
        ax.plot([s for s, _ in few], [r for _, r in few], color=BLUE, linewidth=1.4)
        ax.set_ylim(0, 1.12 * max((r for _, r in few), default=1.0))
        drawing.plain_axis(ax.xaxis)
        drawing.plain_axis(ax.yaxis)
        ax.set(xlabel="step", ylabel="samples/s of all workers")

    return draw(
        "throughput", "Throughput", "Samples of each step over its time, without evaluations and checkpoints.", paint
    )


def _memory(record: RunRecord) -> Drawing:
    peaks = [value / 2**20 for value in record.peak_memory_bytes]

    def paint(ax: Any) -> None:
        shown = peaks[:64]
        ax.bar(range(len(shown)), shown, color=BLUE, width=0.62)
        if len(shown) <= 8:
            for rank, value in enumerate(shown):
                ax.annotate(
                    memory(value * 2**20),
                    (rank, value),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=8.5,
                )
        ax.set_ylim(0, 1.15 * max(shown, default=1.0) or 1.0)
        drawing.plain_axis(ax.yaxis)
        if len(shown) <= 16:
            ax.set_xticks(range(len(shown)))
        ax.set_xlim(-0.8, max(3.0, len(shown) - 0.2))
        ax.grid(axis="x", visible=False)
        ax.set(xlabel="rank", ylabel="peak memory in MiB")

    left = f" Only the first 64 of {len(peaks)} workers are shown." if len(peaks) > 64 else ""
    return draw("memory", "Peak memory", f"Peak memory of each worker's process or device.{left}", paint)


def _means(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means of at most MOST_POINTS windows: (last step, mean) of each."""
    size = math.ceil(len(points) / MOST_POINTS) if points else 1
    windows = [points[i : i + size] for i in range(0, len(points), size)]
    return [(window[-1][0], statistics.fmean(v for _, v in window)) for window in windows]


def _of(evaluations: Mapping[str, Sequence[tuple[int, float]]], ending: str) -> dict[str, Sequence[tuple[int, float]]]:
    return {name: at for name, at in sorted(evaluations.items()) if name.endswith(ending) and at}


MOST_ROWS = 64
"""Maximum number of ranks in a table, which shows the first ones."""


def profile_section(record: RunRecord) -> list[Section]:
    """Section of a run's profile, beginning with the verdict and its evidence; empty for a record without a profile."""
    profile = record.profile
    if profile is None:
        return []
    tables = [_memory_table(profile)]
    if profile.notes:
        tables.append(Table("Not measured", ("what",), tuple((note,) for note in profile.notes)))
    words = [sentence_case(line) for line in verdict_of_run(record).lines()]
    return [Section("Where the time went", words, profile_drawings(profile), tables)]


def _memory_table(profile: RunProfile) -> Table:
    ranks = profile.ranks[:MOST_ROWS]
    left = f", the first {len(ranks)} ranks of {len(profile.ranks)}" if len(ranks) < len(profile.ranks) else ""
    return Table(
        f"Memory held but not used, at the end, and the peak{left}",
        ("rank", "rounding", "cached", "stranded", "largest hole", "resident", "peak", "in step", "phase", "after"),
        tuple((str(rank.rank), *_cells(rank.memory)) for rank in ranks),
    )


def _cells(found: MemoryNumbers) -> tuple[str, ...]:
    held = (
        found.rounding_bytes,
        found.cached_bytes,
        found.stranded_bytes,
        found.largest_hole_bytes,
        found.resident_bytes,
    )
    peak = found.peak
    moment = (memory(peak.num_bytes), str(peak.step), peak.phase or "?", seconds(peak.at_s)) if peak else ("?",) * 4
    return (*("n/a" if value is None else memory(value) for value in held), *moment)
