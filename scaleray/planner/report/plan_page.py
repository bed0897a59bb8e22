"""HTML page of a plan in the style of the reports: the recommendation with reasons, the layouts, and the use of memory
and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from scaleray.planner.answers.advise import Advice, Choice
from scaleray.planner.answers.outlook import Outlook
from scaleray.planner.answers.to_target import Way
from scaleray.planner.cost.checkpoint_stalls import CheckpointCost
from scaleray.planner.report.plan_figure import curve, frontier, memory_bars, time_bars
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
from scaleray.records.page.page import Fact, Page, Section, render
from scaleray.records.text.study_sweep_tables import Table, sentence_case
from scaleray.records.text.units import GIB, count, memory, seconds, with_interval

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
        closing="Predicted, not measured. This page needs no network.",
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
