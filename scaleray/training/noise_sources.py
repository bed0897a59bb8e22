"""Where a step's gradients of two sizes come from: workers, the first micro-batch, or the step before.

Each source looks at gradients and changes none. A rank's accumulated gradient is that of the summed loss times
`loss scale x divisor / expected count`; times `correction` what the step uses is the mean gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.scaling.noise_scale import Parts
from scaleray.strategies.parallel import Parallel
from scaleray.training.place import Place

NOTHING = Parts(0.0, 0.0, 0.0)
See = Callable[[nn.Parameter, torch.Tensor], torch.Tensor]
"""A parameter's gradient as noise is measured on it: itself, or preconditioned."""


@dataclass(frozen=True)
class StepGradients:
    """A step whose gradients lie in the parameters, unscaled and before clipping. Counts are the loss's; rows are samples.

    In a local step all of it is this rank's own, else of all ranks but `own_count`.
    """

    correction: float
    loss_scale: float
    count: float
    own_count: float
    num_rows: int
    is_local: bool
    square: float
    """Squared norm of the mean gradient, as noise is measured on it."""

    @property
    def rows_per_count(self) -> float:
        return self.num_rows / self.count


@dataclass(frozen=True)
class Seen:
    """Parts of a batch, and the squared norm of the whole batch's mean gradient. Sizes in samples."""

    parts: Parts
    whole_square: float
    whole_size: float


class Source(Protocol):
    """Sees a step's gradients at another size than its whole batch."""

    def begin(self, *, is_local: bool) -> None:
        """A step that is measured begins, or begins anew."""

    def before_pass(self, weight: int, count: torch.Tensor) -> None:
        """A forward pass of `weight` rows comes, 0 for a placeholder; passes so far counted `count`."""

    def before_last_backward(self) -> None:
        """The next backward pass is the step's last."""

    def seen(self, step: StepGradients) -> Seen:
        """What was seen. Collective, unless the step is local."""

    def end(self) -> None:
        """Take off what was put on. A second time does nothing."""


