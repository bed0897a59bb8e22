"""Report of a sweep: a page, the figures as PNG, and trials and settings as CSV."""

from collections import Counter
from pathlib import Path
from typing import Any

from scaleray.records.page.page import Fact, Page, Section, facts, when, where, write
from scaleray.records.rows import as_columns
from scaleray.records.settings import best, settings, trained
from scaleray.records.sweep_record import SweepRecord
from scaleray.records.text.headlines import sweep_headline
from scaleray.records.text.study_sweep_tables import Table, sweep_table
from scaleray.records.text.units import count, figure, seconds
from scaleray.sweeps.result import rule_sentences
from scaleray.sweeps.rule_limits import rule_table
from scaleray.sweeps.sweep_figure import sweep_drawings

MOST_CAUSES = 8


def write_sweep_report(record: SweepRecord, folder: str | Path) -> list[Path]:
    """Write report.html, trials.csv, settings.csv and figures/ into the folder; return their paths, report.html
    first."""
    return write(sweep_page(record), folder, rows={"trials": trial_rows(record), "settings": setting_rows(record)})


def sweep_page(record: SweepRecord) -> Page:
    """Page of a sweep's report."""
    drawings, rules = sweep_drawings(record), rule_table(record)
    reference = record.reference_batch_size
    # the table of rules states the same
    in_table = rule_sentences(record, reference_batch_size=reference) if rules.rows and reference else []
    ways = [d for d in drawings if d.name.startswith("map")]
    to_target = [d for d in drawings if d.name.startswith(("target", "goodput"))]
    rest = [d for d in drawings if d not in ways and d not in to_target]
    sections = [
        Section("Where each rule works", drawings=ways, tables=[rules, sweep_table(record)]),
        Section("Choosing a batch size", drawings=to_target),
        Section("Training", drawings=rest),
        Section("Trials", tables=[_outcomes(record), *_causes(record)]),
    ]
    return Page(
        kind="Sweep",
        name=record.name,
        when=when(record.started_at, record.duration_s),
        headline=sweep_headline(record),
        words=[word for word in dict.fromkeys(record.words) if word not in in_table],
        marks=record.marks,
        figures=_facts(record),
        sections=[s for s in sections if s.drawings or any(t.rows for t in s.tables)],
        command=record.command,
        facts=facts(record.conditions, record.config),
        notes=where(record.mlflow_link, record.folder),
    )


def trial_rows(record: SweepRecord) -> list[dict[str, Any]]:
    """Every trial with its figures in base units."""
    return [
        {
            "number": t.number,
            "status": t.status,
            "rule": t.rule,
            "batch_size": t.batch_size,
            "learning_rate": t.learning_rate,
            "optimizer": t.optimizer,
            "warmup": t.warmup,
            "seed": t.seed,
            "workers": t.workers,
            **{t.metric or key if key == "value" else key: value for key, value in as_columns(t.rows()).items()},
            "error": t.error,
            "run_id": t.run_id,
            "same_as": t.same_as,
        }
        for t in record.trials
    ]


def setting_rows(record: SweepRecord) -> list[dict[str, Any]]:
    """Every setting with its medians over seeds."""
    return [
        {
            "rule": s.rule,
            "batch_size": s.batch_size,
            "learning_rate": s.learning_rate,
            "optimizer": s.optimizer,
            "warmup": s.warmup,
            "trials": len(s.trials),
            "reached": s.num_reached,
            **as_columns(s.rows()),
        }
        for s in settings(record)
    ]


def _facts(record: SweepRecord) -> list[Fact]:
    found = settings(record)
    chosen = best(found, record.direction)
    statuses = Counter(t.status for t in record.trials)
    most = ", ".join(f"{n} {status}" for status, n in statuses.most_common(3))
    facts_ = [Fact("Trials", str(len(record.trials)), most)]
    if chosen is None:
        return facts_
    about = f"batch {chosen.batch_size}, learning rate {chosen.learning_rate:.3g}, {chosen.rule}"
    if chosen.samples_to_target is not None:
        facts_.append(Fact("Fewest samples to target", count(chosen.samples_to_target), about))
        fastest = min((s for s in found if s.time_to_target_s is not None), key=lambda s: s.time_to_target_s or 0.0)
        words = f"batch {fastest.batch_size}, learning rate {fastest.learning_rate:.3g}, {fastest.rule}"
        facts_.append(Fact("Fastest to target", seconds(fastest.time_to_target_s), words))
    elif chosen.value is not None:
        facts_.append(Fact(f"Best {record.metric}", figure(chosen.value), about))
    if record.goodput:
        top = max(record.goodput, key=lambda p: p.goodput.value)
        facts_.append(
            Fact("Best goodput at batch", str(top.batch_size), "measured" if top.is_measured else "predicted")
        )
    return facts_


def _outcomes(record: SweepRecord) -> Table:
    rows = [(status, str(n)) for status, n in Counter(t.status for t in record.trials).most_common()]
    rows += [("scheduler", record.scheduler), ("search", record.search), ("target", record.target or "none")]
    if shared := len(record.trials) - len(trained(record)):
        rows.append(("counted: the same training as another", str(shared)))
    time_s = sum(t.training_time_s for t in trained(record))
    total_s = sum(t.total_time_s for t in record.trials)
    rows.append(("training, share of the time with workers", f"{seconds(time_s)} of {seconds(total_s)}"))
    return Table("How the trials ended", ("", "trials"), tuple(rows))


def _causes(record: SweepRecord) -> list[Table]:
    causes = Counter((t.error.splitlines() or [""])[0][:200] for t in record.trials if t.error).most_common()
    if not causes:
        return []
    rows = tuple((cause, str(n)) for cause, n in causes[:MOST_CAUSES])
    more = (f"{len(causes) - MOST_CAUSES} more causes are in trials.csv.",) if len(causes) > MOST_CAUSES else ()
    return [Table("Why trials failed", ("first line of the error", "trials"), rows, more)]
