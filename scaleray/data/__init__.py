"""Training input: sources, the step plan, and the stream that executes it."""

from scaleray.data.part import Part
from scaleray.data.part_stream import PartStream
from scaleray.data.sample_order import StepPlan
from scaleray.data.sources import ArraySource, DatasetSource, ParquetSource, StreamSource, TokenSource, as_source
from scaleray.data.stream import RankBatch, StepStream

__all__ = [
    "ArraySource",
    "DatasetSource",
    "ParquetSource",
    "Part",
    "PartStream",
    "RankBatch",
    "StepPlan",
    "StepStream",
    "StreamSource",
    "TokenSource",
    "as_source",
]
