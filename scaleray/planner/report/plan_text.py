"""Sentences and tables of a plan, for both the terminal and the page."""

from typing import Any

from scaleray.planner.answers.advise import Advice, Choice
from scaleray.planner.answers.outlook import Outlook
from scaleray.planner.answers.written_config import layout_options, refusal
from scaleray.planner.cost.checkpoint_stalls import CheckpointCost
from scaleray.planner.cost.memory import memory_interval
from scaleray.records.text.study_sweep_tables import Table, sentence_case
from scaleray.records.text.units import GIB, count, memory, seconds, with_interval


def layout_table(advice: Advice, rows: int) -> Table:
    """Table of the first `rows` choices, starting with the recommended one."""
    question, shown = advice.question, advice.choices[:rows]
    cluster = question.cluster
    has_tokens = question.model.tokens_per_sample > 1
    refused = {one.layout: why for one in shown if (why := refusal(one.layout, question))}
    cells = []
    for number, one in enumerate(shown, 1):
        row = {
            "rank": f"{number}{'' if one is not advice.best else ' *'}{' x' if one.layout in refused else ''}",
            "layout": one.layout.describe(),
            "step time": with_interval(one.step_time_s, seconds) + ("" if one.is_trusted else " ?"),
            "tokens/s" if has_tokens else "samples/s": count(one.tokens_per_s if has_tokens else one.samples_per_s),
            "MFU": f"{one.mfu:.1%}",
            "memory": memory(one.memory.device_bytes) + ("" if one.fits == "fits" else " !"),
            "waits for comm": f"{one.step.exposed_comm_s / one.step.total_s:.0%}",
        }
        if one.cost_per_million_samples is not None:
            row["per 1M samples"] = f"{one.cost_per_million_samples:.2f}"
        cells.append(row)
    notes = [
        f"{len(advice.choices)} of {advice.num_layouts} layouts fit. "
        "In brackets: the interval that holds 90% of similar published measurements."
    ]
    notes.append(f"* recommended: {_ranked_words(advice)}.")
    notes += [] if all(one.fits == "fits" for one in shown) else ["! its memory may not fit."]
    notes += [] if all(one.is_trusted for one in shown) else ["? do not rely on this without a measurement."]
    notes += [f"x scaleray train refuses it: {why}" for why in dict.fromkeys(refused.values())]
    title = (
        f"{question.model.name} ({_count(question.model.num_params)} parameters) "
        f"on {cluster.num_nodes} x {cluster.gpus_per_node} {cluster.gpu.name}, "
        f"{question.global_batch} samples per step, {question.precision}"
    )
    return Table(title, tuple(cells[0]), tuple(tuple(row.values()) for row in cells), tuple(notes))


def _ranked_words(advice: Advice) -> str:
    if not any(one.fits == "fits" for one in advice.choices):
        return "the best of the layouts that may not fit; none certainly fits"
    return (
        "the smallest"
        if advice.question.rank_by == "memory"
        else "the fastest that certainly fits, and the simplest of equally fast ones"
    )


def curve_table(seen: Outlook) -> Table:
    """Table of the prediction for the best layout of each number of GPUs."""
    rows = tuple(
        (
            str(p.num_gpus),
            with_interval(p.samples_per_s, count),
            f"{p.efficiency:.1%}",
            p.choice.layout.describe() + ("" if p.choice.fits == "fits" else " !"),
        )
        for p in seen.points
    )
    base = (
        f"Efficiency: throughput per GPU over {count(seen.alone.samples_per_s)} samples/s, "
        "the rate of one GPU with enough memory."
    )
    marks = () if all(p.choice.fits == "fits" for p in seen.points) else ("! its memory may not fit.",)
    remarks = tuple(f"{sentence_case(words)}." for words in seen.remarks)
    return Table(
        "By number of GPUs", ("GPUs", "samples/s", "efficiency", "best layout"), rows, (base, *marks, *remarks)
    )


