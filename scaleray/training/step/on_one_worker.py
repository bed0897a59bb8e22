"""Find, on one worker, uses of the model in the user's loss that a strategy does not support on several workers.

A recipe that trains on one worker must not fail on two because of how its loss uses the model. The check of the first
batch uses this for the strategy named in the config."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from scaleray.config import RunConfig
from scaleray.config.strategy_traits import traits_of
from scaleray.errors import WorkloadError
from scaleray.parallel.context import Context, sequences_shared
from scaleray.strategies.pipeline.pipeline_evaluation import Rehearsal
from scaleray.strategies.sharding.fsdp_units import choose_units


@contextlib.contextmanager
def rehearsed(model: nn.Module, config: RunConfig, workload: Any) -> Iterator[nn.Module]:
    """Context for one forward pass on a whole model, which raises WorkloadError for uses that the config's strategy
    does not support on several workers. Yields the model for the user's code."""
    name = config.strategy.name
    with contextlib.ExitStack() as stack:
        is_sharded = name == "fsdp" or (traits_of(name).trains_apart and config.parallel.shard not in (None, 1))
        if is_sharded and config.fsdp.reshard_after_forward:
            units = choose_units(model, config.fsdp, workload).modules
            stack.enter_context(
                _weights_within(units, model, "fsdp frees the weights of a unit outside its forward pass")
            )
        if name == "tensor" or config.parallel.tensor not in (None, 1):
            owners = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
            stack.enter_context(_weights_within(owners, model, "tensor parallelism gives a worker only a part of it"))
        if isinstance(size := config.parallel.context, int) and size > 1:
            stack.enter_context(sequences_shared(model, Context(config.context.exchange, size)))
        yield Rehearsal(model, config, workload) if config.has_stages else model


@contextlib.contextmanager
def no_gradients_of_gradients(model: nn.Module, config: RunConfig) -> Iterator[None]:
    """Context for one forward pass, which raises WorkloadError if the loss differentiates (in a pipeline), or
    differentiates with create_graph, under a strategy that does not support it."""
    strategy = config.strategy.name
    degrees = {config.parallel.shard, config.parallel.tensor} - {None, 1}
    # what is communicated for these is not differentiated again
    if not (traits_of(strategy).splits_parameters or config.has_stages or degrees):
        yield
        return
    is_inside = True

    def refuse(gradient: torch.Tensor) -> None:
        if not is_inside:
            return
        advice = "use --strategy.name ddp or zero1, or leave this out of the loss"
        if config.has_stages:
            raise WorkloadError.problem(
                "loss()", "computes gradients: in a pipeline no worker has a gradient before all have run", advice
            )
        if torch.is_grad_enabled():
            raise WorkloadError.problem(
                "loss()",
                "differentiates with create_graph: "
                f"{strategy} has no gradients of gradients: its communication cannot be differentiated",
                advice,
            )

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tree_iter(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(refuse)

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                stack.callback(module.register_forward_hook(watch).remove)
        try:
            yield
        finally:
            is_inside = False


class Absent(torch.Tensor):
    """Placeholder for a weight that is on another worker. It has a shape and a device, and refuses computation."""

    path: str
    why: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        is_detached = func in (torch.Tensor.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined] # for a log
        # within a backward pass, layers that are computed again are on their own
        is_pass = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        if is_pass and not is_detached and any(isinstance(t, torch.Tensor) for t in tree_iter(result)):
            absent = next(t for t in tree_iter((args, kwargs)) if isinstance(t, Absent))
            raise WorkloadError.problem(
                "loss()",
                f"computes with {absent.path} outside of the layers' own forward(): {absent.why}",
                "move this into the forward() of the module that has the weight; for a penalty on weights use "
                "optimizer.weight_decay; or use --strategy.name ddp or zero1",
            )
        return result


@contextlib.contextmanager
def _weights_within(owners: Iterable[nn.Module], model: nn.Module, why: str) -> Iterator[None]:
    """Context in which the parameters of `owners` can be used only in the forward passes of their owners."""
    names = {id(p): name for name, p in model.named_parameters()}
    with contextlib.ExitStack() as stack:
        for owner in reversed(list(owners)):  # inner ones first, which keep what is theirs
            places = [
                (part, name, p)
                for part in owner.modules()
                for name, p in part._parameters.items()
                if p is not None and not isinstance(p, Absent)
            ]
            absent = []
            for part, name, parameter in places:
                stand_in: Any = torch.Tensor._make_subclass(Absent, parameter, parameter.requires_grad)
                stand_in._is_param, stand_in.path, stand_in.why = True, names[id(parameter)], why
                absent.append((part, name, stand_in))

            def put(values: list[tuple[nn.Module, str, Any]]) -> None:
                for part, name, value in values:
                    part._parameters[name] = value

            put(absent)
            stack.callback(put, places)
            before = owner.register_forward_pre_hook(lambda module, inputs, places=places: put(places))
            after = owner.register_forward_hook(
                lambda module, inputs, output, absent=absent: put(absent), always_call=True
            )
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield
