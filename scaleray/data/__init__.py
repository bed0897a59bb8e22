"""Training input: sources, the step plan, and the stream that executes it."""

from scaleray.data.input import Input, RaySources, Sources
from scaleray.data.part import Part
from scaleray.data.sample_order import StepPlan
from scaleray.data.source import TRAIN
from scaleray.data.sources import (
    ArraySource,
    DatasetSource,
    ParquetSource,
    StreamSource,
    TokenSource,
    as_source,
    load_sources,
)
from scaleray.data.split import Split
from scaleray.data.stream import RankBatch, StepStream

__all__ = [
    "TRAIN",
    "ArraySource",
    "DatasetSource",
    "Input",
    "ParquetSource",
    "Part",
    "RankBatch",
    "RaySources",
    "Sources",
    "Split",
    "StepPlan",
    "StepStream",
    "StreamSource",
    "TokenSource",
    "as_source",
    "load_sources",
]
