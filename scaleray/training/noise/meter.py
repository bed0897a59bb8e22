"""Meter of the gradient noise scale: measures it during the training, without affecting it, and keeps averages.

Every `noise_scale.every_steps` steps it takes squared norms of gradients at two batch sizes, one small all-reduce, and
updates two averages. The arithmetic is in `noise_scale.py`; `gradient_sources.py` reads the gradients."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from scaleray.common import metric_names
from scaleray.common.watchers import Guard, Watcher
from scaleray.config import RunConfig
from scaleray.config.recipe.noise_source import SourceName
from scaleray.strategies.contract.numbers import Number
from scaleray.training.noise.gradient_sources import (
    ConsecutiveSteps,
    FirstMicroBatch,
    Seen,
    Source,
    StepGradients,
    Workers,
    as_viewed,
    gradients_in,
)
from scaleray.training.noise.noise_scale import NoiseAverages, NoiseWindows, estimate, forgetting
from scaleray.training.noise.preconditioning import Preconditioned, View
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext

FIRST_PRECONDITIONED_STEP = 6
"""First step that is measured with preconditioning. Before it, Adam's second moments are based on too few gradients,
with which the next one is correlated."""
CURVE_POINTS = 256


class NoiseMeter:
    """Measurement of the gradient noise scale from the gradients of training steps.

    In a step that is not measured, the methods that read gradients do nothing. All ranks must call them."""

    def __init__(self, config: RunConfig, setup: Setup, place: RankContext, source: SourceName, guard: Guard) -> None:
        settings = config.noise_scale
        self._guard = guard
        self.source_name, self.setup, self.settings = source, setup, settings
        reference = config.optimizer.reference_batch_size or config.batch.global_size
        self._kappa = config.batch.global_size / reference
        self._view = Preconditioned(setup.parameters, setup.optimizer) if settings.preconditioned else View()
        self._source = self._make_source(place)
        # waiting for the ranks costs more than summing a number: the norm comes with the parts
        self._shares_squares = source == "workers" and setup.parallel.share_of_square is not None
        self.averages = NoiseAverages(is_biased=source == "consecutive steps")
        self._last_added = 0
        self._sizes = _Sizes()
        self._metrics: dict[str, float] = {}
        self._curve, self._windows = _Curve(), NoiseWindows()
        self._samples = 0
        self.is_measuring = False
        """Whether the current step is measured."""
        self._is_kept = False
        self._pending: tuple[Callable[[], Seen], StepGradients] | None = None

    def _make_source(self, place: RankContext) -> Source:
        parallel, parameters = self.setup.parallel, self.setup.parameters
        if self.source_name == "workers":
            return Workers(parallel, parameters, place, self._view, self._look)
        if self.source_name == "first micro-batch":
            return FirstMicroBatch(parallel, parameters, place, self._view, self._look)
        return ConsecutiveSteps(parallel, parameters, self._view, self._look)

    def _look(self, look: Callable[[], Any], otherwise: Any) -> Any:
        """Run a guarded part of the measurement that concerns only this rank. Collectives must stay outside, since a
        rank whose measurement has failed still takes part in them."""
        return self._guard(Watcher.NOISE, look, otherwise)

    def begin(self, step: int, *, is_local: bool) -> None:
        """Begin step `step`, counted from 1, or begin it again with smaller micro-batches."""
        every = self.settings.every_steps
        if self.is_measuring:  # the step before did not come to its end
            self._source.end()
        is_ready = not self.settings.preconditioned or step >= FIRST_PRECONDITIONED_STEP
        self.step, self.is_local = step, is_local
        self.is_measuring = is_ready and step % every == 0
        self._is_kept = self.source_name == "consecutive steps" and (step + 1) % every == 0
        if self.is_measuring:
            self._look(self._view.begin, None)
            self._source.begin(is_local=is_local)

    def before_pass(self, weight: int, count: Number) -> None:
        """Note that a forward pass of `weight` rows follows, and that the step's passes so far have the total count
        `count`."""
        if self.is_measuring:
            self._source.before_pass(weight, count)

    def before_last_backward(self) -> None:
        """Note that the next backward pass is the step's last."""
        if self.is_measuring:
            self._look(self._source.before_last_backward, None)

    @property
    def wants_norm(self) -> bool:
        """Whether `after_backward` needs the norm of the mean gradient."""
        return self.is_measuring and not self.settings.preconditioned and not self._shares_squares

    @property
    def looks_at_gradients(self) -> bool:
        """Whether `after_backward` measures or stores gradients in this step, which reads numbers from the device."""
        return self.is_measuring or self._is_kept

    def after_backward(
        self, norm: float | None, *, correction: float, loss_scale: float, count: float, own_count: float, num_rows: int
    ) -> None:
        """Measure the step's gradients in the parameters, unscaled and not yet clipped. norm: norm of the mean
        gradient, required if `wants_norm`. Collective, unless the step is local."""
        if self.is_measuring:
            share = 0.0
            if norm is None or self.settings.preconditioned:
                norm, share = self._norm(correction)
            step = StepGradients(
                correction=correction,
                loss_scale=loss_scale,
                count=count,
                own_count=own_count,
                num_rows=num_rows,
                is_local=self.is_local,
                square=norm * norm,
                share_of_square=share,
            )
            self._pending = self._source.seen(step), step
            self._source.end()
            self._view.end()
        if self._is_kept and isinstance(self._source, ConsecutiveSteps):
            self._source.keep(correction=correction, num_rows=num_rows)
        self.is_measuring = False

    def _norm(self, correction: float) -> tuple[float, float]:
        """(norm of the mean gradient for measuring noise, 0), or (0, this rank's share of its square)."""
        gradients, parallel = (
            as_viewed(self._view, gradients_in(self.setup.parameters), self._look),
            self.setup.parallel,
        )
        if self._shares_squares and (share := parallel.share_of_square) is not None:
            return 0.0, self._look(lambda: share(gradients), math.nan) * correction**2
        return float(parallel.total_norm(gradients)) * correction, 0.0

    def settle(self, num_samples: int) -> None:
        """Add the measurement of a complete step, which the ranks have summed during the optimizer's update.
        num_samples: samples in the step's global batch."""
        if self._pending is not None:
            (get_seen, step), self._pending = self._pending, None
            seen = get_seen()
            self._look(lambda: self._take(seen, step), None)
        self._samples += num_samples

    def _take(self, seen: Seen, step: StepGradients) -> None:
        sample = estimate(seen.parts, whole_square=seen.whole_square, whole_size=seen.whole_size)
        factor = forgetting(
            self.settings.averaging,
            batch_size=self._kappa,
            reference_batch_size=1.0,
            num_steps=self.step - self._last_added,
        )
        if not self.averages.add(sample, factor=factor) or sample is None:
            return
        self._windows.add(sample, at_samples=self._samples + step.num_rows)
        self._last_added = self.step
        self._sizes.add(seen.parts.effective_size, seen.whole_size)
        self._curve.add(self._samples, self.averages.noise_scale)
        self._metrics = _metrics(self.averages)

    def metrics(self) -> dict[str, float]:
        """The averages by metric name, without the noise scale while it is too large to be resolved."""
        return self._metrics

    def values(self) -> dict[str, Any]:
        """Averages with an interval, the method and the history, for the run's record."""
        averages = self.averages
        interval, effective = averages.interval(), self._windows.effective(self._sizes.large)
        return {
            "scale": averages.noise_scale,
            "low": interval.low if interval else None,
            "high": interval.high if interval else None,
            "effective": effective.value if effective else None,
            "effective_low": effective.low if effective else None,
            "effective_high": effective.high if effective else None,
            "grad_sq": averages.square,
            "trace": averages.trace,
            "num_measurements": averages.num_samples,
            "num_rejected": averages.num_rejected,
            "is_biased": averages.is_biased,
            "way": self.source_name,
            "preconditioned": self.settings.preconditioned,
            "small_batch_size": self._sizes.small,
            "batch_size": self._sizes.large,
            "curve": self._curve.points,
        }

    def state(self) -> dict[str, Any]:
        """State of the meter for a checkpoint."""
        return {
            "averages": self.averages.state(),
            "last_added": self._last_added,
            "samples": self._samples,
            "sizes": self._sizes.state(),
            "preconditioned": self.settings.preconditioned,
            "curve": self._curve.state(),
            "windows": self._windows.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with a checkpoint's averages, unless they are of another kind, or biased while the current ones are
        not."""
        averages = NoiseAverages.from_state(state["averages"])
        self._samples = int(state["samples"])
        if state["preconditioned"] != self.settings.preconditioned or averages.is_biased > self.averages.is_biased:
            return
        averages.is_biased = averages.is_biased or self.averages.is_biased
        self.averages, self._last_added = averages, int(state["last_added"])
        self._metrics = _metrics(averages) if averages.num_samples else {}
        self._sizes.load_state(state["sizes"])
        self._curve.load_state(state["curve"])
        self._windows.load_state(state["windows"])

    def close(self) -> None:
        """Remove every hook."""
        self._source.end()
        self._view.end()


class _Sizes:
    """Mean sizes in samples: of the parts of a batch, and of a step's whole batch."""

    def __init__(self) -> None:
        self.small = self.large = 0.0
        self._count = 0

    def add(self, small: float, large: float) -> None:
        self._count += 1
        self.small += (small - self.small) / self._count
        self.large += (large - self.large) / self._count

    def state(self) -> list[float]:
        return [self.small, self.large, self._count]

    def load_state(self, state: list[float]) -> None:
        self.small, self.large, self._count = float(state[0]), float(state[1]), int(state[2])


class _Curve:
    """Points (samples, noise scale) of the training; beyond `CURVE_POINTS`, every second one is dropped."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float | None]] = []
        self._stride, self._number = 1, 0

    def add(self, samples: int, scale: float) -> None:
        if self._number % self._stride == 0:
            self.points.append((samples, scale if math.isfinite(scale) else None))
        self._number += 1
        if len(self.points) > CURVE_POINTS:
            self.points, self._stride = self.points[::2], 2 * self._stride

    def state(self) -> dict[str, Any]:
        return {"points": [list(point) for point in self.points], "stride": self._stride, "number": self._number}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.points = [(int(samples), scale) for samples, scale in state["points"]]
        self._stride, self._number = int(state["stride"]), int(state["number"])


def _metrics(averages: NoiseAverages) -> dict[str, float]:
    found = {metric_names.NOISE_GRAD_SQ.name: averages.square, metric_names.NOISE_TRACE.name: averages.trace}
    if math.isfinite(averages.noise_scale):
        found[metric_names.NOISE_SCALE.name] = averages.noise_scale
    return found
