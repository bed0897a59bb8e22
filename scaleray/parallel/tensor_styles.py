"""Styles for `tensor_plan()` that torch does not provide."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from scaleray.errors import ConfigError, WorkloadError
from scaleray.parallel.experts import MixtureOfExperts


class Replicated(ParallelStyle):
    """Style of a module whose parameters are whole on every worker, and whose inputs and outputs are equal plain
    tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def to_dtensor(value: Any) -> Any:
            is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
            return DTensor.from_local(value, device_mesh, [Replicate()], run_check=False) if is_plain else value

        def take(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(to_dtensor(value) for value in inputs)

        def give(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            if isinstance(output, DTensor):
                return output.redistribute(placements=[Replicate()]).to_local()
            return output

        return distribute_module(module, device_mesh, None, take, give)


class MixtureParallel(ParallelStyle):
    """Style of a MixtureOfExperts for `tensor_plan()`: each worker has a part of every expert's inner width, and the
    whole router. input_layouts, output_layouts: how rows and tokens are split before and after the module."""

    def __init__(self, *, input_layouts: Placement, output_layouts: Placement) -> None:
        super().__init__()
        self.input_layouts, self.output_layouts = (input_layouts,), (output_layouts,)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MixtureOfExperts):
            raise WorkloadError(
                "tensor_plan()", type(module).__name__, "MixtureParallel is the style of a MixtureOfExperts"
            )
        inner = module.experts.gate.shape[2]
        if inner % device_mesh.size():
            raise ConfigError("parallel.tensor", device_mesh.size(), f"it must divide the experts' width, {inner}")

        def cut(name: str, experts: nn.Module, mesh: DeviceMesh) -> None:
            for weights, dim in (("gate", 2), ("up", 2), ("down", 1)):
                whole = experts.get_parameter(weights)
                part = distribute_tensor(whole.detach(), mesh, [Shard(dim)])
                experts.register_parameter(weights, nn.Parameter(part, whole.requires_grad))

        def take(layout: Placement, wanted: Placement, gradient: Placement) -> Any:
            """Hook that passes a module its floating-point inputs in another layout, as plain tensors."""

            def moved(value: Any, mesh: DeviceMesh) -> Any:
                if value is None or not value.is_floating_point():
                    return value
                given = DTensor.from_local(value, mesh, [layout], run_check=False).redistribute(mesh, [wanted])
                return given.to_local(grad_placements=[gradient])

            return lambda module, inputs, mesh: tuple(moved(value, mesh) for value in inputs)

        def give(layout: Placement, wanted: Placement) -> Any:
            """Hook that changes the layout of a module's output, a plain tensor."""

            def hook(module: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> Any:
                return (
                    DTensor.from_local(output, mesh, [layout], run_check=False).redistribute(mesh, [wanted]).to_local()
                )

            return hook

        whole, partial_sum = Replicate(), Partial()
        parallelize_module(module.router, device_mesh, Replicated())
        distribute_module(module.experts, device_mesh, cut, take(whole, whole, partial_sum), give(partial_sum, whole))
        before, after = take(self.input_layouts[0], whole, whole), give(whole, self.output_layouts[0])
        module.register_forward_pre_hook(lambda module, inputs: before(module, inputs, device_mesh))
        module.register_forward_hook(lambda module, inputs, output: after(module, output, device_mesh))
        return module
