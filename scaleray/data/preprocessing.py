"""A workload's preprocessor: fitted once on the train split, applied to all splits as they are read, stored with the
run.

It is one of `ray.data.preprocessors`, or any object with `transform(columns)` and, if it needs fitting, `fit(columns)`.
Ray stores preprocessors as pickles. Here, their state is written as JSON with the path of the class; a reader looks
that class up in the imported modules and runs no other code.

load(run_folder) -> the fitted preprocessor, or None; apply(preprocessor, columns) -> columns"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from scaleray.common.filesystems import open_filesystem
from scaleray.data.parquet import ParquetSource, column_to_numpy
from scaleray.data.plain_state import decoded, encoded
from scaleray.data.ragged import Ragged
from scaleray.data.row_random import RowRandom
from scaleray.data.source_interface import Columns, Source, rows_in
from scaleray.data.transformed import checked_rows, place_of
from scaleray.errors import CheckpointError, ClusterError, WorkloadError
from scaleray.workload import call_user_code

# Fitting Ray Data's preprocessors in this process, where there is no Ray.
#
# Their `fit` asks few things of a Ray Dataset: aggregates, and a function over batches. `Blocks` answers these with
# Ray's own aggregates and block formats on rows that lie in memory, so that the values are those that a cluster finds
# (within rounding, as sums are taken in another order).


class Blocks:
    """Blocks of rows that replace a Ray Dataset while a preprocessor is fitted."""

    def __init__(self, blocks: Iterable[Any]) -> None:
        self.blocks = list(blocks)

    def map_batches(self, function: Callable[[Any], Any], *, batch_format: str = "numpy", **options: Any) -> Blocks:
        """Results of a function for each block; options for Ray's distribution of work are ignored."""
        from ray.data.block import BlockAccessor

        return Blocks(BlockAccessor.batch_to_block(function(batch)) for batch in self.iter_batches(batch_format))

    def iter_batches(self, batch_format: str = "numpy", *, batch_size: int | None = None) -> Iterator[Any]:
        """The blocks in one of Ray's batch formats."""
        from ray.data.block import BlockAccessor

        return (BlockAccessor.for_block(block).to_batch_format(batch_format) for block in self.blocks)

    def aggregate(self, *aggregates: Any) -> dict[str, Any]:
        """Result of each Ray aggregate over all rows, by name."""
        found = {}
        for one in aggregates:
            total, *parts = (one.accumulate_block(one.init(None), block) for block in self.blocks)
            for part in parts:
                total = one.merge(total, part)
            found[one.name] = one.finalize(total)
        return found

    def groupby(self, key: None) -> _Whole:
        """All rows as a single group."""
        return _Whole(self)


class _Whole:
    """All rows as a single group; its aggregates are the only row of a table."""

    def __init__(self, rows: Blocks) -> None:
        self.rows = rows

    def aggregate(self, *aggregates: Any) -> SimpleNamespace:
        import pyarrow as pa

        found = self.rows.aggregate(*aggregates)
        table = pa.table({name: pa.array([value]) for name, value in found.items()})
        return SimpleNamespace(to_arrow_refs=lambda: [table])


def fit_in_process(preprocessor: Any, tables: Sequence[Any]) -> None:
    """Fit one of Ray Data's preprocessors on tables of rows. Raises ClusterError if it needs Dataset methods of Ray."""
    with _results_at_hand():
        try:
            preprocessor.fit(Blocks(tables))
        except AttributeError as exc:
            if not isinstance(exc.obj, Blocks | _Whole | SimpleNamespace):
                raise
            raise ClusterError(
                f"preprocessor() {type(preprocessor).__name__}",
                "not fitted",
                f"its fit needs {exc.name} of a Ray Dataset, which is unavailable without Ray",
                "omit --local, or return a fitted preprocessor",
            ) from exc


