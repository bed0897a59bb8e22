"""HTML page of a plan in the style of the reports: the recommendation with reasons, the layouts, and the use of memory
and time."""

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scaleray.planner.answers.advise import Advice, Choice
from scaleray.planner.answers.outlook import Outlook
from scaleray.planner.answers.to_target import Way
from scaleray.planner.cost.checkpoint_stalls import CheckpointCost
from scaleray.planner.report.plan_text import (
    checkpoint_lines,
    curve_table,
    faster_lines,
    layout_table,
    memory_doubt,
    why,
    width_lines,
)
from scaleray.planner.report.target_text import way_table
from scaleray.records.page import drawing
from scaleray.records.page.drawing import BLUE, GREEN, INK, MUTED, ORANGE, PALE, PURPLE, SKY, VERMILION, Drawing, draw
from scaleray.records.page.page import Fact, Page, Section, render
from scaleray.records.study_record import Estimate
from scaleray.records.text.study_sweep_tables import Table, sentence_case
from scaleray.records.text.units import GIB, count, memory, seconds, with_interval

TIME_COLOURS = {
    "forward": BLUE, "backward": SKY, "recompute": GREEN, "tensor comm": VERMILION, "pipeline bubble": PALE,
    "pipeline comm": PURPLE, "data comm": ORANGE, "optimizer": "#7a5195", "stragglers": "#8c7460", "overhead": MUTED,
}  # fmt: skip
MEMORY_COLOURS = (BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE, MUTED, "#8c7460", "#7a5195", PALE)
LEAST_SHARE = 0.004
"""Share of the longest bar; parts that are smaller in every bar are not named."""
LEAST_HEIGHT_IN = 2.4
"""Height reserved for a legend of ten parts, in inches."""
LONGEST_LINE = 50
"""Maximum characters of a layout's name next to its bar."""


