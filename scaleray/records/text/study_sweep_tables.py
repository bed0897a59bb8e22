"""Tables of studies and sweeps as text, identical in MLflow, on the terminal and in the report."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from scaleray.common import metric_names as names
from scaleray.common.printed import quantity
from scaleray.records.rows import by_metric
from scaleray.records.settings import best_by_batch
from scaleray.records.study_record import Curve, CurvePoint, StudyRecord
from scaleray.records.sweep_record import SweepRecord
from scaleray.records.text.units import seconds, shown, with_interval

MOST_MARKDOWN_ROWS = 60


@dataclass(frozen=True)
class Table:
    """A title, columns with their units, and rows of text. notes: explanations of the values. has_words: whether all
    columns are text, even if cells begin with digits."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    has_words: bool = False

    def is_text(self, column: int) -> bool:
        """Whether a column is left-aligned text rather than numbers."""
        return self.has_words or not any(row[column][:1].isdigit() for row in self.rows)

    def markdown(self) -> str:
        """The table as Markdown, truncated after MOST_MARKDOWN_ROWS rows with a note."""
        lines = [
            f"**{escaped(self.title)}**",
            "",
            _row(self.columns),
            "|" + "".join(" --- |" if self.is_text(i) else " ---: |" for i in range(len(self.columns))),
        ]
        lines += [_row(row) for row in self.rows[:MOST_MARKDOWN_ROWS]]
        if len(self.rows) > MOST_MARKDOWN_ROWS:
            lines += ["", f"{len(self.rows) - MOST_MARKDOWN_ROWS} more rows are in the report."]
        for note in self.notes:
            lines += ["", escaped(note)]
        return "\n".join(lines)


def study_tables(record: StudyRecord, *, is_brief: bool = False) -> list[Table]:
    """One table for each mode. is_brief: omit columns that follow from others, to save space."""
    return [_curve_table(record, curve, is_brief=is_brief) for curve in record.curves]


def sweep_table(record: SweepRecord) -> Table:
    """Table with the best setting of each rule at each batch size."""
    rows, missed = [], "missed" if record.target else ""
    for rule, batches in best_by_batch(record).items():
        for batch, setting in batches.items():
            reached = f"{setting.num_reached} of {len(setting.trials)}"
            value, samples, time = map(shown, setting.rows())
            rows.append(
                (
                    rule,
                    str(batch),
                    f"{setting.learning_rate:.3g}",
                    value,
                    samples or missed,
                    time or missed,
                    reached if record.target else str(len(setting.trials)),
                    ", ".join(setting.one_training_with),
                )
            )
    columns = [
        "rule",
        "batch size",
        "learning rate",
        record.metric or "metric",
        "samples to target",
        "time to target",
        "seeds that reached it" if record.target else "seeds",
        "one training with",
    ]
    num_columns = len(columns) - (not any(row[-1] for row in rows))
    ran = sum(len(s.trials) for batches in best_by_batch(record).values() for s in batches.values())
    notes = [
        f"{len(record.trials)} trials; shown is the best learning rate of each rule and batch size ({ran} trials)."
    ]
    return Table(
        title=f"Best settings, target {record.target}" if record.target else "Best settings",
        columns=tuple(columns[:num_columns]),
        rows=tuple(row[:num_columns] for row in rows),
        notes=tuple(notes),
    )


def marks_of(point: CurvePoint) -> list[str]:
    """Conditions of a point to show with all of its values."""
    marks = list(point.point.marks)
    return marks + (["reused"] if point.point.reused_from else [])


def _curve_table(record: StudyRecord, curve: Curve, *, is_brief: bool) -> Table:
    points = [at.point for at in curve.points]
    price = f"{record.currency or 'cost'} per million samples"
    is_shown = {
        "batch size": not is_brief,
        "tokens/s": not is_brief and any(p.tokens_per_s for p in points),
        "MFU": not is_brief and any(p.mfu is not None for p in points),
        price: any(p.cost_per_million_samples is not None for p in points),
        "time to target": any(p.to_target for p in points),
        "samples to target": not is_brief and any(p.to_target for p in points),
        # facts about the whole study are shown above the tables
        "marks": any(set(marks_of(at)) - set(record.marks) for at in curve.points),
    }
    rows = []
    for at in curve.points:
        p, row_of = at.point, by_metric(at.rows())
        missed = "missed" if p.to_target else ""
        step = p.step_time_s.value or 1.0
        row = {
            "workers": str(p.workers),
            "batch size": str(p.global_batch_size),
            "step time": seconds(p.step_time_s.value) if is_brief else with_interval(p.step_time_s, seconds),
            "samples/s": shown(row_of[names.POINT_SAMPLES_PER_S]),
            "tokens/s": shown(row_of[names.POINT_TOKENS_PER_S]),
            "speed-up": with_interval(at.speedup, lambda v: f"{v:.2f}"),
            "efficiency": with_interval(at.efficiency, lambda v: f"{v:.0%}"),
            "waits for comm": "" if p.exposed_comm_s is None else f"{p.exposed_comm_s / step:.1%}",
            "waits for input": f"{p.input_wait_s / step:.1%}",
            "MFU": shown(row_of[names.POINT_MFU]),
            "memory": shown(row_of[names.PEAK_MEMORY_BYTES]),
            price: shown(row_of[names.POINT_COST]),
            "time to target": shown(row_of[names.POINT_TIME_TO_TARGET_S]) or missed,
            "samples to target": shown(row_of[names.POINT_SAMPLES_TO_TARGET]) or missed,
            "marks": ", ".join(marks_of(at)),
        }
        rows.append({name: text for name, text in row.items() if is_shown.get(name, True)})
    columns = tuple(rows[0]) if rows else ()
    base = f"Speed-up is relative to {quantity(curve.base_workers, 'worker')}; the 95% interval is in brackets."
    return Table(_curve_title(curve), columns, tuple(tuple(row.values()) for row in rows), (base,))


def _curve_title(curve: Curve) -> str:
    points = [at.point for at in curve.points]
    strategies = ", ".join(dict.fromkeys(p.strategy for p in points))
    batches = (
        {p.global_batch_size for p in points}
        if curve.mode == "strong"
        else {p.global_batch_size / p.workers for p in points}
    )
    batch = (
        f"{batches.pop():g} samples " + ("a step" if curve.mode == "strong" else "a step and worker")
        if len(batches) == 1
        else ""
    )
    return ", ".join(part for part in (f"{curve.mode.capitalize()} scaling", strategies, batch) if part)


def sentence_case(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(cell) for cell in cells) + " |"


def escaped(text: str) -> str:
    """Text from a config, with Markdown table and tag syntax escaped."""
    for character in "\\`*_|[]#!":
        text = text.replace(character, f"\\{character}")
    return " ".join(html.escape(text, quote=False).split())  # MLflow's pages read an escaped \< as the start of a tag
