"""LARS and LAMB: optimizers for large batches, whose step in each layer depends on the norm of the layer's weights.

Both need the norm of a whole parameter. For a sharded parameter (DTensor: FSDP, tensor parallelism) the norm of this
rank's part would be wrong, so the squared norms of all parameters are summed over the ranks in one collective per step.
Used by training.setup.optimizers. Sources: You, Gitman, Ginsburg 2017, arXiv:1708.03888 (LARS); You et al. 2019,
arXiv:1904.00962 (LAMB)."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from scaleray.strategies.sharding import shards
from scaleray.strategies.sharding.shards import local


@dataclass(frozen=True)
class _Group:
    """Parameters of one group that have a gradient, and this rank's part of each."""

    options: dict[str, Any]
    parameters: list[torch.Tensor]
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]

    def state(self, optimizer: torch.optim.Optimizer, key: str) -> list[torch.Tensor]:
        """This rank's part of the state `key` of each parameter; zeros if there is none yet."""
        found = []
        for parameter in self.parameters:
            state = optimizer.state[parameter]
            if key not in state:
                # a DTensor for a DTensor, so that a checkpoint can reshard it
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            found.append(local(state[key]))
        return found


class Lars(torch.optim.Optimizer):
    """SGD with momentum, with the step of each layer multiplied by `trust_coefficient * norm(w) / (norm(g) + decay *
    norm(w))`.

    The learning rate is part of the momentum buffer, as in the paper's algorithm 1. torch's SGD multiplies it in later,
    which gives another result while the rate changes. A layer whose weights or gradient are all zero takes the plain
    step of SGD, as groups with `adaptive: False` (biases, norms) always do. Parameters may be DTensors: `step` is then
    collective, with one all-reduce for all of them. Raises RuntimeError for sparse gradients. Source: You, Gitman,
    Ginsburg 2017, arXiv:1708.03888."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        adaptive: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "adaptive": adaptive,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Collective if parameters are sharded."""
        loss = _evaluate(closure)
        groups = _groups(self)
        adaptive = [group for group in groups if group.options["adaptive"]]
        parameters = [p for group in adaptive for p in group.parameters]
        weights = [w for group in adaptive for w in group.weights]
        gradients = [g for group in adaptive for g in group.gradients]
        norms = norms_of_whole([*weights, *gradients], [*parameters, *parameters])
        weight_norms, gradient_norms = norms[: len(weights)], norms[len(weights) :]
        taken = 0
        for group in groups:
            options = group.options
            decay = options["weight_decay"]
            updates = torch._foreach_add(group.gradients, group.weights, alpha=decay) if decay else group.gradients
            if options["adaptive"]:
                part = slice(taken, taken + len(updates))
                taken += len(updates)
                own, against = weight_norms[part], gradient_norms[part]
                ratios = _ratios(
                    options["trust_coefficient"] * own, against + decay * own, where=(own > 0) & (against > 0)
                )
                updates = torch._foreach_mul(updates, ratios)
            momentum = group.state(self, "momentum_buffer")
            torch._foreach_mul_(momentum, options["momentum"])
            torch._foreach_add_(momentum, updates, alpha=_number(options["lr"]))
            torch._foreach_sub_(group.weights, momentum)
        return loss


