"""Steps of a workload with several losses, one after the other, each with its own backward pass, clipping and update.

All losses of a step use the same rows. A loss changes the parameters of its own optimizer. Its gradients for other
parameters are dropped, and are not computed at all if this rank has whole parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import nn

from scaleray.common.metric_names import GRAD_NORM_OF, LOSS_OF, by_loss
from scaleray.config.recipe.values import Recipe
from scaleray.config.strategy_traits import traits_of
from scaleray.data import RankBatch
from scaleray.errors import WorkloadError
from scaleray.records.run_record import StepRecord
from scaleray.training.noise.meter import NoiseMeter
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.several_optimizers import SeveralOptimizers
from scaleray.training.setup.weighted_losses import OneLoss, losses_of
from scaleray.training.step.launched import Launched, LaunchedStep
from scaleray.training.step.step import Probe, TrainStep

# Interface of the object that takes a training's optimizer steps, for the loop and for checkpoints. `TrainStep` takes
# those of one loss, `SeveralLosses` those of a workload that has several.


class OptimizerStep(Protocol):
    """Takes optimizer steps for one worker. count_per_row, nonfinite_in_a_row: numbers, or numbers by name for several
    losses."""

    recipe: Recipe
    noise: NoiseMeter | None
    num_updates: int
    """Number of steps taken, including those before an interruption."""
    count_per_row: Any
    """Number of samples or tokens that counted per row of the last step."""
    nonfinite_in_a_row: Any
    """Number of successive non-finite steps up to the last one."""

    def launch(self, batch: RankBatch, *, num_rows: int, want_norm: bool, synchronises: bool = True) -> Launched:
        """Train on one global batch of `num_rows` rows, of which `batch` is this rank's part. Collective.

        synchronises: whether ranks sum losses and signals; if not, loss and count are this rank's, without signals."""


