"""Count the cost of one sample of the user's model: products, parameters, memory traffic, and activations kept for the
backward pass.

One micro-batch passes through the loss, forward and backward. If the workload allows it, tensors have shapes but no
values, so a model of any size is counted in seconds without allocating its memory; a loss that reads values is computed
on the CPU."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop, sdpa_flop_count

from scaleray.common.seeding import same_random_numbers
from scaleray.config.precision import PrecisionSettings
from scaleray.records.workload_profile import PartProfile, Product, WorkloadProfile
from scaleray.training.setup import precision
from scaleray.training.setup.weighted_losses import summed_loss
from scaleray.training.step.micro_batches import user_batch
from scaleray.training.step.sum_and_count import check_sum_and_count
from scaleray.workload import built_model, call_user_code

CPU = torch.device("cpu")
SIZES = (2, 4)  # numbers of samples of the two passes; batch normalisation cannot train on a single one


def profile_workload(
    workload: Any, rows: Mapping[str, Any], settings: PrecisionSettings, *, gives_tuples: bool = False
) -> WorkloadProfile:
    """Profile of a workload's model and loss in a precision. rows: a few rows of the training data, as a source reads
    them.

    Activations are counted as with torch's memory-saving attention and without activation checkpointing. Leaves the
    state of random generators unchanged. Raises WorkloadError."""
    with same_random_numbers(CPU):
        try:
            return _profile(workload, rows, settings, gives_tuples=gives_tuples, is_computed=False)
        except (Exception, SystemExit):  # whatever a model or a loss raises that cannot do without values: it gets them
            return _profile(workload, rows, settings, gives_tuples=gives_tuples, is_computed=True)


def _profile(
    workload: Any, rows: Mapping[str, Any], settings: PrecisionSettings, *, gives_tuples: bool, is_computed: bool
) -> WorkloadProfile:
    with torch.device(CPU if is_computed else "meta"):
        model = built_model(workload)
    arithmetic = precision.prepare(model, CPU, settings)
    with contextlib.nullcontext() if is_computed else FakeTensorMode(allow_non_fake_inputs=True):
        if not is_computed:
            without_values(model)
        passes = []
        for size in SIZES:
            columns = {name: values[np.arange(size) % len(values)] for name, values in rows.items()}
            batch = user_batch(workload, columns, CPU, arithmetic.input_dtype, gives_tuples=gives_tuples)
            passes.append(_count(workload, model, batch, arithmetic))
            model.zero_grad(set_to_none=True)
    few, many = passes
    # what grows with the micro-batch; the rest is there once, such as copies of weights in a narrower type
    kept = [(b.kept_bytes - a.kept_bytes) / (SIZES[1] - SIZES[0]) for a, b in zip(few.parts, many.parts, strict=True)]
    return WorkloadProfile(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        precision=settings.dtype,
        backward_flops=many.backward_flops / SIZES[1],
        activation_bytes=sum(kept),
        fixed_activation_bytes=sum(part.kept_bytes for part in few.parts) - SIZES[0] * sum(kept),
        count_per_sample=None if many.count is None else many.count / SIZES[1],
        parts=[
            PartProfile(
                name=part.name,
                num_parameters=part.num_parameters,
                products=[Product(rows=m / SIZES[1], inner=k, columns=n) for m, k, n in part.products],
                attention_flops=part.attention_flops / SIZES[1],
                convolution_flops=part.convolution_flops / SIZES[1],
                winograd_flops=part.winograd_flops / SIZES[1],
                activation_bytes=kept_bytes,
                output_bytes=part.output_bytes / SIZES[1],
                traffic_bytes=part.traffic_bytes / SIZES[1],
                num_operations=part.num_operations,
            )
            for part, kept_bytes in zip(many.parts, kept, strict=True)
        ],
        is_computed=is_computed,
    )


@dataclass
class _Part:
    """Counts of one part of the model, over one micro-batch."""

    name: str
    num_parameters: int = 0
    products: list[tuple[int, int, int]] = field(default_factory=list)
    attention_flops: float = 0.0
    convolution_flops: float = 0.0
    winograd_flops: float = 0.0
    kept_bytes: float = 0.0
    output_bytes: float = 0.0
    traffic_bytes: float = 0.0
    num_operations: int = 0


@dataclass
class _Pass:
    parts: list[_Part]
    backward_flops: float
    count: float | None


def _count(workload: Any, model: nn.Module, batch: Any, arithmetic: precision.Precision) -> _Pass:
    blocks = _blocks(workload, model)
    names = {id(module): name for name, module in model.named_modules()}
    before, after = _Part("before the blocks"), _Part("after the blocks" if blocks else "the model")
    inner = [_Part(names[id(block)]) for block in blocks]
    operations = _Operations(model, before if blocks else after)
    inputs = [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
    seen = {tensor.untyped_storage()._cdata for tensor in inputs if isinstance(tensor, torch.Tensor)}
    kept: list[Any] = []  # alive until the end, or another could come to lie at its address

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            kept.append(storage)
            operations.part.kept_bytes += storage.nbytes()
        return tensor

    with contextlib.ExitStack() as hooks:
        for block, part in zip(blocks, inner, strict=True):

            def begin(module: nn.Module, given: Any, part: _Part = part) -> None:
                if part is inner[0]:
                    before.output_bytes = _bytes(next(_tensors(given), None))
                operations.part = part

            def end(module: nn.Module, given: Any, output: Any, part: _Part = part) -> None:
                operations.part = after
                part.output_bytes = _bytes(next(_tensors(output), None))

            hooks.callback(block.register_forward_pre_hook(begin).remove)
            hooks.callback(block.register_forward_hook(end).remove)
        with operations, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), arithmetic.autocast():
            result = call_user_code(lambda: summed_loss(workload, model, batch), what="loss()", doing="counting it")
        loss, count = check_sum_and_count(result, what="loss()")
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as backward:
        loss.backward()
    parts = [before, *inner, after]
    own = {id(p) for block in blocks for p in block.parameters()}
    for part, block in zip(inner, blocks, strict=True):
        part.num_parameters = sum(p.numel() for p in block.parameters())
    outside = {id(p): p.numel() for p in model.parameters() if id(p) not in own}
    before.num_parameters = sum(n for p, n in outside.items() if operations.first_use.get(p) is before)
    after.num_parameters = sum(outside.values()) - before.num_parameters
    value = None
    with contextlib.suppress(Exception):  # a count that is a tensor has no value while nothing is computed
        value = float(count)
    return _Pass(parts, float(backward.get_total_flops()), value)


class _Operations(TorchDispatchMode):
    """Adds every operation of a forward pass to `part`."""

    def __init__(self, model: nn.Module, part: _Part) -> None:
        super().__init__()
        self.part = part
        self.first_use: dict[int, _Part] = {}
        self._parameters = {p.untyped_storage()._cdata: id(p) for p in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet, part = func._overloadpacket, self.part
        given = list(_tensors((args, kwargs)))
        for tensor in given:
            if (parameter := self._parameters.get(tensor.untyped_storage()._cdata)) is not None:
                self.first_use.setdefault(parameter, part)
        if packet in _PRODUCTS:
            left, right = args[_PRODUCTS[packet] : _PRODUCTS[packet] + 2]
            part.products.append((left.numel() // left.shape[-1], left.shape[-1], right.shape[-1]))
        elif packet in _ATTENTION:
            part.attention_flops += _ATTENTION[packet](*(tuple(tensor.shape) for tensor in args[:3]))
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            part.convolution_flops += flops
            part.winograd_flops += flops if _is_small_filter(packet, args) else 0.0
        elif not (func.is_view or packet in _FREE):
            part.traffic_bytes += sum(map(_bytes, given)) + sum(map(_bytes, _tensors(out)))
        if not (func.is_view or packet in _FREE):
            part.num_operations += 1
        return out


def _is_small_filter(packet: Any, args: Any) -> bool:
    """Whether Winograd's algorithm can compute a convolution: ungrouped 3x3 or 5x5 filters of stride 1."""
    if packet is not torch.ops.aten.convolution:
        return False
    _, weight, _, stride, _, dilation, transposed, _, groups = args
    plain = set(stride) == set(dilation) == {1} and not transposed and groups == 1
    return plain and tuple(weight.shape[2:]) in ((3, 3), (5, 5))


