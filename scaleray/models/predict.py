"""`predict`: predictions of a run's model for other rows, with Ray Data or in this process.

Each actor builds the model once. Predictions return in the order of the rows, and only this process writes them. The
file therefore has this order, and failed rows are identified by number."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scaleray.checkpoints.storage import Store
from scaleray.common.options import takes, words_of
from scaleray.common.progress import stage
from scaleray.config import RunConfig
from scaleray.config.base import absolute_path, without_password
from scaleray.data.as_source import for_workload, load_sources
from scaleray.data.iterable import refuse_endless
from scaleray.data.ray_dataset_source import StreamSource
from scaleray.data.source_interface import Source
from scaleray.errors import DataError, ScaleRayError, StorageError, UsageError, first_line
from scaleray.launch.cluster import connection as cluster
from scaleray.launch.cluster.capacity import check_option_fits
from scaleray.launch.cluster.gpu_workers import with_gpus_decided
from scaleray.launch.session.opened import forbid_ray
from scaleray.launch.workers.loaded_workload import ship_user_code
from scaleray.models.load import PREDICT, find_parts
from scaleray.models.model_options import PredictOptions
from scaleray.models.predictor import FAILED, INDEX, Predictor, PredictorParts, RayPredictor, beside_of
from scaleray.models.row_files import Files, Shape, gives_tuples, own_rows, shape_of
from scaleray.records.json_record import jsonable
from scaleray.records.run_record import Say

ENDINGS = (".parquet", ".jsonl")


class AnswersFile:
    """Writes Arrow tables of one schema to a file, in the given order."""

    def __init__(self, stream: Any, ending: str) -> None:
        self._stream, self._ending = stream, ending
        self._parquet: Any = None

    def write(self, table: Any) -> None:
        """Add the rows of a table."""
        if self._ending == ".jsonl":
            lines = "".join(json.dumps(jsonable(row)) + "\n" for row in table.to_pylist())
            self._stream.write(lines.encode())
            return
        import pyarrow.parquet

        if self._parquet is None:
            self._parquet = pyarrow.parquet.ParquetWriter(self._stream, table.schema)
        self._parquet.write_table(table.cast(self._parquet.schema))

    def close(self) -> None:
        """Complete the file."""
        if self._parquet is not None:
            self._parquet.close()


def check_out(out: str | Path, *, overwrite: bool) -> str:
    """Absolute path or URI of the file to write. Raises UsageError for an unknown extension or an existing file."""
    path = absolute_path(str(out))
    if _ending(path) not in ENDINGS:
        raise UsageError("--out", without_password(path), f"its name must end in {' or '.join(ENDINGS)}")
    target = Store(path)
    try:
        exists = target.parent.size(target.name) is not None
    except (OSError, ValueError) as exc:
        raise StorageError("--out", without_password(path), f"it cannot be reached: {first_line(exc)}") from exc
    if exists and not overwrite:
        raise UsageError("--out", without_password(path), "it already exists", "name another, or add --overwrite")
    return path


@contextlib.contextmanager
def opened(path: str) -> Iterator[AnswersFile]:
    """The file to write, at a path from `check_out`. Raises StorageError; after an error, an existing local file is
    unchanged."""
    target = Store(path)
    try:
        with target.parent.writing(target.name) as stream:
            file = AnswersFile(stream, _ending(path))
            try:
                yield file
            finally:
                file.close()  # after an error too, or pyarrow would close it when the stream is gone
    except OSError as exc:
        raise StorageError("--out", without_password(path), f"it cannot be written: {first_line(exc)}") from exc


def _ending(path: str) -> str:
    return Path(Store(path).name).suffix.lower()


BATCH_ROWS = 256
MOST_NAMED = 5
READER_CPUS = 0.25
"""Ray CPUs of a task that reads rows, small enough to fit next to actors that have all cores."""


@dataclass(frozen=True)
class Predictions:
    """Result of `predict`. columns: predictions by name, as arrays or lists without failed rows, if not written to a
    file. failed: reasons by row number, from 0."""

    model: str
    num_rows: int
    out: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)

    def about(self) -> dict[str, Any]:
        """JSON-compatible facts in addition to the predictions."""
        first = {str(row): why for row, why in list(self.failed.items())[:MOST_NAMED]}
        about = {"model": self.model, "rows": self.num_rows, "out": self.out, "failed": len(self.failed)}
        return {**about, "first_failed": first}


@takes(PredictOptions)
def predict(
    run: str | Path,
    data: Any = None,
    *,
    options: PredictOptions,
    out: str | Path | None = None,
    say: Say = lambda text: None,
) -> Predictions:
    """Predict rows with a run's model, and return the predictions in the order of the rows.

    run: as for `load`. data: a Parquet, CSV or JSON-lines file, a folder or s3:// URI of such files, a path that the
    workload reads itself (`read_data`: folders of images, records with a text), a mapping of arrays by column, or a
    pandas or Arrow table; or None with `split`, the name of one of the run's own splits. out: a .parquet or .jsonl
    file; None returns the predictions. Data in memory is predicted in this process.

    Predictions come from the workload's `predict(model, batch)`, or else from the model's output in the loss. Raises
    UsageError for errors of use."""
    split, batch_size, workers, keep = options.split, options.batch_size, options.workers, words_of(options.keep)
    if (data is None) == (split is None):
        raise UsageError("--data", data, "use either --data or --split", "--split test is one of the run's splits")
    for option, number in (("--batch-size", batch_size), ("--workers", workers)):
        if number < 1:
            raise UsageError(option, number, "it must be at least 1")
    path = check_out(out, overwrite=options.overwrite) if out is not None else None
    parts = find_parts(run, options=options)
    wide = parts.config.precision.dtype == "fp64"
    source: Source | None = None
    shape, tuples = Shape(wide=wide), False
    if split is not None:
        source = _split_of(parts.workload, split, parts.preprocessor)
        tuples = gives_tuples(source)
    else:
        shape, tuples = shape_of(parts.workload, wide=wide, fitted=parts.preprocessor)
        if (own := own_rows(data, parts.workload)) is not None:
            source = for_workload(own, parts.workload, split=PREDICT, fitted=parts.preprocessor)
            tuples = gives_tuples(source)
    rows = source if source is not None else _rows_of(data)
    where = f"the {split} data" if split is not None else rows.uri if isinstance(rows, Files) else "the data"
    local = options.local or not isinstance(rows, (Files, Source))
    config = parts.config
    if source is not None and not keep and "file" in beside_of(source):
        keep = ["file"]  # answers for images are of no use without their names
    predictor = PredictorParts(parts, shape, tuples, tuple(keep), where)
    if local:
        forbid_ray()
        tables = _here(predictor, rows, batch_size)
    else:
        tables = _under_ray(predictor, rows, config, batch_size=batch_size, workers=workers)
    say(f"predicting with {parts.weights.words} of {parts.name}")
    return collected(tables, path, parts.name, skip_failed=options.skip_failed)


def _rows_of(data: Any) -> Any:
    """Files, or an Arrow table of data in memory."""
    import pyarrow as pa

    if isinstance(data, (str, Path)):
        return Files.at(data)
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, Mapping):
        from scaleray.models.predictor import arrow_array

        arrays = {name: value.numpy(force=True) if hasattr(value, "detach") else value for name, value in data.items()}
        return pa.table({name: arrow_array(value) for name, value in arrays.items()})
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        return pa.Table.from_pandas(data, preserve_index=False)
    raise DataError(
        "the data", type(data).__name__, "it must be a path, a mapping of arrays, or a pandas or Arrow table"
    )


def _split_of(workload: Any, split: str, fitted: Any) -> Source:
    sources = load_sources(workload, fitted=fitted, in_steps=True)
    if split not in sources:
        raise UsageError("--split", split, f"the run has the splits {', '.join(sources)}")
    source = sources[split]
    refuse_endless(source, split)
    if isinstance(source, StreamSource):
        raise DataError(
            f"the {split} data", "a Ray Dataset", "its rows cannot be read by index", "write it to files: --data"
        )
    return source


def _here(parts: PredictorParts, rows: Any, batch_size: int) -> Iterator[Any]:
    import pyarrow as pa

    predictor = Predictor(parts, rows if isinstance(rows, Source) else None)
    if isinstance(rows, Source):
        starts = range(0, rows.num_rows, batch_size)
        tables: Iterator[Any] = (
            pa.table({INDEX: np.arange(start, min(start + batch_size, rows.num_rows))}) for start in starts
        )
    elif isinstance(rows, Files):
        tables = rows.tables(batch_size)
    else:
        tables = (rows.slice(start, batch_size) for start in range(0, rows.num_rows, batch_size))
    for table in tables:
        yield predictor(table)


def _under_ray(
    parts: PredictorParts, rows: Source | Files, config: RunConfig, *, batch_size: int, workers: int
) -> Iterator[Any]:
    gpus = "auto" if config.scale.gpus else 0
    config = config.changed({"scale.workers": workers, "scale.gpus_per_worker": gpus})
    with cluster.connected(config):
        import ray

        config = with_gpus_decided(config, cluster.alive_nodes(), say=lambda text: None)
        scale = config.scale
        check_option_fits("--workers", config, cluster.alive_nodes())
        ship_user_code(parts.model.workload)
        threads = None if scale.gpus else max(1, int(scale.cpus_per_worker))
        parts = dataclasses.replace(parts, threads=threads, uses_gpu=scale.gpus > 0)
        source = rows if isinstance(rows, Source) else None
        references = (ray.put(parts), ray.put(source) if source is not None else None)
        with _quiet_data() as data:
            answers = _dataset(data, rows, batch_size, workers).map_batches(
                RayPredictor,
                fn_constructor_args=references,
                batch_size=batch_size,
                batch_format="pyarrow",
                compute=data.ActorPoolStrategy(size=workers),
                num_cpus=scale.cpus_per_worker,
                num_gpus=scale.gpus or None,
                # one machine has no other to start it again on; Ray warns of restarts that it may not be able to do
                **({"max_restarts": 0} if cluster.is_own() else {}),
            )
            try:
                yield from answers.iter_batches(batch_size=None, batch_format="pyarrow")
            except ray.exceptions.RayError as exc:
                raise _first_of_ours(exc) or exc from exc


def _dataset(data: Any, rows: Source | Files, batch_size: int, workers: int) -> Any:
    if isinstance(rows, Source):
        blocks = max(workers, min(1000, math.ceil(rows.num_rows / batch_size)))
        return data.range(rows.num_rows, override_num_blocks=blocks)
    read = {"parquet": data.read_parquet, "csv": data.read_csv, "json": data.read_json}[rows.format]
    filesystem = None if rows.is_local else _filesystem(rows.uri)
    options = {"lines": True} if rows.format == "json" else {}
    return read(list(rows.paths), filesystem=filesystem, num_cpus=READER_CPUS, **options)


def _filesystem(uri: str) -> Any:
    from scaleray.common.filesystems import open_filesystem

    return open_filesystem(uri)[0]


@contextlib.contextmanager
def _quiet_data() -> Iterator[Any]:
    """Context in which ray.data keeps rows in order and shows no progress bars."""
    import ray.data

    from scaleray.training.worker import quieten_ray

    quieten_ray()
    context = ray.data.DataContext.get_current()
    before = context.execution_options.preserve_order, context.enable_progress_bars
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The minimum number of concurrent actors")  # of few rows
            warnings.filterwarnings(
                "ignore", message="`ray_remote_args` is deprecated"
            )  # 2.60 has no other max_restarts
            yield ray.data
    finally:
        context.execution_options.preserve_order, context.enable_progress_bars = before


def _first_of_ours(exc: BaseException) -> ScaleRayError | None:
    """The scaleray error inside a Ray error."""
    seen: BaseException | None = exc
    while seen is not None:
        if isinstance(seen, ScaleRayError):
            return seen
        inner = getattr(seen, "cause", None)
        seen = inner if isinstance(inner, BaseException) else seen.__cause__
    return None


def collected(tables: Iterator[Any], path: str | None, model: str, *, skip_failed: bool) -> Predictions:
    """Write or collect the predictions as they arrive. path: file to write; None returns the predictions. Raises
    DataError for failed rows unless they are skipped."""
    import pyarrow as pa

    num_rows, failed, kept = 0, dict[int, str](), []
    with (
        stage("predicting", unit="rows") as predicting,
        opened(path) if path is not None else contextlib.nullcontext() as file,
    ):
        for table in tables:
            reasons = table.column(FAILED).to_pylist() if table.column(FAILED).null_count < table.num_rows else []
            failed.update({num_rows + at: why for at, why in enumerate(reasons) if why is not None})
            num_rows += table.num_rows
            predicting.advance(table.num_rows)
            if failed and not skip_failed:
                raise _failed_rows(failed)
            if reasons:
                table = table.filter(pa.compute.is_null(table.column(FAILED)))
            answers = table.drop_columns([FAILED])
            if file is not None:
                file.write(answers)
            else:
                kept.append(answers)
    columns = pa.concat_tables(kept).combine_chunks() if kept else pa.table({})
    arrays = {name: _as_array(columns.column(name)) for name in columns.column_names}
    return Predictions(model, num_rows, path, arrays, failed)


def _failed_rows(failed: Mapping[int, str]) -> DataError:
    first = list(failed.items())[:MOST_NAMED]
    more = f" and {len(failed) - MOST_NAMED} more in their batch" if len(failed) > MOST_NAMED else ""
    return DataError.problem(
        f"rows {', '.join(str(row) for row, _ in first)}{more}",
        f"have no prediction: row {first[0][0]}: {first[0][1]}",
        "row numbers begin at 0; correct the rows, or add --skip-failed to omit them",
    )


def _as_array(column: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_string(column.type):
        return column.to_pylist()
    from scaleray.data.parquet import column_to_numpy

    return column_to_numpy("answers", column, "the answers") if len(column) else column.to_numpy()