def checkpoint_lines(kept: CheckpointCost) -> list[str]:
    """Lines on the cost of checkpoints and interruptions."""
    way = (
        "during training, which waits for the copy into the hosts' memory"
        if kept.is_asynchronous
        else "with training paused"
    )
    chosen = ", the best interval for these interruptions" if kept.is_interval_chosen else ""
    lines = [
        f"checkpoints: {kept.state_bytes / GIB:,.1f} GiB, written in {kept.write_s:.3g} s {way}: "
        f"{kept.stall_s:.3g} s of every {kept.interval_s / 60:.3g} minutes "
        f"({100 * kept.stall_share:.2g} %){chosen}"
    ]
    if kept.mtbf_s is not None:
        lines.append(
            f"  an interruption every {kept.mtbf_s / 3600:.3g} hours, {kept.restart_s / 60:.3g} minutes to restart: "
            f"{100 * kept.time_ratio:.1f} % of the time is training"
        )
    return [*lines, *(f"  assumed: {note}" for note in kept.notes)]


def memory_doubt(advice: Advice) -> list[str]:
    """Warning about the recommended layout's possible memory use, if no layout certainly fits."""
    best = advice.best
    if best.fits == "fits":
        return []
    return [f"no layout certainly fits; this one may not fit: {_needed(best)}"]


def width_lines(choice: Choice) -> list[str]:
    """Lines on why a choice's interval is wide."""
    found = [f"its interval is wider: {reason.words}" for reason in choice.reasons]
    if choice.kind == "unmeasured":
        found = ["its interval is wide: nothing was measured; all values are from data sheets"]
    return [*found, *(f"unlike published measurements, so its interval is wider: {words}" for words in choice.doubts)]


def faster_lines(advice: Advice) -> list[str]:
    """Lines on a faster layout that may not fit: its gain, and how to try it."""
    rival = advice.faster
    if rival is None:
        return []
    gain = rival.samples_per_s / advice.best.samples_per_s - 1
    found = [f"{100 * gain:.0f} % faster but may not fit: {rival.layout.describe()}; {_needed(rival)}"]
    if not refusal(rival.layout, advice.question):
        options = " ".join(layout_options(rival.layout, advice.question))
        found.append(
            f"to try it, run a few steps of scaleray train with {options} --stop.after '5 steps', "
            "and peak_memory_bytes in their record.json"
        )
    return found


def _needed(choice: Choice) -> str:
    said = memory_interval(choice.memory)
    return f"{said.value / GIB:.1f} GiB are predicted; similar published measurements used up to {said.high / GIB:.1f}"


def why(advice: Advice) -> str:
    """Reason for the recommendation, compared with the other kinds of layouts."""
    best = advice.best.layout
    fits = {_kind(choice.layout) for choice in advice.choices}
    dropped = {_kind(one.layout): one for one in sorted(advice.rejected, key=lambda one: -one.missing_gib)}
    for name in ("ddp", "zero1", "fsdp"):
        if name in dropped and name not in fits and name != _kind(best):
            return f"{name} alone does not fit: at best {dropped[name].reason}; this layout splits the state further"
    rivals = [choice for choice in advice.choices if _kind(choice.layout) != _kind(best)]
    if not rivals:
        return "the only kind of layout that fits"
    rival = min(rivals, key=lambda one: one.step_time_s.value)
    ratio = rival.step_time_s.value / advice.best.step_time_s.value
    return (
        f"{ratio:.2f} times the speed of the best {_kind(rival.layout)}"
        if ratio > 1.02
        else f"as fast as {_kind(rival.layout)}, and simpler"
    )


def _kind(layout: Any) -> str:
    words = (
        [{"none": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "fsdp"}[layout.sharding]]
        if layout.data > 1
        else []
    )
    return (
        "+".join([*words, *(["tp"] if layout.tensor > 1 else []), *(["pp"] if layout.pipeline > 1 else [])]) or "single"
    )


def _count(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
