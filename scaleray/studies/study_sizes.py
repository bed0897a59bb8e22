"""Sizes of a study: numbers of workers x modes, each with its recipe, all derived before the start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scaleray.config import RunConfig
from scaleray.config.base import Duration
from scaleray.config.compression import CompressionSettings
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import nearest_multiples
from scaleray.config.strategy import SharesSettings
from scaleray.config.strategy_traits import traits_of
from scaleray.data import TRAIN, Split
from scaleray.data.source_interface import Source
from scaleray.errors import ConfigError, DataError, first_line
from scaleray.records.start import steady_time
from scaleray.records.study_record import Mode
from scaleray.studies.hardware import OVERSUBSCRIBED, RELAUNCHED
from scaleray.studies.measure_sizes import StudySize
from scaleray.studies.noise import source_of
from scaleray.studies.study_options import MODES, StudyOptions
from scaleray.training.setup.job import TrainJob


def make_study_sizes(
    config: RunConfig, options: StudyOptions, workload: Any, sources: Mapping[str, Source], *, cores: int | None = None
) -> dict[str, StudySize]:
    """Every size with its recipe, by name, in the order of the curves. cores: number of cores that workers share if
    they have no devices; None: no size is marked. Raises UsageError for sizes that do not divide or options that
    conflict."""
    splits = {name: Split.of(name, source, workload) for name, source in sources.items()}
    _check(config, options, splits)
    study_sizes: dict[str, StudySize] = {}
    for mode in MODES:
        for workers in options.sizes if mode in options.modes else ():
            global_size = _global_size(config, mode, workers, options)
            is_as_given = global_size == config.batch.global_size
            spread = on_workers(config, workers, global_size, as_given=is_as_given or options.to_target)
            try:
                recipe = derive(spread, splits[TRAIN].size)
            except DataError as exc:
                if mode == "strong" or workers == options.sizes[0]:
                    raise
                # what is advised for a training's own batch would be multiplied by the number of workers here
                raise DataError(
                    "--world-sizes",
                    workers,
                    f"with --mode weak, {first_line(exc).rstrip('.')}",
                    "omit the size, or begin with a smaller batch.global_size",
                ) from exc
            job = TrainJob(spread, recipe, workload, splits, steady_time())
            name = f"w{workers:03d}-b{recipe.global_batch_size}-m{recipe.micro_batch_size}-{recipe.strategy}"
            name += "-relaunched" if options.relaunch else ""
            if name in study_sizes:
                study_sizes[name].modes.append(mode)
                continue
            is_crowded = cores is not None and not config.scale.gpus and workers > cores
            study_sizes[name] = StudySize(
                name=name,
                workers=workers,
                modes=[mode],
                job=job,
                num_turns=options.repeats,
                steps=options.steps,
                seconds=options.seconds,
                # occasional averagings count for every step
                period=spread.local_sgd.sync_every if traits_of(recipe.strategy).averages_now_and_then else 1,
                trains_to_target=options.to_target,
                measures_noise=source_of(job).name is not None,
                marks=[OVERSUBSCRIBED] * is_crowded + [RELAUNCHED] * options.relaunch,
            )
    return study_sizes


def on_workers(config: RunConfig, workers: int, global_size: int, *, as_given: bool) -> RunConfig:
    """The training on so many workers with this global batch (in the config's unit).

    as_given: with the learning rate by its rule; timing needs none, so a rule that refuses the batch must not stop a
    study."""
    settings: dict[str, Any] = {"scale.workers": workers, "scale.max_failures": 0, "batch.global_size": global_size}
    if workers == 1:
        settings |= {"compression": CompressionSettings(), "shares": SharesSettings()}  # one process sends nothing
    if not as_given:
        settings |= {"optimizer.rule": "none", "schedule.warmup": Duration(0, "steps"), "schedule.length": None}
    return config.changed(settings)


def _check(config: RunConfig, options: StudyOptions, splits: Mapping[str, Split]) -> None:
    if splits[TRAIN].is_streamed:
        raise DataError(
            "the train data",
            "a Ray Dataset",
            "it is split once for a fixed number of workers, but every measurement needs its own split",
            "study rows that can be read by index: arrays, ParquetSource, TokenSource or a torch Dataset",
        )
    if config.memory.find_micro_size:
        raise ConfigError(
            "memory.find_micro_size",
            True,
            "every measurement would search again, and sizes with different micro-batches cannot form a curve",
            "set batch.micro_size to the result of a training on the smallest size, and omit memory.find_micro_size",
        )
    _check_shares(config, options)
    if options.to_target and config.stop.at is None:
        raise ConfigError(
            "stop.at",
            None,
            "--to-target needs a target to train to",
            "for example --stop.at 'val/loss <= 1.0' --evaluation.every '1 epoch'",
        )
    most = max(options.sizes)
    if config.scale.gpus and config.scale.gpus < 1 and most > 1:
        raise ConfigError("scale.gpus_per_worker", config.scale.gpus, "each of several workers needs a GPU")


def _check_shares(config: RunConfig, options: StudyOptions) -> None:
    if config.shares.by == "speed":
        raise ConfigError(
            "shares.by",
            "speed",
            "measurements end before shares settle, and each would settle on different ones",
            "use equal shares, or those of a training: shares.by given with shares.speeds",
        )
    speeds = config.shares.speeds
    if speeds is not None and (other := [n for n in options.sizes if n not in (1, len(speeds))]):
        raise ConfigError(
            "shares.speeds",
            list(speeds),
            f"{other[0]} workers need {other[0]} speeds",
            f"measure 1 and {len(speeds)} workers, or use equal shares",
        )


def _global_size(config: RunConfig, mode: Mode, workers: int, options: StudyOptions) -> int:
    size, base = config.batch.global_size, options.sizes[0]
    if mode == "strong":
        return size
    if size * workers % base:
        near = " or ".join(str(n) for n in nearest_multiples(size, base))
        raise ConfigError(
            "batch.global_size",
            size,
            f"weak scaling from {base} workers needs a multiple of {base}",
            f"nearest: {near}",
        )
    return size * workers // base
