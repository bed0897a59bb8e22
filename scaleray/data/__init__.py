"""Training input: sources, the step plan, and the stream that executes it."""

from scaleray.data.as_source import as_source, load_sources
from scaleray.data.collation import Flattening, Padding, flattened, padded
from scaleray.data.input import Input, RaySources, Sources
from scaleray.data.iterable import IterableSource
from scaleray.data.not_finite import RowsOfStep
from scaleray.data.ragged import Ragged
from scaleray.data.rank_batch import RankBatch
from scaleray.data.rank_part import Part
from scaleray.data.ray_dataset_source import StreamSource
from scaleray.data.row_random import RowRandom
from scaleray.data.sample_order import StepPlan
from scaleray.data.source_interface import TRAIN
from scaleray.data.sources import ArraySource, DatasetSource, ParquetSource, TokenSource
from scaleray.data.split_facts import Split
from scaleray.data.stream import StepStream
from scaleray.data.tar_shards import TarSource

__all__ = [
    "TRAIN",
    "ArraySource",
    "DatasetSource",
    "Flattening",
    "Input",
    "IterableSource",
    "Padding",
    "ParquetSource",
    "Part",
    "Ragged",
    "RankBatch",
    "RaySources",
    "RowRandom",
    "RowsOfStep",
    "Sources",
    "Split",
    "StepPlan",
    "StepStream",
    "StreamSource",
    "TarSource",
    "TokenSource",
    "as_source",
    "flattened",
    "load_sources",
    "padded",
]
