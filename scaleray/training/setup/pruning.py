"""Pruning during training: weights that become zero and stay zero, chosen once for all ranks.

A mask is a bool tensor laid out over ranks like its parameter, and true for removed weights. Removal is permanent: the
weight, its gradient and its optimizer state are zero from then on. Built by model_setup and called by the step. Masks
are part of the training's state, so checkpoints contain them, for any number of workers. Sources: Zhu
& Gupta 2017, arXiv:1710.01878 (magnitude, schedule); Li et al. 2017, arXiv:1608.08710 (rows by norm); Mishra et al.
2021, arXiv:2104.08378 (2:4)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.common.metric_names import SPARSITY
from scaleray.config.averaging_pruning_fine_tuning import PruningSettings
from scaleray.errors import WorkloadError
from scaleray.strategies.sharding import shards
from scaleray.strategies.sharding.shards import local

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
LAYERS_WITH_ROWS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Types of layers whose weight has one row (along dim 0) for each output."""
DIGIT_BITS = 16
POSITION_BITS = 48
"""Number of bits of a position: enough to number the elements of a model."""


@dataclass
class Pruning:
    """The masks of a model's prunable parameters, by name."""

    settings: PruningSettings
    optimizer: torch.optim.Optimizer
    parameters: dict[str, nn.Parameter]
    masks: dict[str, torch.Tensor]
    group: dist.ProcessGroup | None
    """Process group of all workers, None for one worker."""
    sparsity: float = 0.0
    """Share of the prunable weights that is removed, over all ranks."""

    def is_due(self, step: int) -> bool:
        """Whether weights are removed after `step` steps."""
        return is_due(self.settings, step)

    def prune(self, step: int) -> None:
        """Choose new masks after `step` steps, and apply them. Collective. Changes parameters and optimizer state."""
        parameters, masks = list(self.parameters.values()), list(self.masks.values())
        with torch.no_grad():
            share = sparsity_at(self.settings, step)
            if self.settings.method == "magnitude":
                total = sum(p.numel() for p in parameters)
                take_out_smallest(parameters, masks, round(share * total))
            elif self.settings.method == "structured":
                take_out_rows(parameters, masks, share)
            elif share:
                for parameter, mask in zip(parameters, masks, strict=True):
                    take_out_two_of_four(parameter, mask)
            self._agree()
            for parameter, mask in zip(parameters, masks, strict=True):
                for value in self.optimizer.state.get(parameter, {}).values():
                    # otherwise an old momentum would go on moving the weight
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point():
                        local(value).masked_fill_(local(mask), 0)
        self.apply()
        self.count()

    def apply(self) -> None:
        """Set the removed weights to zero."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                local(parameter).masked_fill_(local(self.masks[name]), 0)

    def mask_gradients(self) -> None:
        """Set the gradients of removed weights to zero, so that they do not count in the norm or the momentum."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                local(parameter.grad).masked_fill_(local(self.masks[name]), 0)

    def count(self) -> None:
        """Compute the sparsity from the masks, as needed after loading them. Collective."""
        masks = list(self.masks.values())
        self.sparsity = sum(_whole_counts(masks)) / sum(mask.numel() for mask in masks)

    def metrics(self) -> dict[str, float]:
        """The sparsity, by the metric's name."""
        return {SPARSITY.name: self.sparsity}

    def _agree(self) -> None:
        """Make all copies of a mask equal. They are equal already if the copies of the weights are; this makes
        certain."""
        for mask in self.masks.values():
            bits = local(mask).view(torch.uint8)
            for mesh, axis in shards.copied_along(mask):
                group = mesh.get_group(axis)
                on_mesh = bits.to(mesh.device_type)
                dist.broadcast(on_mesh, group=group, group_src=0)
                bits.copy_(on_mesh)
            if not isinstance(mask, DTensor) and self.group is not None:
                dist.broadcast(bits, group=self.group, group_src=0)


