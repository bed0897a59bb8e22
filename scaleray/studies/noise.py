"""Gradient noise scale in a study: sizes that measure it, and what it means for their batches."""

from collections.abc import Iterable, Sequence

from scaleray.common.printed import quantity
from scaleray.config import RunConfig
from scaleray.config.recipe.noise_source import NoiseSource, noise_source
from scaleray.records.study_record import NoiseHistory, Point
from scaleray.studies.measure_sizes import StudySize
from scaleray.training.setup.job import TrainJob

WELL = 2.0
"""Factor at which a batch counts as well below or above the noise scale."""


def with_noise(config: RunConfig) -> RunConfig:
    """The config with noise measurement enabled if possible."""
    if config.noise_scale.measure is not False:
        return config
    return config.changed({"noise_scale.measure": "auto"})


def source_of(job: TrainJob) -> NoiseSource:
    """Gradients from which a training measures its noise, or None."""
    recipe = job.recipe
    return noise_source(
        job.config,
        recipe.strategy,
        data_parallel_size=job.data_parallel_size,
        accumulation_steps=recipe.accumulation_steps,
    )


def why_no_noise(study_sizes: Iterable[StudySize]) -> str:
    """Reason why no size measures its noise although the config requests it; "" if one does."""
    sources = [source_of(size.job) for size in study_sizes]
    return "" if any(s.name for s in sources) else next((s.why for s in reversed(sources) if s.why), "")


def to_text(noise: NoiseHistory) -> str:
    """Noise scale of one size as text, with its interval."""
    if not noise.num_measurements:
        return "not measured, as the training was shorter than noise_scale.every_steps"
    if noise.scale is None:
        return "too large to resolve"
    low, high = noise.interval or (None, None)
    if low is None:
        return f"{noise.scale:.3g} samples; too few measurements for an interval"
    return f"{noise.scale:.3g} samples ({low:.3g} to {'no bound' if high is None else f'{high:.3g}'})"


def surest(points: Sequence[Point]) -> Point | None:
    """The point with the most noise measurements, preferring unbiased ones; None if there is none."""
    measured = [point for point in points if point.noise is not None and point.noise.num_measurements]

    def worth(point: Point) -> tuple[bool, int]:
        noise = point.noise
        return noise is not None and noise.way != "consecutive steps", noise.num_measurements if noise else 0

    return max(measured, key=worth, default=None)


def resolved(point: Point | None) -> list[tuple[int, float]]:
    """(samples, noise scale) of a point, if it could be resolved."""
    curve = point.noise.curve if point is not None and point.noise is not None else []
    return [(samples, value) for samples, value in curve if value is not None]


def sentence(point: Point) -> str:
    """Sentence on what this point's noise scale says about the size of batches."""
    noise = point.noise
    if noise is None:
        return ""
    workers = quantity(point.workers, "worker")
    first = f"Gradient noise scale over {noise.covers} on {workers}, from {_SOURCES[noise.way]}: {to_text(noise)}"
    if noise.scale is None:
        return f"{first}."
    batch = point.global_batch_size
    if batch * WELL <= noise.scale:
        return f"{first}; the batch of {batch} is well below it: a larger one needs few more samples."
    if batch >= WELL * noise.scale:
        return f"{first}; the batch of {batch} is well above it: much of a larger one is wasted."
    return f"{first}; the batch of {batch} is about as large, so each doubling needs more samples."


_SOURCES = {
    "workers": "the workers' gradients",
    "first micro-batch": "first micro-batches",
    "consecutive steps": "consecutive steps, which underestimates it at a high learning rate",
}
