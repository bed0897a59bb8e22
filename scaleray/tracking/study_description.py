"""A study or sweep in words, for its page in MLflow."""

from __future__ import annotations

from scaleray.records.study import StudyRecord
from scaleray.records.sweep import SweepRecord
from scaleray.text.headlines import study_headline, sweep_headline
from scaleray.text.tables import escaped, study_tables, sweep_table

LONGEST_TAG, LONGEST_NOTE = 5000, 8000
"""Characters that MLflow takes of a tag, and shows of a description."""


def description(record: StudyRecord | SweepRecord) -> str:
    """The result in Markdown, for the run's page, which shows its first lines: the headline, the sentences, then the
    tables."""
    tables = study_tables(record, is_brief=True) if isinstance(record, StudyRecord) else [sweep_table(record)]
    headline = study_headline(record) if isinstance(record, StudyRecord) else sweep_headline(record)
    parts = [f"**{escaped(headline)}**\n"]
    if record.marks:
        parts.append(f"**{escaped(', '.join(record.marks))}**\n")
    parts += [f"- {escaped(sentence)}" for sentence in dict.fromkeys(record.words)]
    return "\n".join([*parts, "", *(table.markdown() + "\n" for table in tables), f"Repeat: `{record.command}`"])


def closing_tags(record: StudyRecord | SweepRecord) -> dict[str, str]:
    """Tags of a run whose study or sweep has ended: description, verdict, and how to repeat it."""
    verdicts = [c.verdict for c in record.curves if c.verdict] if isinstance(record, StudyRecord) else record.words
    return {
        "mlflow.note.content": description(record)[:LONGEST_NOTE],
        "scaleray.verdict": " ".join(verdicts)[:500],
        "scaleray.command": record.command[:LONGEST_TAG],
        "scaleray.environment_hash": record.conditions.environment_hash,
        "scaleray.config_hash": record.conditions.config_hash,
    }
