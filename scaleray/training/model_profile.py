"""Counts what one sample costs the user's own model: FLOPs, parameters, and activations kept for the backward pass.

One micro-batch goes through the loss and back. Where the workload allows, tensors have shapes and no values, so that a
model of any size is counted in seconds and without its memory; a loss that looks at values is computed on the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop, sdpa_flop_count

from scaleray.config.scale import PrecisionSettings
from scaleray.reproducibility.seeding import same_random_numbers
from scaleray.training import precision
from scaleray.training.step import as_user_batch, check_sum_and_count, to_device
from scaleray.workload import call_user_code
from scaleray.workload_profile import BlockProfile, WorkloadProfile

CPU = torch.device("cpu")
SIZES = (2, 4)  # samples of the two passes; batch normalisation cannot train on a single one


def profile_workload(
    workload: Any, rows: Mapping[str, np.ndarray], settings: PrecisionSettings, *, gives_tuples: bool = False
) -> WorkloadProfile:
    """The profile of a workload's model and loss in a precision. rows: a few of the training data, as a source reads them.

    Not counted: what is neither a matrix product, a convolution nor attention. Activations are those of torch's
    memory-saving attention, without activation checkpointing. Changes no random numbers. Raises WorkloadError.
    """
    with same_random_numbers(CPU):
        try:
            return _profile(workload, rows, settings, gives_tuples=gives_tuples, is_computed=False)
        except Exception:  # whatever a model or a loss raises that cannot do without values: it gets them
            return _profile(workload, rows, settings, gives_tuples=gives_tuples, is_computed=True)


def _profile(
    workload: Any, rows: Mapping[str, np.ndarray], settings: PrecisionSettings, *, gives_tuples: bool, is_computed: bool
) -> WorkloadProfile:
    mode = contextlib.nullcontext() if is_computed else FakeTensorMode(allow_non_fake_inputs=True)
    with torch.device(CPU if is_computed else "meta"):
        model = call_user_code(workload.build_model, what="build_model()", doing="building the model")
    with mode:
        if not is_computed:
            _without_values(model)
        arithmetic = precision.prepare(model, CPU, settings)
        blocks = _blocks(workload, model)
        counts = []
        for size in SIZES:
            columns = {name: np.resize(values, (size, *values.shape[1:])) for name, values in rows.items()}
            batch = as_user_batch(to_device(columns, CPU, arithmetic.input_dtype), gives_tuples)
            counts.append(_count(workload, model, blocks, batch, arithmetic))
            model.zero_grad(set_to_none=True)
    few, many = counts
    step = SIZES[1] - SIZES[0]
    per_sample = [(b - a) / step for a, b in zip(few.kept_bytes, many.kept_bytes, strict=True)]
    names = {id(module): name for name, module in model.named_modules()}
    return WorkloadProfile(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        precision=settings.dtype,
        forward_flops=many.forward_flops / SIZES[1],
        backward_flops=many.backward_flops / SIZES[1],
        activation_bytes=sum(per_sample),
        fixed_activation_bytes=sum(few.kept_bytes) - SIZES[0] * sum(per_sample),
        count_per_sample=None if many.count is None else many.count / SIZES[1],
        blocks=[
            BlockProfile(
                name=names[id(block)],
                num_parameters=sum(p.numel() for p in block.parameters()),
                forward_flops=many.block_flops[number] / SIZES[1],
                activation_bytes=per_sample[number],
                output_bytes=many.output_bytes[number] / SIZES[1],
            )
            for number, block in enumerate(blocks)
        ],
        is_computed=is_computed,
    )


@dataclass
class _Counts:
    """Of one micro-batch. kept_bytes: of each block, and last of everything beside them."""

    block_flops: list[float]
    output_bytes: list[float]
    kept_bytes: list[float]
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    count: float | None = None
    storages: list[Any] = field(default_factory=list)


def _count(
    workload: Any, model: nn.Module, blocks: list[nn.Module], batch: Any, arithmetic: precision.Precision
) -> _Counts:
    found = _Counts([0.0] * len(blocks), [0.0] * len(blocks), [0.0] * (len(blocks) + 1))
    tensors = [*model.parameters(), *model.buffers(), *(batch.values() if isinstance(batch, dict) else batch)]
    seen = {tensor.untyped_storage()._cdata for tensor in tensors}
    current = len(blocks)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found.storages.append(storage)  # alive until the end, or another could come to lie at its address
            found.kept_bytes[current] += storage.nbytes()
        return tensor

    forward, backward = (FlopCounterMode(display=False, custom_mapping=_ATTENTION) for _ in range(2))

    def begin(number: int) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            nonlocal current
            current = number
            found.block_flops[number] -= forward.get_total_flops()

        return hook

    def end(number: int) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal current
            current = len(blocks)
            found.block_flops[number] += forward.get_total_flops()
            first = output if isinstance(output, torch.Tensor) else next(iter(output), None)
            if isinstance(first, torch.Tensor):
                found.output_bytes[number] = first.numel() * first.element_size()

        return hook

    with contextlib.ExitStack() as hooks:
        for number, block in enumerate(blocks):
            hooks.callback(block.register_forward_pre_hook(begin(number)).remove)
            hooks.callback(block.register_forward_hook(end(number)).remove)
        with forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with arithmetic.autocast():
                result = call_user_code(
                    lambda: workload.loss(model, batch), what="loss()", doing="counting its operations"
                )
            loss, count = check_sum_and_count(result, what="loss()")
    with backward:
        loss.backward()
    found.forward_flops, found.backward_flops = float(forward.get_total_flops()), float(backward.get_total_flops())
    with contextlib.suppress(Exception):  # a count that is a tensor has no value while nothing is computed
        found.count = float(count)
    return found


def _without_values(model: nn.Module) -> None:
    """Give the model, built on the meta device, tensors of the mode that claim to lie on the CPU. Tied ones stay tied.

    Only there does autocast know what to do; and under the mode torch could not move the model itself, as each of its
    tensors is referred to.
    """
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


def _attention_backward(
    grad_out: tuple[int, ...], query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], *args: Any, **kwargs: Any
) -> int:  # fmt: skip
    # torch counts the scores that the backward pass computes again; a model's FLOPs do not
    return 2 * sdpa_flop_count(query, key, value)


_aten = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,  # which torch's own table lacks
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
}
