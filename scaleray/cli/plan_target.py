"""`scaleray plan --rank time-to-target`: the options, or a record that measured gradient noise, as the samples that each batch size needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaleray.errors import ConfigError, UsageError
from scaleray.parsing import load_json
from scaleray.planner.to_target import Target
from scaleray.scaling.goodput import Noise, is_trusted, predict_samples
from scaleray.study_records import Estimate


@dataclass(frozen=True)
class Learned:
    """What a record says of learning: samples to its target by batch size, and noise scales."""

    samples: Mapping[int, float] = field(default_factory=dict)
    noises: Sequence[Noise] = ()


def target_of(
    *, batch_size: int, noise_scale: float | None, samples: float | None, steps: float | None, from_run: Path | None
) -> Target:  # fmt: skip
    """Raises ConfigError where the noise or the target is not known.

    noise_scale: in samples, measured at `batch_size`, as are `samples` and `steps` to the target.
    """
    for name, value in (("--noise-scale", noise_scale), ("--target-samples", samples), ("--target-steps", steps)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(name, value, "it must be positive")
    if samples is not None and steps is not None:
        raise ConfigError("--target-steps", steps, "it cannot be given with --target-samples", "leave one of them out")
    learned = read_learned(from_run) if from_run is not None else Learned()
    if noise_scale is not None:
        learned = Learned(learned.samples, [Noise(batch_size, Estimate(noise_scale, noise_scale, noise_scale))])
    wanted = samples if samples is not None else steps * batch_size if steps is not None else None
    known = {batch_size: wanted} if wanted is not None else dict(learned.samples)
    if not known:
        raise ConfigError("--rank time-to-target", None, "it must be known how far the target is", "--target-steps or --target-samples at --global-batch, or --from-run with a sweep that reached its target")  # fmt: skip
    if not learned.noises and len(known) < 2:
        raise ConfigError("--rank time-to-target", None, "without a noise scale no batch size can be compared", "--noise-scale, or --from-run with a run, study or sweep that measured it")  # fmt: skip
    noises = list(learned.noises)
    measured = ", ".join(f"{noise.scale.value:,.4g} at a batch of {noise.batch_size:,}" for noise in noises[:3])
    reached = ", ".join(f"{value:,.4g} at a batch of {size:,}" for size, value in sorted(known.items())[:3])
    return Target(
        samples=lambda batch: predict_samples(batch, known=known, noises=noises),
        is_trusted=lambda batch: batch in known or is_trusted(batch, noises),
        words=f"samples to the target: {reached}" + (f"; gradient noise scale: {measured}" if measured else ""),
    )


def read_learned(path: Path) -> Learned:
    """Of a sweep's record: what its trials needed; of a study's or a run's: the noise scale. Nothing where it measured none.

    Raises UsageError for a file that is no record.
    """
    path = path / "record.json" if path.is_dir() else path
    try:
        record = load_json(path.read_text())
        if "trials" in record:
            return _of_sweep(record["trials"])
        if "curves" in record:
            return _of_study(record)
        return _of_run(record)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError(
            "--from-run", str(path), f"it is no record of a run, study or sweep: {type(exc).__name__} {exc}"
        ) from exc


def _of_sweep(trials: Sequence[Mapping[str, Any]]) -> Learned:
    """Of each batch size the trial that reached the target with the fewest samples."""
    samples: dict[int, float] = {}
    noises: dict[int, Noise] = {}
    for trial in trials:
        size, needed, scale = int(trial["batch_size"]), trial["samples_to_target"], trial["noise_scale"]
        if needed and needed < samples.get(size, math.inf):
            samples[size] = float(needed)
        noise = _noise(size, scale, *(trial["noise_interval"] or (scale, scale)))
        noises |= {size: noise} if noise else {}
    return Learned(samples, tuple(noises.values()))


def _of_study(record: Mapping[str, Any]) -> Learned:
    points = [one["point"] for curve in record["curves"] for one in curve["points"]]
    noises = {
        int(point["global_batch_size"]): float(point["noise_scale"]) for point in points if point.get("noise_scale")
    }
    return Learned({}, tuple(Noise(size, Estimate(scale, scale, scale)) for size, scale in noises.items()))


def _of_run(record: Mapping[str, Any]) -> Learned:
    noise = record.get("noise") or {}
    found = _noise(
        int(record["derived"]["global_batch_size"]), *(noise.get(key) for key in ("effective", "effective_low", "effective_high"))
    )  # fmt: skip
    return Learned({}, (found,) if found else ())


def _noise(size: int, scale: float | None, low: float | None, high: float | None) -> Noise | None:
    """Records have None for what is infinite: a scale without a value and with a lower end is larger than could be resolved."""
    if scale is None and low is None:
        return None
    value = math.inf if scale is None else float(scale)
    return Noise(size, Estimate(value, value if low is None else float(low), math.inf if high is None else float(high)))