def build(
    module: nn.Module, optimizer: torch.optim.Optimizer, settings: PruningSettings, group: dist.ProcessGroup | None
) -> Pruning | None:
    """Set up pruning of a model laid out by its strategy; None if the config requests none. Nothing is removed yet.

    Raises WorkloadError if nothing can be pruned, or if a layer cannot be divided into groups of four."""
    if settings.method == "none":
        return None
    found = dict(_prunable(module, settings))
    if not found:
        raise WorkloadError(
            "pruning.method",
            settings.method,
            "no trained parameter of the model can be pruned this way",
            "check pruning.exclude and the frozen parts",
        )
    if settings.method == "2:4":
        for name, parameter in found.items():
            begin, width = shards.offset(parameter)[-1], local(parameter).shape[-1]
            if parameter.shape[-1] % 4 or begin % 4 or width % 4:
                raise WorkloadError(
                    "pruning.method",
                    "2:4",
                    f"{name} has {parameter.shape[-1]} inputs, {width} of them on this worker: a multiple of 4 is "
                    "required",
                    f"leave it out with pruning.exclude: [{name}]",
                )
    masks = {name: torch.zeros_like(p, dtype=torch.bool, requires_grad=False) for name, p in found.items()}
    return Pruning(settings, optimizer, found, masks, group)


def _prunable(module: nn.Module, settings: PruningSettings) -> Iterator[tuple[str, nn.Parameter]]:
    embeddings = {id(p) for part in module.modules() if isinstance(part, EMBEDDINGS) for p in part.parameters()}
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        for own, parameter in part.named_parameters(prefix, recurse=False):
            if id(parameter) in embeddings or id(parameter) in seen or not parameter.requires_grad:
                continue  # a head that is tied to the embedding is an embedding
            seen.add(id(parameter))
            if parameter.ndim < 2 or isinstance(part, NORMS) or any(words in own for words in settings.exclude):
                continue
            if settings.method == "structured" and not isinstance(part, LAYERS_WITH_ROWS):
                continue
            if settings.method == "2:4" and not isinstance(part, nn.Linear):
                continue
            yield own, parameter


# the schedule


def is_due(settings: PruningSettings, step: int) -> bool:
    """Whether weights are removed after `step` steps: at the start, every `every_steps` after it, and at the end."""
    start, end = settings.start_step, settings.end_step
    if end is None:
        return step == start
    return start <= step <= end and ((step - start) % settings.every_steps == 0 or step == end)


def sparsity_at(settings: PruningSettings, step: int) -> float:
    """Share of weights that is removed after `step` steps: final * (1 - (1 - progress)^3).

    Source: Zhu & Gupta 2017, arXiv:1710.01878, equation 1, starting from 0."""
    start, end, final = settings.start_step, settings.end_step, settings.sparsity
    if step < start:
        return 0.0
    if end is None or step >= end:
        return final
    return final * (1 - (1 - (step - start) / (end - start)) ** 3)


# what is taken out


def take_out_smallest(parameters: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], num: int) -> None:
    """Add the smallest weights to the masks until `num` weights of all parameters together are removed.

    The result is exact in any layout: of equal weights the first is removed, in the order of parameters and then of
    their elements. Removed weights never return. Collective: one all-reduce of 512 KiB for each 16 bits of a weight,
    and three more if weights are equal."""
    num -= sum(_whole_counts(masks))
    if num <= 0:
        return
    bits = 64 if any(p.dtype == torch.float64 for p in parameters) else 32

    def sizes(number: int) -> torch.Tensor:
        return _sizes(parameters[number], bits=bits)[~local(masks[number])]

    threshold, left, num_equal = _select(sizes, parameters, num, bits=bits)
    equal: list[torch.Tensor] = []
    before = 0
    for parameter, mask in zip(parameters, masks, strict=True):
        own, size = local(mask), _sizes(parameter, bits=bits)
        is_equal = (size == threshold) & ~own
        own |= size < threshold
        if left == num_equal:
            own |= is_equal
        equal.append(_positions(is_equal, parameter, before))
        before += parameter.numel()
    if left < num_equal:
        last, _, _ = _select(equal.__getitem__, parameters, left, bits=POSITION_BITS)
        for parameter, mask, positions in zip(parameters, masks, equal, strict=True):
            own = local(mask)
            own[(_sizes(parameter, bits=bits) == threshold) & ~own] = positions <= last


