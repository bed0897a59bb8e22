"""Sources of a step's gradients at two batch sizes: the workers, the first micro-batch, or the previous step.

Sources read gradients without changing them. The gradient accumulated on a rank is that of the summed loss times `loss
scale x divisor / expected count`. Multiplied by `correction`, as in the step, it becomes the mean gradient."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from scaleray.strategies.contract.numbers import Number
from scaleray.strategies.contract.parallel import Parallel
from scaleray.training.noise.noise_scale import Parts
from scaleray.training.noise.preconditioning import OwnNorm, View, norm
from scaleray.training.setup.rank_context import RankContext

NOTHING = Parts(0.0, 0.0, 0.0)
SPOILED = Parts(math.nan, math.nan, math.nan)
"""Parts of a rank whose measurement failed: the rank still takes part in sums, whose results are then discarded."""
Guarded = Callable[[Callable[[], Any], Any], Any]
"""Function that calls this rank's code, which may fail, and returns its result, or the second argument on failure.
Collectives stay outside of it."""


@dataclass(frozen=True)
class StepGradients:
    """A step whose gradients are stored in the parameters, unscaled and before clipping. Counts are those of the loss;
    rows are samples.

    In a local step, all values are this rank's own; otherwise all but `own_count` cover all ranks together."""

    correction: float
    loss_scale: float
    count: float
    own_count: float
    num_rows: int
    is_local: bool
    square: float
    """Squared norm of the mean gradient, as used for the noise."""
    share_of_square: float = 0.0
    """This rank's share of `square`; the shares of all ranks are still to be summed."""

    @property
    def rows_per_count(self) -> float:
        return self.num_rows / self.count


@dataclass(frozen=True)
class Seen:
    """Parts of a batch, and the squared norm of the whole batch's mean gradient. Sizes are in samples."""

    parts: Parts
    whole_square: float
    whole_size: float


class Source(Protocol):
    """Source of a step's gradients at a batch size other than the whole batch."""

    def begin(self, *, is_local: bool) -> None:
        """Begin a measured step, or begin it again."""

    def before_pass(self, weight: int, count: Number) -> None:
        """Note that a forward pass of `weight` rows follows (0 for a placeholder), and that the step's passes so far
        have the total count `count`."""

    def before_last_backward(self) -> None:
        """Note that the next backward pass is the step's last."""

    def seen(self, step: StepGradients) -> Callable[[], Seen]:
        """Return a function for the observed norms; until it is called, ranks sum them in the background. Collective,
        unless the step is local."""

    def end(self) -> None:
        """Remove the hooks. A second call does nothing."""


class Workers:
    """Each worker's own gradient, before it is combined with those of the others."""

    def __init__(
        self, parallel: Parallel, parameters: Sequence[nn.Parameter], place: RankContext, view: View, guarded: Guarded
    ) -> None:
        self.parallel, self.place, self._guarded = parallel, place, guarded
        self._parameters, self._own = parameters, OwnNorm(view)
        self._parts: list[tuple[list[torch.Tensor], Number | None]] = []  # (norms, count before the next part)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, *, is_local: bool) -> None:
        self.end()
        self._guarded(self._own.forget, None)
        self._parts = []
        if self.parallel.show_own_gradients is not None:
            add = self._own.add_norm
            self.parallel.show_own_gradients(
                lambda piece, factor: self._guarded(lambda: add(norm(piece) * factor), None)
            )

    def before_pass(self, weight: int, count: Number) -> None:
        self._guarded(lambda: self._close_part(count), None)  # needed where every micro-batch is reduced

    def before_last_backward(self) -> None:
        if self.parallel.show_own_gradients is not None:
            return
        # these hooks run before DDP's own, which fill the buckets; accumulated gradients are in there too
        self._hooks = [p.register_post_accumulate_grad_hook(self._see) for p in self._parameters]

    def seen(self, step: StepGradients) -> Callable[[], Seen]:
        self.end()
        return _all_parts(self._guarded(lambda: self._own_parts(step), SPOILED), self.place, step)

    def _see(self, parameter: torch.Tensor) -> None:
        self._guarded(lambda: self._own.add(parameter), None)  # type: ignore[arg-type]

    def _own_parts(self, step: StepGradients) -> Parts:
        self._close_part(None)
        # read at once, as reading each alone would wait for a GPU; Python's numbers are float64
        norms = iter(torch.stack([n for part, _ in self._parts for n in part]).tolist() if self._parts else [])
        squares = [sum(_square(next(norms)) for _ in part) for part, _ in self._parts]
        edges = [0.0, *(float(c) for _, c in self._parts if c is not None), step.own_count]
        # what a part adds to the mean gradient, times this, is its own mean gradient times its count
        factor = step.correction * step.count / (self.parallel.gradient_divisor * step.loss_scale)
        own = NOTHING
        for number, square in enumerate(squares):
            own += _part(square * factor**2, edges[number + 1] - edges[number])
        return own

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.parallel.show_own_gradients is not None:
            self.parallel.show_own_gradients(None)

    def _close_part(self, count: Number | None) -> None:
        if norms := self._own.take():
            self._parts.append((norms, count))


