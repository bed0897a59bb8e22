"""Sources made from a workload's `datasets()`, with its `preprocessor` and `transform` applied to their rows."""

import copy
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from scaleray.common.progress import stage
from scaleray.data import hugging_face_data, preprocessing
from scaleray.data.collation import refuse_ragged
from scaleray.data.iterable import IterableSource, refuse_shared_place
from scaleray.data.parquet import ParquetSource
from scaleray.data.preprocessing import Preprocess
from scaleray.data.ray_dataset_source import StreamSource
from scaleray.data.row_values import rows_to_look_at, with_row_values
from scaleray.data.source_interface import TRAIN, Source
from scaleray.data.sources import STORED, ArraySource, DatasetSource
from scaleray.data.tar_shards import TarSource
from scaleray.data.transformed import Step, Transform, Transformed, under_transforms
from scaleray.data.user_dataset import AsGiven
from scaleray.errors import DataError
from scaleray.workload import call_user_code, own_method


def load_sources(workload: Any, *, fitted: Any = None, in_steps: bool = False) -> dict[str, Source]:
    """Load the workload's data by split, with its preprocessor and transform. Raises DataError or WorkloadError.

    fitted: the run's existing preprocessor; otherwise the workload's is fitted on the train split. in_steps: whether
    all lengths of the training are in steps, so that its data may be endless."""
    with stage("reading the data"):
        given = call_user_code(workload.datasets, what="datasets()", doing="reading the data")
    _quieten_ray_data()
    if not isinstance(given, Mapping) or TRAIN not in given:
        found = f"splits {sorted(given)}" if isinstance(given, Mapping) else type(given).__name__
        raise DataError(
            "datasets()",
            found,
            "it must return a mapping with the split 'train'",
            "for example {'train': ..., 'val': ...}",
        )
    with stage("reading the first rows"):
        text = reads_text(workload)
        # all before the first row is read: splits may share a Dataset
        recorded = {name: AsGiven(value) for name, value in given.items() if _is_of_user(value)}
        sources = {
            name: as_source(value, split=name, allows_text=text, as_given=recorded.get(name), in_steps=in_steps)
            for name, value in given.items()
        }
        refuse_shared_place(sources)
    method = own_method(workload, "preprocessor")
    if method is not None and fitted is None:
        with stage("fitting the preprocessor"):
            made = Preprocess(call_user_code(method, what="preprocessor()", doing="making it"), allows_text=True)
            fitted = preprocessing.fit(made.preprocessor, sources[TRAIN])
    return {name: for_workload(source, workload, split=name, fitted=fitted) for name, source in sources.items()}


def _quieten_ray_data() -> None:
    """Suppress Ray Data's messages about each execution, which the command reports as stages."""
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # says that progress bars are off


def reads_text(workload: Any) -> bool:
    """Whether the workload converts its rows to numbers, so that its sources may contain text."""
    return any(own_method(workload, name) is not None for name in ("preprocessor", "transform"))


def for_workload(source: Source, workload: Any, *, split: str, fitted: Any = None) -> Source:
    """Apply the workload's preprocessing and transform to a source. Raises DataError for rows that cannot form a batch.
    fitted: the workload's fitted preprocessor, if any."""
    transform = Transform.of(workload, split)
    if fitted is not None:
        source = _changed(source, Preprocess(fitted, allows_text=transform is not None))
    if transform is not None:
        source = _changed(source, transform)
    ragged: tuple[str, ...] = getattr(source, "ragged_columns", ())
    if own_method(workload, "collate") is None and ragged:
        few = np.array(rows_to_look_at(under_transforms(source)))
        refuse_ragged(source.read(few), what=f"the {split} data")
    return source


def _changed(source: Source, step: Step) -> Source:
    return source.mapped(step) if isinstance(source, StreamSource) else Transformed(source, step)


def preprocessor_of(source: Source) -> Any:
    """Fitted preprocessor applied to the rows of this source, or None."""
    while isinstance(source, Transformed):
        if isinstance(source.transform, Preprocess):
            return source.transform.preprocessor
        source = source.source
    return getattr(source, "preprocessor", None)


def _is_of_user(value: Any) -> bool:
    """Whether user code reads the rows, in a Dataset or another iterable."""
    return not isinstance(value, Mapping | Source) and not type(value).__module__.startswith("ray.data")


def as_source(
    value: Any, *, split: str, allows_text: bool = False, as_given: AsGiven | None = None, in_steps: bool = False
) -> Source:
    """Make the source for one split of a workload's `datasets()`. Raises DataError for unsupported values.

    allows_text: columns may contain text that will be converted to numbers. as_given: see DatasetSource. in_steps: see
    `load_sources`."""
    source: Source
    hugging_face_data.check(value, split=split)
    one_by_one: dict[str, Any] = {
        "allows_text": allows_text,
        "reads_copy": split != TRAIN,
        "as_given": as_given,
        "may_be_endless": in_steps and split == TRAIN,
    }
    if allows_text and isinstance(value, ParquetSource):
        value = copy.copy(value)
        value.allows_text = True
    if isinstance(value, ParquetSource):
        value.check_nulls()
    if isinstance(value, TarSource):
        source = copy.copy(value)
        source.allows_text = allows_text
        source.read(np.array([0]))  # text that nothing makes numbers of is better said now
    elif isinstance(value, Source):
        # sources of this package know their rows already
        source = value if type(value) in STORED or hasattr(value, "row_values") else with_row_values(value)
    elif isinstance(value, Mapping):
        source = ArraySource(value, allows_text=allows_text)
    elif type(value).__module__.startswith("ray.data"):
        source = StreamSource(value)
    elif hugging_face_data.is_dataset(value) and (found := hugging_face_data.in_blocks(value, allows_text=allows_text)):
        source = found
    elif isinstance(value, torch.utils.data.IterableDataset):
        source = IterableSource(value, **one_by_one)
    elif (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, (str, list, tuple, np.ndarray))
    ):
        source = DatasetSource(value, allows_text=allows_text, as_given=as_given)
    elif hasattr(value, "__iter__") and not isinstance(value, (str, list, tuple, set, np.ndarray)):
        source = IterableSource(value, **one_by_one)
    else:
        raise DataError(
            f"the {split} data",
            type(value).__name__,
            "it must be a dict of arrays, a source, a torch Dataset, an IterableDataset or a Ray Dataset",
            "see scaleray.data.sources",
        )
    if source.num_rows == 0:
        raise DataError(f"the {split} data", "empty", "at least one row is needed")
    return source