def frontier(advice: Advice) -> Drawing:
    """Plot of all layouts that fit, by memory and throughput, with a line through those on the Pareto frontier."""
    points = sorted((one.memory.device_bytes / GIB, one.samples_per_s) for one in advice.choices)
    best: list[tuple[float, float]] = []
    for gib, rate in points:
        if not best or rate > best[-1][1]:
            best.append((gib, rate))
    card = advice.question.cluster.gpu.memory_gib
    chosen = advice.best.memory.device_bytes / GIB, advice.best.samples_per_s

    def paint(ax: Any) -> None:
        ax.scatter(
            [x for x, _ in points], [y for _, y in points], s=14, color=MUTED, alpha=0.45, linewidths=0, zorder=2
        )
        ax.plot(
            [x for x, _ in best],
            [y for _, y in best],
            color=BLUE,
            marker="o",
            markersize=4,
            drawstyle="steps-post",
            zorder=3,
        )
        ax.plot(*chosen, marker="*", markersize=13, color=VERMILION, linestyle="", markeredgecolor="white", zorder=5)
        ax.axvline(card, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        ax.set_xlim(0, card * 1.03)
        ax.set_ylim(0, 1.12 * max(y for _, y in points))
        drawing.plain_axis(ax.xaxis)
        drawing.plain_axis(ax.yaxis)
        ax.set(xlabel="memory of a GPU in GiB", ylabel="samples/s")
        top = ax.get_ylim()[1]
        ax.text(card, 0.02 * top, "the card  ", ha="right", va="bottom", fontsize=8.5, color=INK)

    caption = (
        f"One dot for each of {len(points)} layouts that fit; the line joins those that none beats in both. "
        "Star: the recommended one."
    )
    return draw("frontier", "Throughput against memory", caption, paint)


def curve(seen: Outlook) -> Drawing:
    """Predicted throughput by number of GPUs with its interval, on two logarithmic axes."""
    gpus = [point.num_gpus for point in seen.points]
    rates = [point.samples_per_s for point in seen.points]
    ideal = [seen.alone.samples_per_s * n for n in gpus]

    def paint(ax: Any) -> None:
        ax.fill_between(gpus, [r.low for r in rates], [r.high for r in rates], color=BLUE, alpha=0.16, linewidth=0)
        ax.plot(gpus, ideal, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2)
        ax.plot(gpus, [r.value for r in rates], color=BLUE, marker="o")
        drawing.log2_axis(ax.xaxis, gpus)
        drawing.log_axis(ax.yaxis)
        ax.set(xlabel="GPUs", ylabel="samples/s")
        drawing.label_ends(ax, [(gpus[-1], ideal[-1], "ideal", MUTED), (gpus[-1], rates[-1].value, "predicted", BLUE)])

    caption = (
        "The best layout of each size, at the same global batch. "
        "Ideal: every GPU as fast as a single one with enough memory; the band is the 90% interval."
    )
    return draw("curve", "Predicted curve", caption, paint)


def memory_bars(choices: Sequence[Choice], *, limit_gib: float) -> Drawing:
    """Bars of each layout's memory on one GPU, by content."""
    rows = [(one, {name: value / GIB for name, value in one.memory.parts().items()}) for one in choices]
    names = [name.removesuffix("_bytes").replace("_", " ") for name in rows[0][1]]
    colours = dict(zip(rows[0][1], MEMORY_COLOURS, strict=False))

    def finish(ax: Any) -> None:
        ax.axvline(limit_gib, color=VERMILION, linewidth=1.4, linestyle=(0, (4, 3)))
        ax.annotate(
            "the card",
            (limit_gib, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 2),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=VERMILION,
        )
        ax.set(xlabel="GiB of one GPU")

    caption = f"Memory of each layout on the fullest GPU, by content; dashed: the {limit_gib:.0f} GiB of the card."
    return _bars(
        "memory", "Memory", caption, rows, dict(zip(rows[0][1], names, strict=True)), colours, finish, longest=limit_gib
    )


def time_bars(choices: Sequence[Choice], best: Estimate) -> Drawing:
    """Bars of each layout's step, by parts; whiskers are intervals."""
    rows = [(one, one.step.parts()) for one in choices]

    def finish(ax: Any) -> None:
        for place, one in enumerate(choices):
            step = one.step_time_s
            ax.plot([step.low, step.high], [place, place], color=INK, linewidth=1.0, marker="|", markersize=5)
        ax.set(xlabel="s of one step")

    names = {name: name for name in rows[0][1]}
    caption = "Parts of each layout's step, as far as they are not hidden behind others; whiskers are 90% intervals."
    return _bars("step", "Where a step's time goes", caption, rows, names, TIME_COLOURS, finish, longest=best.high)


def _bars(
    name: str,
    title: str,
    caption: str,
    rows: Sequence[tuple[Choice, Mapping[str, float]]],
    names: Mapping[str, str],
    colours: Mapping[str, str],
    finish: Callable[[Any], None],
    *,
    longest: float,
) -> Drawing:
    most = max(longest, *(sum(parts.values()) for _, parts in rows))
    kept = [part for part in names if any(parts[part] > LEAST_SHARE * most for _, parts in rows)]
    labels = [
        textwrap.fill(f"{number}  {choice.layout.describe()}", LONGEST_LINE, break_on_hyphens=False)
        for number, (choice, _) in enumerate(rows, 1)
    ]

    def paint(ax: Any) -> None:
        left = [0.0] * len(rows)
        for part in kept:
            widths = [parts[part] for _, parts in rows]
            ax.barh(
                range(len(rows)),
                widths,
                left=left,
                color=colours[part],
                height=0.66,
                label=names[part],
                edgecolor="white",
                linewidth=0.6,
            )
            left = [a + b for a, b in zip(left, widths, strict=True)]
        ax.set_yticks(range(len(rows)), labels)
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)
        finish(ax)
        ax.set_xlim(left=0)
        drawing.plain_axis(ax.xaxis)
        drawing.legend_right(ax, "")

    return draw(name, title, caption, paint, is_wide=True, height_in=max(LEAST_HEIGHT_IN, 1.1 + 0.42 * len(rows)))


MOST_REASONS = 6


