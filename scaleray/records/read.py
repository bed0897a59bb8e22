"""Read a record.json of any kind."""

from pathlib import Path

from scaleray.common.parsing import load_json
from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import StudyRecord
from scaleray.records.sweep_record import SweepRecord

AnyRecord = RunRecord | StudyRecord | SweepRecord
FILE = "record.json"


def parse_record(text: str | bytes) -> AnyRecord:
    """Parse the text of a record.json. Raises ValueError or TypeError if it is not a record."""
    data = load_json(text)
    if "trials" in data:
        return SweepRecord.from_json(text)
    if "curves" in data:
        return StudyRecord.from_json(text)
    return RunRecord.from_json(text)


def read_record(path: Path) -> AnyRecord:
    """Read the record in a file, or in the record.json of a folder. Raises OSError, ValueError or TypeError."""
    return parse_record((path / FILE if path.is_dir() else path).read_text())