def take_out_rows(parameters: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], share: float) -> None:
    """Remove `share` of the rows of each layer, rounded down, beginning with the rows of smallest norm.

    Of equal rows the first is removed. Removed rows never return. Collective: one all-reduce for all layers."""
    lengths = [p.shape[0] for p in parameters]
    squares = torch.zeros(sum(lengths), dtype=torch.float64, device=local(parameters[0]).device)
    layouts = shards.by_layout(parameters)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    out = torch.zeros_like(squares)
    for axes, members in layouts.items():
        own, gone = torch.zeros_like(squares), torch.zeros_like(squares)
        for number in members:
            rows = local(parameters[number]).flatten(1)
            begin = starts[number] + shards.offset(parameters[number])[0]
            own[begin : begin + len(rows)] += rows.double().square().sum(dim=1)
            gone[begin : begin + len(rows)] += local(masks[number]).flatten(1).any(dim=1)
        own, gone = shards.sum_over(axes, torch.stack((own, gone)))
        squares += own
        out += gone
    squares[out > 0] = -1.0  # rows taken out before sort first
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        order = torch.sort(squares[start : start + length], stable=True).indices
        is_out = torch.zeros(length, dtype=torch.bool, device=order.device)
        is_out[order[: int(share * length)]] = True
        mask = local(masks[number])
        begin = shards.offset(masks[number])[0]
        mask |= is_out[begin : begin + len(mask)].view(-1, *[1] * (mask.ndim - 1))


def take_out_two_of_four(parameter: torch.Tensor, mask: torch.Tensor) -> None:
    """Of every four neighbouring weights along the last dim, which are a layer's inputs, remove the two smallest; of
    equal weights, the earlier ones. A mask that already removes two of every four stays unchanged."""
    own = local(mask)
    sizes = local(parameter).abs().masked_fill(own, -1.0).unflatten(-1, (-1, 4))
    smallest = torch.sort(sizes, dim=-1, stable=True).indices[..., :2]
    own.copy_(torch.zeros_like(sizes, dtype=torch.bool).scatter_(-1, smallest, True).flatten(-2))


# exact selection over ranks


def _sizes(parameter: torch.Tensor, *, bits: int) -> torch.Tensor:
    """int64 numbers that sort like the magnitudes of this rank's part, as the bits of a non-negative float do."""
    magnitude = local(parameter).abs()
    return magnitude.double().view(torch.int64) if bits == 64 else magnitude.float().view(torch.int32).long()


def _select(
    keys: Callable[[int], torch.Tensor], like: Sequence[torch.Tensor], num: int, *, bits: int
) -> tuple[int, int, int]:
    """(the `num`-th smallest key over all ranks, how many keys equal to it are among the smallest `num`, how many keys
    equal to it there are). keys: this rank's int64 keys (n,) for like[i], none of them negative. Collective.

    The method is a radix selection: each pass counts the keys by their next digit."""
    prefix, left, count = 0, num, 0
    layouts = shards.by_layout(like)
    for shift in range(bits - DIGIT_BITS, -1, -DIGIT_BITS):
        total = torch.zeros(2**DIGIT_BITS, dtype=torch.int64)
        for axes, members in layouts.items():
            own = torch.zeros(2**DIGIT_BITS, dtype=torch.int64, device=local(like[members[0]]).device)
            for number in members:
                of_one = keys(number)
                of_one = of_one[(of_one >> (shift + DIGIT_BITS)) == prefix] if shift + DIGIT_BITS < 64 else of_one
                own += torch.bincount((of_one >> shift) & (2**DIGIT_BITS - 1), minlength=2**DIGIT_BITS)
            total += shards.sum_over(axes, own).cpu()
        upto = total.cumsum(0)
        digit = int(torch.searchsorted(upto, left))
        count = int(total[digit])
        left -= int(upto[digit]) - count
        prefix = (prefix << DIGIT_BITS) | digit
    return prefix, left, count


def _positions(chosen: torch.Tensor, parameter: torch.Tensor, before: int) -> torch.Tensor:
    """Positions, among all elements of the model, of the chosen elements of this rank's part: int64 (n,), ascending
    within the part.

    before: number of elements in earlier parameters."""
    position = torch.zeros(int(chosen.sum()), dtype=torch.int64, device=chosen.device)
    for index, begin, length in zip(chosen.nonzero().unbind(1), shards.offset(parameter), parameter.shape, strict=True):
        position = position * length + (index + begin)
    return position + before


def _whole_counts(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Number of true elements of each tensor, over all ranks. Collective."""
    counts = torch.stack([local(tensor).sum() for tensor in tensors])
    for axes, members in shards.by_layout(tensors).items():
        counts[members] = shards.sum_over(axes, counts[members])
    return [int(count) for count in counts.tolist()]
