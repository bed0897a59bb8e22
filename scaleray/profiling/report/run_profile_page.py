"""Section on time in the page of a training: figures and tables."""

from __future__ import annotations

from scaleray.profiling.report.profile_figure import profile_drawings
from scaleray.profiling.verdict.of_run import verdict_of_run
from scaleray.records.page.page import Section
from scaleray.records.profile_record import MemoryNumbers, RunProfile
from scaleray.records.run_record import RunRecord
from scaleray.records.text.study_sweep_tables import Table, sentence_case
from scaleray.records.text.units import memory, seconds

MOST_ROWS = 64
"""Most ranks in a table; the first ones are shown."""


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