class Lamb(torch.optim.Optimizer):
    """AdamW, with the step of each layer scaled to the norm of the layer's weights: `lr * norm(w) / norm(u) * u`.

    u is Adam's bias-corrected step plus `weight_decay * w`. Layers with zero weights or a zero step, and groups with
    `adaptive: False` (biases, norms), use u unscaled. The paper uses eps 1e-6. Parameters may be DTensors: `step` is
    then collective, with one all-reduce for all of them. Raises RuntimeError for sparse gradients. Source: You et al.
    2019, arXiv:1904.00962, algorithm 2 with phi(z) = z."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adaptive: bool = True,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adaptive": adaptive}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. Collective if parameters are sharded."""
        loss = _evaluate(closure)
        groups = _groups(self)
        updates = [self._adam_step(group) for group in groups]
        adaptive = [(group, own) for group, own in zip(groups, updates, strict=True) if group.options["adaptive"]]
        parameters = [p for group, _ in adaptive for p in group.parameters]
        weights = [w for group, _ in adaptive for w in group.weights]
        norms = norms_of_whole([*weights, *(u for _, own in adaptive for u in own)], [*parameters, *parameters])
        weight_norms, update_norms = norms[: len(weights)], norms[len(weights) :]
        taken = 0
        for group, own in zip(groups, updates, strict=True):
            if group.options["adaptive"]:
                part = slice(taken, taken + len(own))
                taken += len(own)
                of_weights, of_updates = weight_norms[part], update_norms[part]
                torch._foreach_mul_(own, _ratios(of_weights, of_updates, where=(of_weights > 0) & (of_updates > 0)))
            torch._foreach_add_(group.weights, own, alpha=-_number(group.options["lr"]))
        return loss

    def _adam_step(self, group: _Group) -> list[torch.Tensor]:
        beta_1, beta_2 = group.options["betas"]
        counts = []
        for parameter in group.parameters:
            # on the CPU, like torch's own: the bias correction needs it there
            counts.append(self.state[parameter].setdefault("step", torch.tensor(0.0)))
        first, second = group.state(self, "exp_avg"), group.state(self, "exp_avg_sq")
        torch._foreach_add_(counts, 1)
        steps = [count.item() for count in counts]
        torch._foreach_lerp_(first, group.gradients, 1 - beta_1)
        torch._foreach_mul_(second, beta_2)
        torch._foreach_addcmul_(second, group.gradients, group.gradients, 1 - beta_2)
        roots = torch._foreach_sqrt(second)
        torch._foreach_div_(roots, [math.sqrt(1 - beta_2**step) for step in steps])
        torch._foreach_add_(roots, group.options["eps"])
        updates = torch._foreach_div(first, [1 - beta_1**step for step in steps])
        torch._foreach_div_(updates, roots)
        if decay := group.options["weight_decay"]:
            torch._foreach_add_(updates, group.weights, alpha=decay)
        return list(updates)


def norms_of_whole(parts: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """Euclidean norms, float64 (len(parts),), of whole tensors that are laid out over ranks like `like`; `parts` are
    this rank's parts of them.

    Collective if any of `like` is sharded: one all-reduce for all that are on the same ranks."""
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    # summed in float32 at least: bf16 would stop counting at a few hundred elements
    wide = [part if part.dtype in (torch.float32, torch.float64) else part.float() for part in parts]
    device = parts[0].device
    squares = torch.stack([norm.to(device).double() for norm in torch._foreach_norm(wide)]).square_()
    for axes, members in shards.by_layout(like).items():
        squares[members] = shards.sum_over(axes, squares[members])
    return squares.sqrt_()


def _groups(optimizer: torch.optim.Optimizer) -> list[_Group]:
    found = []
    for options in optimizer.param_groups:
        parameters = [p for p in options["params"] if p.grad is not None]
        if any(p.grad.is_sparse for p in parameters):
            raise RuntimeError(f"{type(optimizer).__name__} does not support sparse gradients")
        gradients = [local(_laid_out_like(p.grad, p)) for p in parameters]
        if parameters:  # torch's foreach functions refuse empty lists
            found.append(_Group(options, parameters, [local(p) for p in parameters], gradients))
    return found


def _laid_out_like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Gradient in the layout of its parameter. Collective if it must be moved: tensor parallelism may leave a sum
    (Partial) for a replicated parameter."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def _ratios(numerators: torch.Tensor, denominators: torch.Tensor, *, where: torch.Tensor) -> list[torch.Tensor]:
    """Quotients where `where` is true, else 1, computed on the device so that the host need not wait."""
    quotients = numerators / torch.where(where, denominators, 1.0)
    return list(torch.where(where, quotients, 1.0).unbind())


def _number(value: Any) -> float:
    return float(value)  # a schedule may keep the rate in a tensor


def _evaluate(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