def plan_page(
    advice: Advice,
    seen: Outlook,
    *,
    rows: int = 10,
    command: str = "",
    kept: CheckpointCost | None = None,
    ways: Sequence[Way] = (),
) -> str:
    """Return the page as HTML, without external resources. rows: layouts to show. command: repeats the plan. kept and
    ways: checkpoints and ways to a target, if requested."""
    question, best = advice.question, advice.best
    cluster = question.cluster
    title = f"{question.model.name} on {cluster.num_nodes} x {cluster.gpus_per_node} {cluster.gpu.name}"
    shown = advice.choices[:rows]
    drawn = [frontier(advice), *([curve(seen)] if len(seen.points) > 1 else [])]
    page = Page(
        kind="Plan",
        name=title,
        when=f"{question.global_batch} samples per step, {question.precision}",
        headline=(
            f"{best.layout.strategy} on {cluster.num_gpus} GPUs: {with_interval(best.step_time_s, seconds)} per step"
        ),
        verdicts=[
            f"Recommended: {best.layout.describe()}; {why(advice)}. {seen.limit}.",
            f"Next doubling: {seen.doubling}.",
        ],
        words=_doubts(advice),
        marks=_marks(best),
        figures=_facts(advice),
        sections=[
            *([Section("Time to the target", tables=[way_table(ways, num_gpus=cluster.num_gpus)])] if ways else []),
            *(
                [Section("Checkpoints and interruptions", words=[line.strip() for line in checkpoint_lines(kept)])]
                if kept
                else []
            ),
            Section("Throughput", drawings=drawn, tables=[curve_table(seen)]),
            Section(
                "Layouts",
                drawings=[time_bars(shown, best.step_time_s), memory_bars(shown, limit_gib=cluster.gpu.memory_gib)],
                tables=[layout_table(advice, rows), _dropped(advice)],
            ),
        ],
        command=command,
        notes=[f"Assumed: {note}." for note in (*cluster.notes, *question.model.notes)],
        closing="Predicted, not measured. This page works offline.",
    )
    return render(page)


def _marks(best: Choice) -> list[str]:
    if best.is_trusted:
        return []
    missing = (
        "without a measurement on this model" if best.kind == "unmeasured" else "from a measurement of a distant layout"
    )
    return [f"predicted {missing}: do not rely on these values alone"]


def _facts(advice: Advice) -> list[Fact]:
    best, question = advice.best, advice.question
    step, card = best.step_time_s, question.cluster.gpu.memory_gib * GIB
    has_tokens = question.model.tokens_per_sample > 1
    rate = best.tokens_per_s if has_tokens else best.samples_per_s
    found = [
        Fact("Step time", seconds(step.value), f"{seconds(step.low)} to {seconds(step.high)}, 90% interval"),
        Fact("Throughput", count(rate), "tokens/s" if has_tokens else "samples/s"),
        Fact("MFU", f"{best.mfu:.1%}", "of the peak"),
        Fact(
            "Memory of a GPU",
            memory(best.memory.device_bytes),
            f"{best.memory.device_bytes / card:.0%} of {memory(card)}",
        ),
        Fact("Waits for communication", f"{best.step.exposed_comm_s / best.step.total_s:.0%}", "of a step"),
    ]
    if best.cost_per_million_samples is not None:
        found.append(Fact("Million samples", f"{best.cost_per_million_samples:.4g}", "at the cluster's price"))
    return found


def _doubts(advice: Advice) -> list[str]:
    found = [f"{sentence_case(line)}." for line in (*memory_doubt(advice), *faster_lines(advice))]
    found += [f"{sentence_case(line)}." for line in (*advice.question.learned, *width_lines(advice.best))]
    if advice.best.kind == "unmeasured":
        found.append("A step measured on one GPU narrows the intervals: --step-time with --micro-batch, or --from-run.")
    return found


def _dropped(advice: Advice) -> Table:
    strategies = Counter(one.layout.strategy for one in advice.rejected)
    nearest = {one.layout.strategy: one for one in sorted(advice.rejected, key=lambda one: -one.missing_gib)}
    rows = tuple((name, str(number), nearest[name].reason) for name, number in strategies.most_common(MOST_REASONS))
    more = len(strategies) - len(rows)
    notes = (f"{more} more kinds: scaleray plan explain layouts.",) if more > 0 else ()
    return Table("Dropped for memory", ("kind of layout", "layouts", "closest to fitting"), rows, notes)