class SeveralLosses:
    """Replacement for a TrainStep that contains one TrainStep for each loss, in the order of `losses()`."""

    noise: NoiseMeter | None = None

    def __init__(
        self,
        workload: Any,
        setup: Setup,
        *args: Any,
        probe: Probe | None = None,
        signals: Callable[[], tuple[float, ...]] = tuple,
        **options: Any,
    ) -> None:
        optimizer = setup.optimizer
        assert isinstance(optimizer, SeveralOptimizers)
        self.workload, self.setup, self.probe = workload, setup, probe
        self.steps: dict[str, TrainStep] = {}
        for name, loss in (losses_of(workload) or {}).items():
            own = optimizer.parameters_of[name]
            ids = {id(p) for p in own}
            part = dataclasses.replace(
                setup, optimizer=optimizer.by_name[name], parameters=[p for p in setup.parameters if id(p) in ids]
            )
            self.steps[name] = TrainStep(
                OneLoss(workload, loss),
                part,
                *args,
                probe=None if probe is None else _Part(probe, setup, ids, is_first=not self.steps),
                signals=tuple if self.steps else signals,
                **options,
            )

    @property
    def recipe(self) -> Recipe:
        """Recipe of all losses."""
        return next(iter(self.steps.values())).recipe

    @recipe.setter
    def recipe(self, recipe: Recipe) -> None:
        for step in self.steps.values():
            step.recipe = recipe

    @property
    def num_updates(self) -> int:
        """Number of steps taken."""
        return next(iter(self.steps.values())).num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        for step in self.steps.values():
            step.num_updates = number

    @property
    def count_per_row(self) -> dict[str, float]:
        """See `TrainStep.count_per_row`, by loss."""
        return {name: step.count_per_row for name, step in self.steps.items()}

    @count_per_row.setter
    def count_per_row(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.steps[name].count_per_row = value

    @property
    def nonfinite_in_a_row(self) -> dict[str, int]:
        """See `TrainStep.nonfinite_in_a_row`, by loss."""
        return {name: step.nonfinite_in_a_row for name, step in self.steps.items()}

    @nonfinite_in_a_row.setter
    def nonfinite_in_a_row(self, values: Mapping[str, int]) -> None:
        for name, value in values.items():
            self.steps[name].nonfinite_in_a_row = value

    def launch(self, batch: RankBatch, *, num_rows: int, want_norm: bool, synchronises: bool = True) -> LaunchedSteps:
        """Train every loss on one global batch. Collective. See `TrainStep.launch`."""
        self._put_in_order()
        launched: dict[str, LaunchedStep] = {}
        before: TrainStep | None = None
        for name, step in self.steps.items():
            if before is not None:
                step.ends_like(before)
            with named(name), self._alone(step.setup.parameters, step.recipe):
                launched[name] = step.launch(batch, num_rows=num_rows, want_norm=want_norm, synchronises=synchronises)
            before = step
        together = LaunchedSteps(launched)
        if self.probe is not None:
            self.probe.on_step(together.result(), float(self.setup.optimizer.param_groups[0]["lr"]))
        return together

    def _put_in_order(self) -> None:
        """Sort the losses in the workload's order, once this order is known."""
        order = getattr(self.workload, "order_of_losses", None) or self.steps
        if list(order) == list(self.steps):
            return
        first = next(iter(self.steps.values()))
        self.steps = {name: self.steps[name] for name in order}
        now = next(iter(self.steps.values()))
        first.signals, now.signals = now.signals, first.signals
        if isinstance(first.probe, _Part) and isinstance(now.probe, _Part):
            first.probe.is_first, now.probe.is_first = False, True

    @contextlib.contextmanager
    def _alone(self, parameters: list[nn.Parameter], recipe: Recipe) -> Iterator[None]:
        """Context in which gradients are computed only for these parameters."""
        if traits_of(recipe.strategy).splits_parameters:
            yield  # what holds a part of them has noted which need a gradient
            return
        own = {id(p) for p in parameters}
        others = [p for p in self.setup.parameters if id(p) not in own and p.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)


class LaunchedSteps:
    """Steps of several losses launched on the device, treated as one step."""

    def __init__(self, by_name: Mapping[str, LaunchedStep]) -> None:
        self._by_name = dict(by_name)

    def wait(self) -> None:
        """Wait until the device has computed the numbers of all losses."""
        for step in self._by_name.values():
            step.wait()

    def result(self, **facts: Any) -> StepRecord:
        """Result of the step: the sum of the losses, and the norm of all gradients together."""
        found: dict[str, StepRecord] = {}
        for name, step in self._by_name.items():
            with named(name):
                found[name] = step.result()
        first, last = next(iter(found.values())), next(reversed(found.values()))
        losses = {name: result.loss for name, result in found.items()}
        norms = {name: result.grad_norm for name, result in found.items() if result.grad_norm is not None}
        return dataclasses.replace(
            first,
            loss=sum(losses.values()),
            grad_norm=math.hypot(*norms.values()) if norms else None,
            is_finite=all(result.is_finite for result in found.values()),
            nonfinite_steps=max(result.nonfinite_steps for result in found.values()),
            nonfinite_in_a_row=max(result.nonfinite_in_a_row for result in found.values()),
            loss_scale=last.loss_scale,
            more={**by_loss(LOSS_OF, losses), **by_loss(GRAD_NORM_OF, norms)},
            losses=losses,
            **facts,
        )


class _Part:
    """Forwards one of several losses to a probe. `of`: parameters that this loss changes, by id."""

    def __init__(self, probe: Probe, setup: Setup, of: set[int], *, is_first: bool) -> None:
        self.probe, self.setup, self.of, self.is_first = probe, setup, of, is_first

    def on_setup(self, setup: Setup) -> None: ...

    def on_batch(self, batch: RankBatch) -> None:
        if self.is_first:
            self.probe.on_batch(batch)

    def on_gradients(self, correction: float) -> None:
        for parameter in self.setup.parallel.module.parameters():
            if id(parameter) not in self.of:
                parameter.grad = None  # another loss's, or computed on the way
        self.probe.on_gradients(correction)

    def on_step(self, result: StepRecord, learning_rate: float) -> None: ...


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Context that adds the name of the loss to an error of `loss()`."""
    try:
        yield
    except WorkloadError as exc:
        if exc.what != "loss()":
            raise
        raise WorkloadError(f"losses()[{name!r}]", *exc.args[1:]) from exc


def train_step(workload: Any, setup: Setup, *args: Any, **options: Any) -> OptimizerStep:
    """Make the TrainStep or SeveralLosses of a workload; see TrainStep for the arguments."""
    kind = TrainStep if losses_of(workload) is None else SeveralLosses
    return kind(workload, setup, *args, **options)