@contextlib.contextmanager
def _results_at_hand() -> Iterator[None]:
    """Context in which Ray's preprocessors accept results that already exist, since `ray.get` would start a cluster."""
    from ray.data.preprocessors import utils

    if not hasattr(utils, "ray"):  # another version of Ray gets its results in another way
        yield
        return
    with patch.object(utils, "ray", SimpleNamespace(get=lambda result: result)):
        yield


FILE = "preprocessor.json"
FORMAT = 1
FITTED_ROWS = 2**16  # rows that are read together to fit


def is_rays(preprocessor: Any) -> bool:
    """Whether this is one of Ray Data's preprocessors or a subclass."""
    return any(c.__module__ == "ray.data.preprocessor" for c in type(preprocessor).__mro__)


def fit(preprocessor: Any, source: Source) -> Any:
    """Fit the preprocessor on all rows of `source`, unless it is already fitted or needs no fit, and return it.

    Ray Data fits its own preprocessors; without Ray, this process does. Raises WorkloadError if their code fails."""
    name = type(preprocessor).__name__
    if is_rays(preprocessor):
        if preprocessor.fit_status().value in ("FITTED", "NOT_FITTABLE"):
            return preprocessor
        import ray

        if ray.is_initialized():
            with _quiet():
                dataset = _dataset(source)
                call = lambda: preprocessor.fit(dataset)
                return call_user_code(call, what=f"preprocessor() {name}", doing="fitting")
        tables = list(_tables(source))
        call_user_code(lambda: fit_in_process(preprocessor, tables), what=f"preprocessor() {name}", doing="fitting")
        return preprocessor
    for method in ("partial_fit", "fit"):
        if callable(take := getattr(preprocessor, method, None)):
            size = FITTED_ROWS if method == "partial_fit" else source.num_rows
            for start in range(0, source.num_rows, size):
                rows = source.read(np.arange(start, min(start + size, source.num_rows)))
                call_user_code(lambda rows=rows: take(rows), what=f"{name}.{method}()", doing="fitting")
            break
    return preprocessor


def apply(preprocessor: Any, rows: Columns, *, allows_text: bool = False) -> Columns:
    """Apply a fitted preprocessor to columns. Ray's preprocessors get only the one-dimensional columns."""
    name = type(preprocessor).__name__
    num_rows = rows_in(rows)
    aside: Columns = {}
    if is_rays(preprocessor):
        aside = {n: c for n, c in rows.items() if (c.shapes is not None if isinstance(c, Ragged) else c.ndim > 1)}
        batch = {n: _objects(c) if isinstance(c, Ragged) else c for n, c in rows.items() if n not in aside}
        call = lambda: _columns(preprocessor.transform_batch(batch), allows_text=allows_text)
    else:
        call = lambda: preprocessor.transform(rows)
    given = call_user_code(call, what=f"{name}.transform()", doing=f"changing {num_rows} rows")
    made = checked_rows(given, num_rows, what=f"{name}.transform()", allows_text=allows_text)
    return {**{n: column for n, column in aside.items() if n not in made}, **made}


@dataclass(frozen=True)
class Preprocess:
    """A fitted preprocessor as a step that changes rows as they are read."""

    preprocessor: Any
    allows_text: bool
    kind = "preprocessor"
    is_of_scaleray = False

    def __post_init__(self) -> None:
        wanted = "transform_batch" if is_rays(self.preprocessor) else "transform"
        if not callable(getattr(self.preprocessor, wanted, None)):
            raise WorkloadError(
                "preprocessor()",
                f"a {type(self.preprocessor).__name__}",
                "it must return one of ray.data.preprocessors, or an object with transform(columns)",
                "to combine several, use ray.data.preprocessors.Chain(...)",
            )

    @property
    def name(self) -> str:
        """Name of its class."""
        return type(self.preprocessor).__name__

    @property
    def where(self) -> str:
        """File and line of its class's `transform`, or the class name."""
        return self.name if is_rays(self.preprocessor) else place_of(self.preprocessor.transform)

    def __call__(self, rows: Columns, rng: RowRandom) -> Columns:
        return apply(self.preprocessor, rows, allows_text=self.allows_text)


