"""Evaluation of a model whose stages are on several workers: each worker gets the output of the last stage."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from scaleray.config import RunConfig
from scaleray.errors import WorkloadError
from scaleray.parallel.experts import expert_totals
from scaleray.strategies.pipeline.chain_check import check_chain
from scaleray.strategies.pipeline.parts import Parts, all_stages
from scaleray.strategies.pipeline.stages import Elsewhere, Passed, called_twice


class OnlyWhole(nn.Module):
    """Model that can only be used as a whole, by calling it or one of its methods. Other attributes are forwarded,
    except parts with parameters, which may be on other workers."""

    is_elsewhere = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # no module of this one, so that its parameters are not counted twice
        del self.__dict__["training"]  # the model's own is used

    def _pass(self, call: Callable[[nn.Module], Any]) -> Any:
        """Result of `call` on the model."""
        return call(self.__dict__["_model"])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._pass(lambda module: module(*args, **kwargs))

    def _class_of_model(self) -> type:
        return type(self.__dict__["_model"]) if "_model" in self.__dict__ else type(self)

    __class__ = property(_class_of_model)  # for `isinstance`, as the user's code may ask

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the first parameter, which shows device and type. Raises WorkloadError for any further one."""
        yield next(iter(self.__dict__["_model"].named_parameters(*args, **kwargs)))
        raise _in_parts("all parameters")

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__["_model"]
        value = getattr(model, name)
        if isinstance(value, nn.Parameter) or (
            isinstance(value, nn.Module) and (any(True for _ in value.parameters()) or _is_stand_in(value))
        ):
            raise _in_parts(name)
        if inspect.ismethod(value) and value.__self__ is model:
            return lambda *args, **kwargs: self._pass(lambda module: getattr(module, name)(*args, **kwargs))
        return value


class Rehearsal(OnlyWhole):
    """Model on one worker with the restrictions of a pipeline: a loss can use it only once, and only as a chain."""

    def __init__(self, model: nn.Module, config: RunConfig, workload: Any) -> None:
        super().__init__(model)
        self.__dict__["_stages"] = all_stages(model, config, workload)
        self.__dict__["_passes"] = 0

    def _pass(self, call: Callable[[nn.Module], Any]) -> Any:
        model = self.__dict__["_model"]
        self.__dict__["_passes"] += 1
        if self.__dict__["_passes"] > 1:
            raise called_twice(self.__dict__["_passes"])
        check_chain(model, self.__dict__["_stages"], call, next(model.parameters()).device)
        result = call(model)
        self.__dict__["earlier_totals"] = expert_totals(model)
        return result


def _in_parts(name: str) -> WorkloadError:
    return WorkloadError(
        "the model",
        f"used by its part ({name})",
        "in a pipeline the parts are on different workers, which run them one after the other",
        "call the model itself, or a method that uses all of it; or use --strategy.name fsdp",
    )


def _is_stand_in(module: nn.Module) -> bool:
    return any(isinstance(part, Elsewhere) for part in module.modules())


class Whole(OnlyWhole):
    """The whole model for evaluation: a call returns its output on every worker of the replica. Collective.

    The stages run one after the other, without gradients. Anything else applies to this worker's part of the model."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.module)
        self._stages = parts

    def _pass(self, call: Callable[[nn.Module], Any]) -> Any:
        """Result of `call` on the model, on all workers of the replica."""
        with self._stages.gathered():
            return self._through_stages(call)

    def _through_stages(self, call: Callable[[nn.Module], Any]) -> Any:
        parts = self._stages
        if not parts.is_checked:
            parts.check_chain(call)
        output = None
        for stage in parts.stages:
            parts.in_mode_of_module(stage)
            stage.entry.on_pass = lambda: None
            received = _receive(parts.owner(stage.index - 1), parts) if stage.index else ()
            result = stage.run(call, received)
            if stage.is_last:
                output = result, expert_totals(stage.module)
            else:
                _send(result, parts.owner(stage.index + 1), parts)
        output, self.__dict__["earlier_totals"] = _from_last(output, parts)
        return output


def _send(passed: Passed, to: int, parts: Parts) -> None:
    passed = tuple(tensor.detach().contiguous() for tensor in passed)
    header = [[(tuple(tensor.shape), tensor.dtype) for tensor in passed]]
    dist.send_object_list(header, group=parts.group, group_dst=to, device=parts.device)
    for tensor in passed:
        dist.send(tensor, group=parts.group, group_dst=to)


def _receive(source: int, parts: Parts) -> Passed:
    header: list[Any] = [None]
    dist.recv_object_list(header, group=parts.group, group_src=source, device=parts.device)
    passed = tuple(torch.empty(shape, dtype=dtype, device=parts.device) for shape, dtype in header[0])
    for tensor in passed:
        dist.recv(tensor, group=parts.group, group_src=source)
    return passed


def _from_last(output: Any, parts: Parts) -> Any:
    """Output of the last stage, on all workers of the replica. Collective."""
    source = parts.owner(parts.num_stages - 1)
    shared: list[Any] = [None]
    leaves: list[Any] = []
    if parts.has_last:
        leaves = [x.detach().contiguous() if isinstance(x, torch.Tensor) else x for x in tree_leaves(output)]
        shared = [tree_map_only(torch.Tensor, lambda x: _Shape(tuple(x.shape), x.dtype), output)]
    dist.broadcast_object_list(shared, group=parts.group, group_src=source, device=parts.device)
    shown, structure = tree_flatten(shared[0])
    received = []
    for number, leaf in enumerate(shown):
        if isinstance(leaf, _Shape):
            mine = leaves[number] if parts.has_last else torch.empty(leaf.shape, dtype=leaf.dtype, device=parts.device)
            dist.broadcast(mine, group=parts.group, group_src=source)
            leaf = mine
        received.append(leaf)
    return tree_unflatten(received, structure)


class _Shape:
    """Placeholder for a tensor in an output, with its shape and dtype but without its values."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
