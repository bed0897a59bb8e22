"""Gradients for measuring noise: either as they are, or divided by the root of Adam's second moment, as in its update.

For the division, small tensors are concatenated, because in a small model most of the cost is dispatching operations.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Gradients = Mapping[nn.Parameter, torch.Tensor]
SMALL_NUMEL = 2**16
"""Largest number of elements of a small tensor. Up to this size, several operations on a tensor cost more to dispatch
than to compute. Buffers for larger tensors and the divisors stored for a step would take as much memory as a model."""


class Row:
    """Buffer for the concatenated values of some parameters; zeros stand in for parameters without a value."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        first = parameters[0]
        self.values = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        pieces = self.values.split([p.numel() for p in parameters])
        self.places = {p: piece.view(p.shape) for p, piece in zip(parameters, pieces, strict=True)}

    def put(self, values: Gradients) -> torch.Tensor:
        """Store these values and no others, and return the whole buffer."""
        if len(values) < len(self.places):
            self.values.zero_()
        torch._foreach_copy_([self.places[p] for p in values], list(values.values()))
        return self.values


class View:
    """Unmodified gradients. `begin` and `end` enclose a measured step. small: parameters whose gradients are
    concatenated."""

    def __init__(self, small: Sequence[nn.Parameter] = ()) -> None:
        self.small = dict.fromkeys(small)
        self._row: Row | None = None

    def begin(self) -> None:
        """Begin a step whose gradients are measured, or begin it again."""

    def end(self) -> None:
        """Release everything stored for the step."""

    def all(self, gradients: Gradients) -> list[torch.Tensor]:
        """Tensors whose combined norm is that of these gradients; always the same tensors for the same parameters. The
        next call may overwrite them."""
        found = [self.large(p, gradient) for p, gradient in gradients.items() if p not in self.small]
        small = {p: gradient for p, gradient in gradients.items() if p in self.small}
        if not small:
            return found
        self._row = self._row or Row(list(self.small))
        return [self.flat(self._row.put(small)), *found]

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """Small gradients for measuring noise, concatenated. May overwrite `values`."""
        return values

    def large(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """A large parameter's gradient for measuring noise."""
        return gradient


class Preconditioned(View):
    """Gradients divided by sqrt(v / (1 - beta_2^t)) + epsilon, with v and t from before the update. Gradients of
    parameters without state are unchanged.

    parameters: trained parameters of this rank."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        small = [p for p in parameters if not isinstance(p, DTensor) and p.numel() <= SMALL_NUMEL]
        kind = [(p.device, p.dtype) for p in small[:1]]  # tensors of other kinds stay alone
        super().__init__([p for p in small if [(p.device, p.dtype)] == kind])
        self.optimizer = optimizer
        self._scales: dict[nn.Parameter, tuple[float, float]] = {}  # (sqrt(1 - beta_2^t), epsilon)
        self._divisors: Row | None = None  # divisors of the small tensors
        self._divisor: torch.Tensor | None = None

    def begin(self) -> None:
        """Read the step counts, and compute the divisor of the small tensors."""
        self.end()
        for group in self.optimizer.param_groups:
            states = {p: state for p in group["params"] if "exp_avg_sq" in (state := self.optimizer.state.get(p, {}))}
            if not states:
                continue
            # read at once, as reading each alone would wait for a GPU
            counts = torch.stack([state["step"] for state in states.values()]).tolist()
            beta, eps = float(group["betas"][1]), float(group["eps"])
            # computed in Python's float64, as 1 - 0.999^t has few digits in float32
            scales = {count: math.sqrt(1 - beta**count) for count in set(counts)}
            self._scales.update((p, (scales[count], eps)) for p, count in zip(states, counts, strict=True))
        moments = {p: self.optimizer.state[p]["exp_avg_sq"] for p in self.small if p in self._scales}
        if not moments:
            return
        self._divisors = self._divisors or Row(list(self.small))
        self._divisor = self._divisors.put(moments).sqrt_()
        if len(moments) == len(self.small) and len({self._scales[p] for p in moments}) == 1:
            scale, eps = self._scales[next(iter(moments))]
            self._divisor.div_(scale).add_(eps)
            return
        for parameter, place in self._divisors.places.items():
            scale, eps = self._scales.get(parameter, (1.0, 1.0))  # no state: 0 + 1 leaves it as it is
            place.div_(scale).add_(eps)

    def end(self) -> None:
        """Release the step counts and divisors."""
        self._scales, self._divisor = {}, None

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """The small gradients, divided."""
        return values if self._divisor is None else values.div_(self._divisor)

    def large(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """The divided gradient, in a new tensor: roots are not stored, since they would take as much memory as a
        model."""
        if parameter not in self._scales:
            return gradient
        scale, eps = self._scales[parameter]
        # computed on shards alone, as a step's count is no DTensor
        divided = _local(self.optimizer.state[parameter]["exp_avg_sq"]).sqrt().div_(scale).add_(eps)
        torch.div(_local(gradient), divided, out=divided)
        if not isinstance(gradient, DTensor):
            return divided
        return DTensor.from_local(
            divided,
            gradient.device_mesh,
            gradient.placements,
            run_check=False,
            shape=gradient.shape,
            stride=gradient.stride(),
        )


class OwnNorm:
    """Norm of a gradient that arrives in pieces, each of which is soon overwritten."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._norms: list[torch.Tensor] = []
        self._row = Row(list(view.small)) if view.small else None
        self._places = self._row.places if self._row is not None else {}
        self._has_small = False

    def add(self, parameter: nn.Parameter) -> None:
        """Add the gradient that a parameter currently holds."""
        gradient, place = parameter.grad, self._places.get(parameter)
        assert gradient is not None
        if place is not None and not gradient.is_sparse:
            place.copy_(gradient)
            self._has_small = True
        else:
            self.add_norm(norm(self.view.large(parameter, gradient)))

    def add_norm(self, value: torch.Tensor) -> None:
        """Add the norm of a piece."""
        self._norms.append(value)

    def take(self) -> list[torch.Tensor]:
        """Return the norms of the pieces since the last call, and discard the pieces."""
        if self._has_small and self._row is not None:
            self._norms.append(norm(self.view.flat(self._row.values)))
        taken = self._norms
        self.forget()
        return taken

    def forget(self) -> None:
        """Discard all pieces, because the step begins again."""
        if self._has_small and self._row is not None:
            self._row.values.zero_()
        self._norms, self._has_small = [], False


def norm(gradient: torch.Tensor) -> torch.Tensor:
    """Euclidean norm on the gradient's device; 16-bit values are summed in float32."""
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    dtype = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(gradient.detach(), dtype=dtype)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
