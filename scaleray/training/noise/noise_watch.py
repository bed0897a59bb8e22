"""Measures a run's gradient noise, if enabled, behind a guard that keeps its errors from ending the training."""

from typing import Any

from scaleray.common.watchers import Guard, Watcher
from scaleray.config import RunConfig
from scaleray.config.recipe.noise_source import noise_source
from scaleray.config.recipe.values import Recipe
from scaleray.records.run_record import Say
from scaleray.training.noise.meter import NoiseMeter
from scaleray.training.observer import Observer
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext


class NoiseWatch(Observer):
    """Owner of a run's meter. Without a meter, every method does nothing. kept: state stored by the interrupted run, if
    this one continues it."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.meter: NoiseMeter | None = None
        self.kept: dict[str, Any] | None = None

    def start(self, config: RunConfig, recipe: Recipe, setup: Setup, place: RankContext, say: Say) -> NoiseMeter | None:
        """Create the meter once micro-batches are known. Collective if noise is measured. say: called on all ranks with
        the name of the method, which rank 0 logs."""
        if config.noise_scale.measure is False:
            return None
        source = noise_source(
            config,
            recipe.strategy,
            data_parallel_size=place.data_parallel_size,
            accumulation_steps=recipe.accumulation_steps,
        )
        say(str(source))
        if (name := source.name) is None:
            return None
        meter = self.guard(Watcher.NOISE, lambda: NoiseMeter(config, setup, place, name, self.guard), None)
        if place.all_reduce([float(meter is None)])[0] > 0 or meter is None:
            return None  # the meter sums over all ranks, so that all have one or none
        if (state := self.kept) is not None:
            self.guard(Watcher.NOISE, lambda: meter.load_state(state), None)
        self.meter = meter
        return meter

    def figures(self) -> dict[str, float]:
        """Metrics of the last measurement by name, for a step's record."""
        return self.guard(Watcher.FIGURES, self.meter.metrics, {}, part="noise") if self.meter else {}

    def values(self) -> dict[str, Any]:
        """History of the noise scale, for the summary."""
        return self.guard(Watcher.SUMMARY, self.meter.values, {}, part="noise") if self.meter else {}

    def state(self) -> dict[str, Any] | None:
        """State of the measurement for a checkpoint."""
        return self.guard(Watcher.NOISE, self.meter.state, self.kept) if self.meter else self.kept

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self.meter is not None:
            self.meter.close()
