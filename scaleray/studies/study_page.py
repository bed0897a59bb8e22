"""Report of a scaling study: a page, the figures as PNG, and the points as CSV."""

from pathlib import Path
from typing import Any

from scaleray.records.page.page import Fact, Page, Section, facts, when, where, write
from scaleray.records.rows import as_columns
from scaleray.records.study_record import Curve, StudyRecord
from scaleray.records.text.headlines import study_headline
from scaleray.records.text.study_sweep_tables import Table, marks_of, sentence_case, study_tables
from scaleray.records.text.units import count, figure
from scaleray.studies.speedup_figure import is_judged
from scaleray.studies.study_figure import noise_scale, study_drawings


def write_study_report(record: StudyRecord, folder: str | Path) -> list[Path]:
    """Write report.html, points.csv and figures/ to the folder, and return their paths, report.html first."""
    return write(study_page(record), folder, rows={"points": point_rows(record)})


def study_page(record: StudyRecord) -> Page:
    """The page of a study."""
    verdicts = list(dict.fromkeys(sentence_case(curve.verdict) for curve in record.curves if curve.verdict))
    sections = [
        _section(record, curve, table) for curve, table in zip(record.curves, study_tables(record), strict=True)
    ]
    if record.noise:
        sections.append(Section("Gradient noise", drawings=[noise_scale(record)]))
    return Page(
        kind="Scaling study",
        name=record.name,
        when=when(record.started_at, record.duration_s),
        headline=study_headline(record),
        verdicts=verdicts,
        words=[word for word in dict.fromkeys(map(sentence_case, record.words)) if word not in verdicts],
        marks=record.marks or sorted({m for c in record.curves for at in c.points for m in at.point.marks}),
        figures=_facts(record),
        sections=sections,
        command=record.command,
        facts=facts(record.conditions, record.config),
        notes=where(record.mlflow_link, record.folder),
    )


def point_rows(record: StudyRecord) -> list[dict[str, Any]]:
    """Every point with its values in base units."""
    rows = []
    for curve in record.curves:
        for at in curve.points:
            p = at.point
            rows.append(
                {
                    "mode": p.mode,
                    "workers": p.workers,
                    "strategy": p.strategy,
                    "global_batch_size": p.global_batch_size,
                    "micro_batch_size": p.micro_batch_size,
                    "accumulation_steps": p.accumulation_steps,
                    "steps_measured": sum(map(len, p.turns)),
                    "turns": len(p.turns),
                    **as_columns(at.rows()),
                    "marks": ";".join(marks_of(at)),
                    "reused_from": p.reused_from,
                    "measured_at": p.measured_at,
                    "run_id": p.run_id,
                }
            )
    return rows


def _section(record: StudyRecord, curve: Curve, table: Table) -> Section:
    drawings = study_drawings(record, curve) if curve.points else []
    tables = [table, *([_fits(curve)] if any(map(is_judged, curve.fits)) else [])]
    return Section(f"{curve.mode.capitalize()} scaling", drawings=drawings, tables=tables)


def _fits(curve: Curve) -> Table:
    rows = []
    for fit in curve.fits:
        parameters = "; ".join(f"{name.replace('_', ' ')} {estimate}" for name, estimate in fit.parameters.items())
        error = "not enough points" if fit.held_out_error is None else f"{fit.held_out_error:.1%}"
        is_drawn = fit.law == curve.best_law and is_judged(fit)
        rows.append((fit.law + (" (drawn)" if is_drawn else ""), error, parameters))
    note = (
        "The figure shows the law with the smallest error on points left out of its fit, if any. 95% intervals are in "
        "brackets."
    )
    return Table("Laws fitted to the curve", ("law", "held-out error", "parameters"), tuple(rows), (note,))


def _facts(record: StudyRecord) -> list[Fact]:
    found = []
    for curve in record.curves:
        if not curve.points:
            continue
        last = curve.points[-1]
        at = f"at {last.point.workers} workers"
        e = last.efficiency
        found.append(
            Fact(f"{curve.mode.capitalize()} efficiency {at}", f"{e.value:.0%}", f"{e.low:.0%} to {e.high:.0%}")
        )
        if curve.mode == "strong" or len(record.curves) == 1:
            found.append(
                Fact(
                    f"Speed-up {at}", f"{last.speedup.value:.3g}×", f"{last.speedup.low:.3g} to {last.speedup.high:.3g}"
                )
            )
            found.append(Fact("Throughput", count(last.point.samples_per_s.value), f"samples/s {at}"))
            if last.point.cost_per_million_samples is not None:
                found.append(
                    Fact(
                        "Million samples",
                        f"{figure(last.point.cost_per_million_samples)} {record.currency}".strip(),
                        at,
                    )
                )
    return found
