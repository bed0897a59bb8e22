"""`scaleray plan --rank time-to-target`: samples that each batch size needs, from the options or from a record with
measured gradient noise."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scaleray.errors import ConfigError, UsageError
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.answers.to_target import Target, Way, best_way, ways_to
from scaleray.planner.ask.plan_options import PlanOptions
from scaleray.records.read import read_record
from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import Estimate, StudyRecord
from scaleray.records.sweep_record import SweepRecord, Trial
from scaleray.training.noise.statistical_efficiency import Noise, is_trusted, predict_samples


@dataclass(frozen=True)
class Learned:
    """Facts from a record: samples to its target by batch size, and noise scales."""

    samples: Mapping[int, float] = field(default_factory=dict)
    noises: Sequence[Noise] = ()


@dataclass(frozen=True)
class Asked:
    """Length of the training for a plan.

    samples: samples of the whole training, if known. ways: if requested, batch sizes and numbers of GPUs with their
    times; `words` names the source of the target."""

    samples: float | None
    ways: Sequence[Way] = ()
    words: str = ""


def ways_and_samples(question: Question, options: PlanOptions) -> tuple[Question, Asked]:
    """Return the samples of the training and the ways to its target; with `--rank time-to-target`, the question gets
    the best way's batch size.

    Raises ConfigError for options without effect, and the errors of `target_of`.
    """
    samples, steps = options.samples, options.target_steps
    if options.rank_by != "time-to-target":
        if options.noise_scale is not None:
            raise ConfigError.problem(
                "--noise-scale", "has no effect without --rank time-to-target", "add it, or omit --noise-scale"
            )
        return question, Asked(steps * question.global_batch if samples is None and steps is not None else samples)
    target = target_of(
        batch_size=question.global_batch,
        noise_scale=options.noise_scale,
        samples=samples,
        steps=steps,
        from_run=None if options.from_run is None else Path(options.from_run),
    )
    is_asynchronous = not options.waits_for_checkpoints
    ways = ways_to(target, question, interval_s=options.interval_s, is_asynchronous=is_asynchronous)
    chosen = best_way(ways, num_gpus=question.cluster.num_gpus)
    if chosen is not None:
        question = dataclasses.replace(question, global_batch=chosen.batch_size)
        samples = chosen.samples.value
    return question, Asked(samples, ways, target.words)


def target_of(
    *, batch_size: int, noise_scale: float | None, samples: float | None, steps: float | None, from_run: Path | None
) -> Target:
    """Return the target, from the options and the record. Raises ConfigError if the noise or the target is unknown.

    noise_scale: in samples, measured at `batch_size`, as are `samples` and `steps` to the target.
    """
    for name, value in (("--noise-scale", noise_scale), ("--target-samples", samples), ("--target-steps", steps)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(name, value, "it must be positive")
    if samples is not None and steps is not None:
        raise ConfigError.problem("--target-steps", "cannot be combined with --target-samples", "omit one of them")
    learned = read_learned(from_run) if from_run is not None else Learned()
    if noise_scale is not None:
        learned = Learned(learned.samples, [Noise(batch_size, Estimate(noise_scale, noise_scale, noise_scale))])
    wanted = samples if samples is not None else steps * batch_size if steps is not None else None
    known = {batch_size: wanted} if wanted is not None else dict(learned.samples)
    if not known:
        raise ConfigError.problem(
            "--rank time-to-target",
            "needs the distance to the target",
            "give --target-steps or --target-samples at --global-batch, or --from-run with a sweep that reached it",
        )
    if not learned.noises and len(known) < 2:
        raise ConfigError.problem(
            "--rank time-to-target",
            "needs a noise scale",
            "give --noise-scale, or --from-run with a run, study or sweep that measured it",
        )
    noises = list(learned.noises)
    measured = ", ".join(f"{noise.scale.value:,.4g} at a batch of {noise.batch_size:,}" for noise in noises[:3])
    reached = ", ".join(f"{value:,.4g} at a batch of {size:,}" for size, value in sorted(known.items())[:3])
    return Target(
        samples=lambda batch: predict_samples(batch, known=known, noises=noises),
        is_trusted=lambda batch: batch in known or is_trusted(batch, noises),
        words=f"samples to the target: {reached}" + (f"; gradient noise scale: {measured}" if measured else ""),
    )


def read_learned(path: Path) -> Learned:
    """Read the samples of a sweep's trials, or the noise scale of a study or run; empty if it has none. Raises
    UsageError if the file is not a record.
    """
    try:
        record = read_record(path)
        if isinstance(record, SweepRecord):
            return _of_sweep(record.trials)
        if isinstance(record, StudyRecord):
            return _of_study(record)
        return _of_run(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError(
            "--from-run", str(path), f"it is not a record of a run, study or sweep: {type(exc).__name__} {exc}"
        ) from exc


def _of_sweep(trials: Sequence[Trial]) -> Learned:
    """Facts from a sweep, using the trial of each batch size that reached the target with the fewest samples."""
    samples: dict[int, float] = {}
    noises: dict[int, Noise] = {}
    for trial in trials:
        size, needed, scale = trial.batch_size, trial.samples_to_target, trial.noise_scale
        if needed and needed < samples.get(size, math.inf):
            samples[size] = float(needed)
        noise = _noise(size, scale, *(trial.noise_interval or (scale, scale)))
        noises |= {size: noise} if noise else {}
    return Learned(samples, tuple(noises.values()))


def _of_study(record: StudyRecord) -> Learned:
    points = [at.point for curve in record.curves for at in curve.points]
    noises = {point.global_batch_size: point.noise_scale for point in points if point.noise_scale}
    return Learned({}, tuple(Noise(size, Estimate(scale, scale, scale)) for size, scale in noises.items()))


def _of_run(record: RunRecord) -> Learned:
    interval = (record.noise.get(key) for key in ("effective", "effective_low", "effective_high"))
    found = _noise(int(record.derived["global_batch_size"]), *interval)
    return Learned({}, (found,) if found else ())


def _noise(size: int, scale: float | None, low: float | None, high: float | None) -> Noise | None:
    """Noise scale of a record, in which None means infinite: a scale with a lower end but no value was too large to
    resolve."""
    if scale is None and low is None:
        return None
    value = math.inf if scale is None else float(scale)
    return Noise(size, Estimate(value, value if low is None else float(low), math.inf if high is None else float(high)))
