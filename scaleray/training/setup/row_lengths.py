"""Ordering and packing of rows by their length, and the settings that they cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scaleray.config import RunConfig
from scaleray.data import Split, StepPlan
from scaleray.data.length_order import LengthPlan
from scaleray.errors import ConfigError


def check_row_lengths(config: RunConfig, train: Split) -> None:
    """Raise ConfigError for settings that cannot be combined with an order by length, or batches of tokens."""
    is_packed = train.size.packed_steps(config) is not None
    bucket = config.data.bucket_by_length
    if bucket is None and not is_packed:
        return
    key, value = ("batch.unit", "tokens") if is_packed else ("data.bucket_by_length", bucket)
    if train.is_streamed:
        allowed = "a stream of rows has its own order"
        raise ConfigError(key, value, allowed, "use data that can be read by index")
    if train.lengths is None:
        raise ConfigError(
            key,
            value,
            "the lengths of the training rows are not known",
            "give rows of unequal length as lists of arrays, a Dataset with an attribute `lengths`, or "
            "ParquetSource(lengths=...)",
        )
    if bucket is not None and not config.data.shuffle:
        allowed = "data.shuffle false keeps the order of the file"
        raise ConfigError("data.bucket_by_length", bucket, allowed, "leave one of the two out")
    if config.scale.is_elastic:
        raise ConfigError(
            key,
            value,
            f"scale.workers is {config.scale.workers!s}, but the order by length depends on the global batch",
            "give one number of workers",
        )
    if not is_packed:
        return
    if config.shares.by != "equal":
        raise ConfigError(
            "shares.by", config.shares.by, "with batch.unit tokens, steps vary in rows", "use equal shares"
        )
    if config.has_stages:
        raise ConfigError(
            "batch.unit",
            "tokens",
            "pipeline needs the same micro-batches in every step, but steps of tokens vary in rows",
            "count in samples, or use ddp, fsdp or zero1",
        )
    memory = config.memory
    if config.batch.micro_size is not None and (memory.find_micro_size or memory.on_out_of_memory == "halve"):
        key, value = "memory.find_micro_size", True
        if not memory.find_micro_size:
            key, value = "memory.on_out_of_memory", memory.on_out_of_memory
        raise ConfigError(
            key,
            value,
            "batch.micro_size counts tokens here, but the search tries numbers of rows",
            f"leave out batch.micro_size, to divide a worker's share by rows, or {key}",
        )
    if config.batch.drop_last:
        raise ConfigError(
            "batch.drop_last",
            True,
            "with batch.unit tokens there is no partial batch to drop: steps have about the same size",
            "leave it out",
        )


def check_same_place(config: RunConfig, plan: StepPlan, progress: Mapping[str, Any], global_batch_size: int) -> None:
    """Raise ConfigError for a resumed run whose plan by length differs from that before its interruption."""
    if not isinstance(plan, LengthPlan):
        return
    where = progress["epoch"], progress["sample_in_epoch"]
    if progress["global_batch_size"] != global_batch_size or plan.place(progress["step"]) != where:
        raise ConfigError(
            "batch.global_size",
            config.batch.global_size,
            "a run that orders or packs its rows by length must keep its original batches",
            "resume with the same size, or start a new run from its weights: --workload.weights RUN_FOLDER",
        )
