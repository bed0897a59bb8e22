"""Records from local files: text, JSON, JSON lines, CSV, TSV and Parquet, with one record per document, line or row; or
from a Dataset of Hugging Face."""

import csv
import glob
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scaleray.common.filesystems import files_below
from scaleray.common.parsing import load_json
from scaleray.common.printed import quantity
from scaleray.data import TRAIN
from scaleray.data.hugging_face_data import check, is_dataset, is_stream
from scaleray.errors import DataError, first_line

Record = dict[str, Any]
VALIDATION = "val"
UTF_8 = "utf-8-sig"  # Excel and others begin a file with a mark, which is not part of the text
LONGEST_FIELD = 2**31 - 1  # characters; the largest number that csv takes on every system


def read_splits(data: Any, *, validation_share: float) -> dict[str, list[Record]]:
    """Read the records of each split. Raises DataError.

    data: paths by split, each a path, a pattern such as `texts/**/*.txt`, or a list of them, or Datasets of Hugging
    Face by split. A folder means all files in and below it. validation_share: share of the training records that
    becomes the split `val`, chosen by a hash of their content, independent of other records.
    """
    if not isinstance(data, Mapping) or TRAIN not in data:
        raise DataError(
            "workload.args.data", data, "it must map splits to files, including train", "{train: train.jsonl}"
        )
    splits = {name: list(read_records(given, what=f"workload.args.data.{name}")) for name, given in data.items()}
    if validation_share and VALIDATION not in splits:
        held_out = [_number(record) < validation_share * 2**64 for record in splits[TRAIN]]
        splits[VALIDATION] = [r for r, is_out in zip(splits[TRAIN], held_out, strict=True) if is_out]
        splits[TRAIN] = [r for r, is_out in zip(splits[TRAIN], held_out, strict=True) if not is_out]
    for name, records in splits.items():
        if not records:
            where = f": {data[name]} has no records" if name in data else ": validation_share holds out no record"
            raise DataError.problem(f"workload.args.data.{name}", where)
    return splits


def read_records(given: Any, *, what: str) -> Iterator[Record]:
    """Yield the records of the files given by a path, pattern or list of them, ordered by name; or those of a Dataset
    or a stream of Hugging Face."""
    if is_dataset(given) or is_stream(given):
        yield from _records_of(given, what)
        return
    for path in _paths(given, what):
        try:
            yield from _READERS.get(path.suffix.lower(), _read_text)(path)
        except DataError:
            raise
        except UnicodeDecodeError as exc:
            raise DataError.problem(
                "the text file", f"{path} is not UTF-8 (byte {exc.start})", "convert it, or omit it"
            ) from exc
        except (OSError, ValueError) as exc:  # pyarrow's own errors are ValueErrors
            raise DataError.problem("the data file", f"{path} cannot be read: {first_line(exc)}") from exc


def column(records: list[Record], name: str, *, what: str) -> list[Any]:
    """Values of one column. Raises DataError with the available columns."""
    for number, record in enumerate(records):
        if record.get(name) is None:
            there = ", ".join(record) or "nothing"
            raise DataError.problem(
                f"column {name}", f"is missing or null in record {number} of the {what} data, which has {there}"
            )
    return [record[name] for record in records]


def texts(records: list[Record], name: str, *, what: str) -> list[str]:
    """Values of a text column. Raises DataError for anything else."""
    found = column(records, name, what=what)
    wrong = next((n for n, value in enumerate(found) if not isinstance(value, str)), None)
    if wrong is not None:
        raise DataError(
            f"column {name} of record {wrong} of the {what} data", type(found[wrong]).__name__, "it must be text"
        )
    return found


def classes_of(given: Any, name: str) -> list[str]:
    """Names of the classes of a column of a Hugging Face Dataset, in order; empty if it has none."""
    feature = (getattr(given, "features", None) or {}).get(name)
    return list(getattr(getattr(feature, "feature", feature), "names", ()))


def _records_of(given: Any, what: str) -> Iterator[Record]:
    """Yield the rows of a Dataset or a stream, with the names of classes in place of their numbers."""
    check(given, split=what)
    given = given.with_format(None)
    classes = {name: names for name in given.features or {} if (names := classes_of(given, name))}
    for row in given:
        for name, names in classes.items():
            number = row[name]
            if isinstance(number, list):
                row[name] = [names[each] for each in number]
            else:
                row[name] = None if number is None or number < 0 else names[number]  # -1: unknown
        yield row


def _paths(given: Any, what: str) -> list[Path]:
    found: list[Path] = []
    for text in given if isinstance(given, (list, tuple)) else [given]:
        path = Path(str(text)).expanduser().absolute()
        if path.is_dir():
            files = [file for file in files_below(path) if file.is_file()]
        elif path.is_file():
            files = [path]
        else:
            files = [Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file()]
        if not files:
            raise DataError(what, text, "no file matches it")
        found += sorted(files)
    return found


def _read_text(path: Path) -> Iterator[Record]:
    yield {"text": path.read_text(encoding=UTF_8)}


def _read_json_lines(path: Path) -> Iterator[Record]:
    with path.open(encoding=UTF_8) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _record(_parsed(line, f"{path}, line {number}"), f"{path}, line {number}")


def _read_json(path: Path) -> Iterator[Record]:
    content = _parsed(path.read_text(encoding=UTF_8), str(path))
    if not isinstance(content, list):
        raise DataError(str(path), type(content).__name__, "it must contain a list of records")
    yield from (_record(value, f"record {number} of {path}") for number, value in enumerate(content))


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[Record]:
    csv.field_size_limit(LONGEST_FIELD)  # of the process; 128 KiB by default
    with path.open(encoding=UTF_8, newline="") as lines:
        rows = csv.reader(lines, delimiter=delimiter, strict=True)  # otherwise an unclosed quote includes the rest
        start = 1
        try:
            header = next(rows, [])
            if len(set(header)) < len(header):
                raise DataError.problem(f"{path}, line 1", "has a column twice: each column needs its own name")
            start = rows.line_num + 1
            for row in rows:
                where, start = f"{path}, line {start}", rows.line_num + 1
                if row and len(row) != len(header):
                    raise DataError.problem(
                        where,
                        f"has {quantity(len(row), 'field')}, but the header has {len(header)}: {', '.join(header)}",
                        f"put fields that contain {delimiter!r} in quotes, or correct the row",
                    )
                if any("\0" in field for field in row):
                    raise DataError.problem(
                        where, "has a NUL byte, which text must not contain", "write the file as UTF-8"
                    )
                if row:
                    yield dict(zip(header, row, strict=True))
        except csv.Error as exc:
            raise DataError(
                f"{path}, line {start}", "not CSV", f"{exc}", 'write a quote inside a quoted field twice: ""'
            ) from exc


def _read_tsv(path: Path) -> Iterator[Record]:
    return _read_csv(path, "\t")


def _read_parquet(path: Path) -> Iterator[Record]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for rows in file.iter_batches():
            yield from rows.to_pylist()


def _parsed(text: str, where: str) -> Any:
    try:
        return load_json(text)
    except ValueError as exc:
        raise DataError(where, "not JSON", f"{exc}") from exc


def _record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise DataError(where, type(value).__name__, 'it must be a mapping, such as {"text": "..."}')
    return value


def _number(record: Record) -> int:
    return int.from_bytes(hashlib.sha256(repr(sorted(record.items())).encode()).digest()[:8], "big")


_READERS = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
    ".pq": _read_parquet,
}
"""Readers by extension; every other file is one document."""