class FirstMicroBatch:
    """Gradient of a step's first micro-batch, read from the parameters before the second one adds to it."""

    def __init__(
        self, parallel: Parallel, parameters: Sequence[nn.Parameter], place: RankContext, view: View, guarded: Guarded
    ) -> None:
        self.parallel, self.place, self._view, self._guarded = parallel, place, view, guarded
        self._parameters = parameters
        # gradients that are reduced in each pass are of all ranks' first micro-batches
        self._is_reduced = parallel.forward_is_collective
        self.begin(is_local=False)

    def begin(self, *, is_local: bool) -> None:
        self._norm: torch.Tensor | None = None
        self._count: Number | None = None
        self._passes = self._weight = 0

    def before_pass(self, weight: int, count: Number) -> None:
        # where the norm is collective all ranks look at the same time; alone, a rank looks at its first real rows
        if self._norm is None and (self._passes if self._is_reduced else self._weight):
            gradients = as_viewed(self._view, gradients_in(self._parameters), self._guarded)
            self._norm, self._count = self.parallel.total_norm(gradients), count
        self._passes += 1
        self._weight += weight

    def before_last_backward(self) -> None:
        pass

    def seen(self, step: StepGradients) -> Callable[[], Seen]:
        count = 0.0 if self._count is None else float(self._count)
        divisor = 1 if step.is_local or self._is_reduced else self.parallel.gradient_divisor
        own = 0.0 if self._norm is None else float(self._norm)
        square = _square(own * step.correction * step.count / (divisor * step.loss_scale))
        if not self._is_reduced:
            return _all_parts(_part(square, count), self.place, step)
        counts = _sum([count], self.place) if self.place.data_parallel_size > 1 else lambda: [count]
        return lambda: _in_samples(_part(square, counts()[0]), step)

    def end(self) -> None:
        pass


class ConsecutiveSteps:
    """Gradients of this step and the previous one, as halves of a batch of two steps. Biased, as parameters move in
    between."""

    def __init__(self, parallel: Parallel, parameters: Sequence[nn.Parameter], view: View, guarded: Guarded) -> None:
        self.parallel, self._view, self._guarded = parallel, view, guarded
        self._parameters = parameters
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._before_rows = 0

    def keep(self, *, correction: float, num_rows: int) -> None:
        """Store this step's mean gradient for the next step."""
        gradients = gradients_in(self._parameters)
        copies = self._guarded(lambda: {p: gradient * correction for p, gradient in gradients.items()}, None)
        # a rank whose measurement failed needs something to take part with, and changes it no more
        self._before = copies if copies is not None else gradients
        self._before_rows = num_rows

    def begin(self, *, is_local: bool) -> None:
        pass

    def before_pass(self, weight: int, count: Number) -> None:
        pass

    def before_last_backward(self) -> None:
        pass

    def seen(self, step: StepGradients) -> Callable[[], Seen]:
        seen = self._seen(step)
        return lambda: seen

    def _seen(self, step: StepGradients) -> Seen:
        gradients = gradients_in(self._parameters)
        if self._before.keys() != gradients.keys():  # none yet, or a model that used others
            self._before = {}
            return Seen(NOTHING, step.square, step.num_rows)
        before, self._before = self._before, {}
        first = _square(float(self.parallel.total_norm(as_viewed(self._view, before, self._guarded))))
        both = self._before_rows + step.num_rows
        now = [gradients[p] for p in before]

        def add() -> None:  # before they are divided, which comes to the same
            torch._foreach_mul_(list(before.values()), self._before_rows / both)
            torch._foreach_add_(list(before.values()), now, alpha=step.correction * step.num_rows / both)

        self._guarded(add, None)
        whole = _square(float(self.parallel.total_norm(as_viewed(self._view, before, self._guarded))))
        return Seen(Parts.of(self._before_rows, first) + Parts.of(step.num_rows, step.square), whole, both)

    def end(self) -> None:
        pass


def as_viewed(view: View, gradients: Mapping[nn.Parameter, torch.Tensor], guarded: Guarded) -> list[torch.Tensor]:
    """Tensors whose combined norm is the gradient norm used to measure noise; NaN on failure, so that ranks can still
    sum the norms."""
    found: list[torch.Tensor] | None = guarded(lambda: view.all(gradients), None)
    if found is None:
        first, *rest = gradients.values()
        found = [first * math.nan, *rest]
    return found


def gradients_in(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
    """Gradients stored in the parameters."""
    return {p: p.grad for p in parameters if p.grad is not None}


def _square(value: float) -> float:
    return value * value  # infinite where `** 2` would raise


def _part(square_times_count: float, count: float) -> Parts:
    """A single part of a batch. square_times_count: squared norm of (mean gradient x count); count: size of the
    part."""
    return Parts(square_times_count / count, count, 1.0) if count > 0 else NOTHING


def _all_parts(own: Parts, place: RankContext, step: StepGradients) -> Callable[[], Seen]:
    """Start summing this rank's parts over all ranks; returns a function for the result. Collective, unless the step is
    local."""
    if step.is_local or place.world_size == 1:
        return lambda: _in_samples(own, step)
    total = _sum([own.weighted_squares, own.size, own.num_parts, step.share_of_square], place)

    def seen() -> Seen:
        *parts, square = total()
        return _in_samples(Parts(*parts), step, more_square=square)

    return seen


def _sum(values: list[float], place: RankContext) -> Callable[[], list[float]]:
    """Start summing a few numbers over all ranks. Returns a function that waits for the sums."""
    tensor = torch.tensor(values, dtype=torch.float64, device=place.device)
    work = dist.all_reduce(tensor, async_op=True)

    def wait() -> list[float]:
        work.wait()
        return [float(value) for value in tensor.tolist()]

    return wait


def _in_samples(parts: Parts, step: StepGradients, *, more_square: float = 0.0) -> Seen:
    per_count = step.rows_per_count
    in_samples = Parts(parts.weighted_squares * per_count, parts.size * per_count, parts.num_parts)
    return Seen(in_samples, step.square + more_square, step.num_rows)