class Workers:
    """Every worker's own gradient before it meets the others'."""

    def __init__(self, parallel: Parallel, place: Place, see: See) -> None:
        self.parallel, self.place, self._see = parallel, place, see
        self._squares: list[torch.Tensor] = []
        self._parts: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # (squared norm, count before the next part)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def begin(self, *, is_local: bool) -> None:
        self.end()
        self._squares, self._parts = [], []
        if self.parallel.show_own_gradients is not None:
            self.parallel.show_own_gradients(lambda piece, factor: self._squares.append(squared(piece) * factor**2))

    def before_pass(self, weight: int, count: torch.Tensor) -> None:
        self._close_part(count)  # of a strategy that reduces every micro-batch

    def before_last_backward(self) -> None:
        if self.parallel.show_own_gradients is not None:
            return
        for parameter in self.parallel.module.parameters():
            if parameter.requires_grad:
                # runs before DDP's own hook, which fills the bucket; accumulated gradients are in there too
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._look_at))

    def seen(self, step: StepGradients) -> Seen:
        self.end()
        self._close_part(None)
        squares = torch.stack([square for square, _ in self._parts]).tolist() if self._parts else []
        edges = [0.0, *(float(c) for _, c in self._parts if c is not None), step.own_count]
        # what a part adds to the mean gradient, times this, is its own mean gradient times its count
        factor = step.correction * step.count / (self.parallel.gradient_divisor * step.loss_scale)
        own = NOTHING
        for number, square in enumerate(squares):
            own += _part(square * factor**2, edges[number + 1] - edges[number])
        return _all_parts(own, self.place, step)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.parallel.show_own_gradients is not None:
            self.parallel.show_own_gradients(None)

    def _look_at(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._squares.append(squared(self._see(parameter, parameter.grad)))

    def _close_part(self, count: torch.Tensor | None) -> None:
        if self._squares:
            self._parts.append((torch.stack(self._squares).sum(), None if count is None else count.clone()))
            self._squares = []


class FirstMicroBatch:
    """The gradient of a step's first micro-batch, which lies alone in the parameters before the second one adds to it."""

    def __init__(self, parallel: Parallel, place: Place, see: See) -> None:
        self.parallel, self.place, self._see = parallel, place, see
        # gradients that are reduced in each pass are of all ranks' first micro-batches
        self._is_reduced = parallel.forward_is_collective
        self.begin(is_local=False)

    def begin(self, *, is_local: bool) -> None:
        self._norm: torch.Tensor | None = None
        self._count: torch.Tensor | None = None
        self._passes = self._weight = 0

    def before_pass(self, weight: int, count: torch.Tensor) -> None:
        # where the norm is collective all ranks look at the same time; alone, a rank looks at its first real rows
        if self._norm is None and (self._passes if self._is_reduced else self._weight):
            gradients = [self._see(p, p.grad) for p in self.parallel.module.parameters() if p.grad is not None]
            self._norm, self._count = self.parallel.total_norm(gradients), count.clone()
        self._passes += 1
        self._weight += weight

    def before_last_backward(self) -> None:
        pass

    def seen(self, step: StepGradients) -> Seen:
        count = 0.0 if self._count is None else float(self._count)
        norm = 0.0 if self._norm is None else float(self._norm)
        divisor = 1 if step.is_local or self._is_reduced else self.parallel.gradient_divisor
        square = (norm * step.correction * step.count / (divisor * step.loss_scale)) ** 2
        if not self._is_reduced:
            return _all_parts(_part(square, count), self.place, step)
        if self.place.data_size > 1:
            (count,) = self.place.all_reduce([count])
        return _in_samples(_part(square, count), step)

    def end(self) -> None:
        pass


class ConsecutiveSteps:
    """This step's gradient and the last one's, as halves of a batch of two steps. Biased, as parameters move in between."""

    def __init__(self, parallel: Parallel, see: See) -> None:
        self.parallel, self._see = parallel, see
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._before_rows = 0

    def keep(self, parameters: Sequence[nn.Parameter], step: StepGradients) -> None:
        """Remember this step's mean gradient for the next one."""
        self._before = {p: p.grad.detach() * step.correction for p in parameters if p.grad is not None}
        self._before_rows = step.num_rows

    def begin(self, *, is_local: bool) -> None:
        pass

    def before_pass(self, weight: int, count: torch.Tensor) -> None:
        pass

    def before_last_backward(self) -> None:
        pass

    def seen(self, step: StepGradients) -> Seen:
        parameters = [p for p in self.parallel.module.parameters() if p.grad is not None]
        if self._before.keys() != set(parameters):  # none yet, or a model that used others
            self._before = {}
            return Seen(NOTHING, step.square, step.num_rows)
        before = [self._see(p, self._before.pop(p)) for p in parameters]
        first = float(self.parallel.total_norm(before)) ** 2
        both = self._before_rows + step.num_rows
        torch._foreach_mul_(before, self._before_rows / both)
        now = [self._see(p, p.grad) for p in parameters if p.grad is not None]
        torch._foreach_add_(before, now, alpha=step.correction * step.num_rows / both)
        whole = float(self.parallel.total_norm(before)) ** 2
        return Seen(Parts.of(self._before_rows, first) + Parts.of(step.num_rows, step.square), whole, both)

    def end(self) -> None:
        pass


def squared(gradient: torch.Tensor) -> torch.Tensor:
    """Squared norm, float64, on the gradient's device; float16 is summed in float32."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    dtype = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(gradient.detach(), dtype=dtype).double().square()


def preconditioned(optimizer: torch.optim.Optimizer) -> See:
    """Gradients divided by Adam's sqrt(v / (1 - beta_2^t)) + epsilon, as they are now; without state yet as they are."""
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}

    def see(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        state = optimizer.state.get(parameter) or {}
        if "exp_avg_sq" not in state:
            return gradient
        group, moment = groups[parameter], state["exp_avg_sq"]
        # shards alone, as the step's count is no DTensor; float64, as 1 - 0.999^t has few digits in float32
        local, second = (t.to_local() if isinstance(t, DTensor) else t for t in (gradient, moment))
        root = (second / (1 - group["betas"][1] ** state["step"].to(second.device).double())).sqrt_().add_(group["eps"])
        divided = local / root
        if not isinstance(gradient, DTensor):
            return divided
        return DTensor.from_local(
            divided, gradient.device_mesh, gradient.placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
        )  # fmt: skip

    return see


def _part(square_times_count: float, count: float) -> Parts:
    """square_times_count: squared norm of (mean gradient x count); the size is the count."""
    return Parts(square_times_count / count, count, 1.0) if count > 0 else NOTHING


def _all_parts(own: Parts, place: Place, step: StepGradients) -> Seen:
    """With the parts of all ranks. Collective, unless the step is local."""
    if not step.is_local and place.world_size > 1:
        own = Parts(*place.all_reduce([own.weighted_squares, own.size, own.num_parts]))
    return _in_samples(own, step)


def _in_samples(parts: Parts, step: StepGradients) -> Seen:
    per_count = step.rows_per_count
    return Seen(
        Parts(parts.weighted_squares * per_count, parts.size * per_count, parts.num_parts), step.square, step.num_rows
    )
