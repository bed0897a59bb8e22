"""Mixture of experts: a feed-forward layer with many experts, of which each token uses a few.

Source: Shazeer et al. 2017, arXiv:1701.06538; with a softmax over all experts and weights of the chosen ones that sum
to 1, as in Jiang et al. 2024, Mixtral, arXiv:2401.04088. Without a capacity no token is dropped (Gale et al. 2022,
MegaBlocks, arXiv:2211.15841). Capacity and balance apply to a sequence (DeepSeek-V2, arXiv:2405.04434), not to a
worker's batch, so results do not depend on how a batch is divided."""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.errors import ConfigError, WorkloadError
from scaleray.parallel import context
from scaleray.parallel.ring_attention import Run


class DivisibleExperts(nn.Module):
    """Experts that workers may divide among them: every parameter has one row for each expert. group: the workers of
    `parallel.expert`, with equally many experts each; None if this worker has all. run: starts an exchange with its
    payload."""

    num_experts: int
    group: dist.ProcessGroup | None = None
    run: Run = staticmethod(lambda start, payload: start())

    def expert(self, number: int, tokens: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """Output of one expert. weights: this worker's part of each parameter."""
        raise NotImplementedError

    def forward(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, is_kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Weighted sum of the outputs of each token's experts. tokens: (tokens, width); chosen, weights, is_kept:
        (tokens, top_k). Collective over the group."""
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        if is_kept is not None:
            order = order[is_kept.flatten()[order]]
        counts = experts[order].bincount(minlength=self.num_experts)
        found = self._exchanged(tokens[order // chosen.shape[-1]], counts)
        by_choice = found.new_zeros(len(experts), tokens.shape[-1]).index_copy(0, order, found)
        return (by_choice.view(*chosen.shape, -1) * weights[..., None].to(found.dtype)).sum(-2)

    def _exchanged(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Output of each token's expert. tokens: (chosen, width), in the order of the experts; counts: (experts,),
        number of tokens of each expert. Collective over the group."""
        if self.group is None:
            return self._computed(tokens, counts.tolist())
        size = dist.get_world_size(self.group)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        by_worker = theirs.view(size, -1)  # from each worker, for each of this one's experts
        received = by_worker.sum(1).tolist()
        sent = counts.view(size, -1).sum(1).tolist()
        arrived = _Exchange.apply(tokens, sent, received, self.group, self.run)
        experts = torch.arange(by_worker.shape[1], device=tokens.device).repeat(size)
        order = experts.repeat_interleave(by_worker.flatten()).argsort(stable=True)
        computed = self._computed(arrived[order], by_worker.sum(0).tolist())
        returned: torch.Tensor = _Exchange.apply(computed[order.argsort()], received, sent, self.group, self.run)
        return returned

    def _computed(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        weights = [self._own(parameter) for parameter in self.parameters()]
        return torch.cat([self.expert(number, its, *weights) for number, its in enumerate(tokens.split(counts))])

    def _own(self, weights: torch.Tensor) -> torch.Tensor:
        """This worker's experts. Their gradients already cover the tokens of all workers of the group, so they are
        averaged over fewer workers than those of other layers."""
        own = weights.to_local() if isinstance(weights, DTensor) else weights
        if self.group is not None and own.requires_grad:
            size = dist.get_world_size(self.group)
            own.register_hook(lambda gradient: gradient / size)
        return own


class Experts(DivisibleExperts):
    """SwiGLU experts: `gate` and `up` (experts, width, inner), `down` (experts, inner, width)."""

    def __init__(self, width: int, inner: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Parameter(torch.empty(num_experts, width, inner))
        self.up = nn.Parameter(torch.empty(num_experts, width, inner))
        self.down = nn.Parameter(torch.empty(num_experts, inner, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weights as nn.Linear does."""
        for weights in (self.gate, self.up, self.down):
            bound = 1 / math.sqrt(weights.shape[1])
            nn.init.uniform_(weights, -bound, bound)

    def expert(self, number: int, tokens: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        gate, up, down = (each[number] for each in weights)
        return (F.silu(tokens @ gate) * (tokens @ up)) @ down


class TransformersExperts(DivisibleExperts):
    """Experts of a transformers model, such as Mixtral's. A base class placed before their own class, whose grouped
    products do not support float64."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module has the weights and arguments that experts in transformers have."""
        lacks = ("has_bias", "is_transposed", "has_post_expert_norm")
        names = [name for name, _ in module.named_parameters()]
        return names == ["gate_up_proj", "down_proj"] and not any(getattr(module, name, True) for name in lacks)

    def forward(self, tokens: torch.Tensor, *routes: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if self.group is not None or tokens.dtype == torch.float64:
            return super().forward(tokens, *routes)
        found: torch.Tensor = super(DivisibleExperts, self).forward(tokens, *routes)
        return found

    def expert(self, number: int, tokens: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        gate_up, down = (each[number] for each in weights)
        return F.linear(self._apply_gate(F.linear(tokens, gate_up)), down)  # type: ignore[operator]


class MixtureOfExperts(nn.Module):
    """Feed-forward layer (rows, tokens, width) -> same shape, in which each token uses `top_k` of `num_experts`.

    capacity: number of tokens of a sequence that an expert accepts, relative to an even share; later tokens are
    dropped, in the order of positions. None accepts all. `parallel.expert` divides the experts among workers."""

    def __init__(
        self, width: int, inner: int, num_experts: int, *, top_k: int = 2, capacity: float | None = None
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError("top_k", top_k, f"it must be between 1 and the number of experts, {num_experts}")
        if capacity is not None and capacity <= 0:
            raise ConfigError("capacity", capacity, "it must be above 0", "1.25 is common; None drops no token")
        self.num_experts, self.top_k, self.capacity = num_experts, top_k, capacity
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(width, inner, num_experts)
        self.balance: torch.Tensor | None = None
        """Balance loss of the last pass, summed over its tokens: num_experts x share of tokens x mean probability of
        each expert, which is 1 per token if all are even."""
        self.dropped: tuple[torch.Tensor, int] | None = None
        """Number of choices that the capacity dropped in the last pass, and number of all choices."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.router(x).softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        self.balance = self._balance(probabilities, chosen)
        is_kept = None
        if self.capacity is not None:
            is_kept = self._is_kept(chosen)
            self.dropped = (~is_kept).sum(), is_kept.numel()
            is_kept = is_kept.flatten(0, -2)
        found: torch.Tensor = self.experts(x.flatten(0, -2), chosen.flatten(0, -2), weights.flatten(0, -2), is_kept)
        return found.view_as(x)

    def _balance(self, probabilities: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Balance loss of whole sequences (rows, tokens, experts), restricted to this worker's tokens."""
        tokens = probabilities.shape[1]
        counts = F.one_hot(chosen, self.num_experts).sum((1, 2)).to(probabilities.dtype)
        both = context.summed(torch.stack([counts / self.top_k, probabilities.sum(1)])) / (tokens * context.size())
        return tokens * self.num_experts * (both[0] * both[1]).sum()

    def _is_kept(self, chosen: torch.Tensor) -> torch.Tensor:
        """Whether an expert still accepts each choice (rows, tokens, top_k) of a sequence."""
        assert self.capacity is not None
        places = F.one_hot(chosen.flatten(1), self.num_experts)
        before = context.counted_before(places) + places.cumsum(1) - places
        limit = math.ceil(self.capacity * chosen.shape[1] * context.size() * self.top_k / self.num_experts)
        return ((before * places).sum(-1) < limit).view_as(chosen)


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    """Mixtures of experts in a model or in a pipeline stage."""
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


def divisible_experts(model: nn.Module) -> list[DivisibleExperts]:
    """Experts of a model that workers can divide. Those of transformers get a forward pass that supports this."""
    for module in model.modules():
        if TransformersExperts.fits(module) and not isinstance(module, TransformersExperts):
            own = type(module)
            module.__class__ = type(own.__name__, (TransformersExperts, own), {})
    return [module for module in model.modules() if isinstance(module, DivisibleExperts)]


def expert_totals(model: nn.Module) -> torch.Tensor | None:
    """Sums over the mixtures of a model's last pass (4,): balance loss, dropped choices, choices under a capacity, and
    number of mixtures. In a pipeline they include those of earlier stages, which the model has as `earlier_totals`.
    None if no mixture was called."""
    earlier = getattr(model, "earlier_totals", None)
    found = [] if earlier is None else [earlier]
    for layer in mixtures(model):
        if layer.balance is not None:
            dropped, choices = layer.dropped or (0, 0)
            counts = [layer.balance.new_tensor(count) for count in (choices, 1)]
            found.append(torch.stack([layer.balance, layer.balance.new_zeros(()) + dropped, *counts]))
    return torch.stack(found).sum(0) if found else None


def balance_loss(model: nn.Module) -> torch.Tensor:
    """Balance loss of a model's last pass, summed over its mixtures and tokens. Add a small multiple of it to a sum of
    losses over tokens."""
    return _totals(model)[0]


def _totals(model: nn.Module) -> torch.Tensor:
    found = expert_totals(model)
    if found is None:
        raise WorkloadError.problem("the model", "called no scaleray.parallel.MixtureOfExperts in its last pass")
    return found


def expert_metrics(model: nn.Module, tokens: int) -> dict[str, tuple[Any, Any]]:
    """Sums and counts for `metrics()`: `expert_balance`, which is 1 if all experts get equally many of the `tokens` of
    the last pass, and `expert_dropped`, the share of choices beyond the capacity."""
    balance, dropped, choices, layers = _totals(model)
    found = {"expert_balance": (balance, tokens * int(layers))}
    return found | ({"expert_dropped": (dropped, int(choices))} if choices else {})


class _Exchange(torch.autograd.Function):
    """All-to-all of unequal parts along the first dimension."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, run: Run
    ) -> torch.Tensor:
        ctx.options = sent, received, group, run
        tensor, arrived = tensor.contiguous(), tensor.new_empty((sum(received), *tensor.shape[1:]))
        run(partial(dist.all_to_all_single, arrived, tensor, received, sent, group=group), tensor)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        sent, received, group, run = ctx.options
        return _Exchange.apply(gradients[0], received, sent, group, run), None, None, None, None
