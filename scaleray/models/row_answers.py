"""Answers of a model for rows in memory, call after call: for a server's requests, say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scaleray.data.ragged import Ragged
from scaleray.models.load import ModelParts
from scaleray.models.predict import collected
from scaleray.models.predictor import Predictor, PredictorParts, arrow_array
from scaleray.models.row_files import Shape


class RowAnswers:
    """Function from rows, values by column, to answers by name: arrays, or lists of texts, with an element a row."""

    def __init__(self, parts: ModelParts, shape: Shape, gives_tuples: bool) -> None:
        self.name = parts.name
        self.predictor = Predictor(PredictorParts(parts, shape, gives_tuples, where="the rows"))

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Raises DataError with the numbers of rows that fail, or WorkloadError where all do."""
        import pyarrow as pa

        table = pa.table({name: _as_arrow(values) for name, values in rows.items()})
        return dict(collected(iter([self.predictor(table)]), None, self.name, skip_failed=False).columns)


def _as_arrow(values: Any) -> Any:
    is_ragged = isinstance(values, Ragged) or (isinstance(values, np.ndarray) and values.dtype.kind == "O")
    return arrow_array(list(values) if is_ragged else values)