def save(preprocessor: Any, folder: str) -> None:
    """Write a fitted preprocessor to a run folder, local or a URI. Raises WorkloadError if its state contains more than
    data."""
    text = json.dumps({"format": FORMAT, "preprocessor": encoded(preprocessor, type(preprocessor).__name__)}, indent=1)
    filesystem, inner = open_filesystem(folder)
    with filesystem.open_output_stream(f"{inner}/{FILE}") as file:
        file.write(text.encode())


def load(folder: str, module_name: Callable[[str], str] = str) -> Any:
    """Load the fitted preprocessor from a run folder; None if the run had none. module_name: maps a class's recorded
    module to its name here.

    Its class must be importable or in a workload file that is already loaded. Raises CheckpointError."""
    import pyarrow.fs

    filesystem, inner = open_filesystem(folder)
    path = f"{inner}/{FILE}"
    if filesystem.get_file_info(path).type == pyarrow.fs.FileType.NotFound:
        return None
    with filesystem.open_input_stream(path) as file:
        text = file.read()
    try:
        document = json.loads(text, object_hook=lambda entry: _of_module(entry, module_name))
        if document["format"] != FORMAT:
            text = f"has format {document['format']}, and this version of scaleray reads format {FORMAT}"
            raise CheckpointError.problem(f"{folder}/{FILE}", text, "use a newer scaleray")
        return decoded(document["preprocessor"])
    except (ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{folder}/{FILE}", "damaged", f"it cannot be read: {exc}") from exc


def _of_module(entry: dict[str, Any], module_name: Callable[[str], str]) -> dict[str, Any]:
    if isinstance(name := entry.get("class"), str):
        module, _, attribute = name.partition(":")
        return {**entry, "class": f"{module_name(module)}:{attribute}"}
    return entry


def _dataset(source: Source) -> Any:
    """The rows of a source as a Ray Dataset."""
    import ray

    if hasattr(source, "dataset") and type(source.dataset).__module__.startswith("ray.data"):
        return source.dataset
    if isinstance(source, ParquetSource):
        filesystem, path = open_filesystem(source.uri)
        return ray.data.read_parquet(path, filesystem=filesystem, columns=source.columns)
    return ray.data.from_arrow(list(_tables(source)))


def _tables(source: Source) -> Iterator[Any]:
    """The rows of a source as tables, without multidimensional columns. NaN becomes null again, as it was in a file."""
    import pyarrow as pa

    for start in range(0, source.num_rows, FITTED_ROWS):
        rows = source.read(np.arange(start, min(start + FITTED_ROWS, source.num_rows)))
        flat = {n: list(c) if isinstance(c, Ragged) and c.shapes is None else c for n, c in rows.items()}
        plain = {n: c for n, c in flat.items() if isinstance(c, list) or getattr(c, "ndim", 2) == 1}
        yield pa.table({n: pa.array(c, from_pandas=not isinstance(c, list)) for n, c in plain.items()})


def _columns(batch: Any, *, allows_text: bool) -> Mapping[str, Any]:
    """Columns from the result of Ray's preprocessors: a dict of arrays, a table or a DataFrame."""
    import pyarrow as pa

    if isinstance(batch, pa.Table):
        return {n: column_to_numpy(n, batch.column(n), "the rows", allows_text=allows_text) for n in batch.column_names}
    if isinstance(batch, Mapping):
        return batch
    return {str(name): batch[name].to_numpy() for name in batch.columns}


def _objects(column: Ragged) -> np.ndarray:
    found = np.empty(len(column), dtype=object)
    for place, row in enumerate(column):
        found[place] = row
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context without the progress bars of Ray Data."""
    import ray

    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars
    context.enable_progress_bars = False
    try:
        yield
    finally:
        context.enable_progress_bars = before