def without_values(model: nn.Module) -> None:
    """Give a model built on the meta device fake tensors that claim to be on the CPU. Tied tensors stay tied.

    Autocast requires this. torch cannot move the model itself in this mode, as its tensors are referenced elsewhere."""
    made: dict[int, nn.Parameter] = {}

    def like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(like(parameter), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = like(buffer)


def _blocks(workload: Any, model: nn.Module) -> list[nn.Module]:
    method = getattr(workload, "blocks", None)
    return list((method(model) if callable(method) else None) or ())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _attention_backward(
    grad_out: tuple[int, ...],
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    *args: Any,
    **kwargs: Any,
) -> int:
    # torch counts the scores that the backward pass computes again; a model's FLOPs do not
    return 2 * sdpa_flop_count(query, key, value)


_aten = torch.ops.aten
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""Matrix products, with the position of the first factor."""
_ATTENTION: dict[Any, Any] = {
    _aten._scaled_dot_product_flash_attention: sdpa_flop,
    _aten._scaled_dot_product_efficient_attention: sdpa_flop,
    _aten._scaled_dot_product_cudnn_attention: sdpa_flop,
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,  # which torch's own table lacks
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
}
_FREE = {
    _aten._unsafe_view, _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.lift_fresh, _aten.detach,
    _aten._local_scalar_dense, torch.ops.prim.device,  # operations that only ask a tensor for something
}  # fmt: skip
"""Operations other than views that move no bytes."""
