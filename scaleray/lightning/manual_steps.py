"""Manual optimisation: a `training_step` that calls `manual_backward` and steps its optimizers itself.

scaleray steps each optimizer with the gradient over all micro-batches and workers, in the order of the `training_step`.
The `training_step` runs once per optimizer, up to that optimizer's step. Code before an earlier optimizer's step runs
with the weights, buffers and random numbers from before that step, so all values and gradients equal those of a single
run."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from scaleray.common.seeding import random_state, same_random_numbers, set_random_state
from scaleray.common.user_code import place_of
from scaleray.errors import ConfigError, WorkloadError
from scaleray.lightning.hooks_refused import PACKAGES
from scaleray.lightning.lightning_metrics import left_alone
from scaleray.lightning.lightning_optimizers import LightningSchedule, step_scheduler
from scaleray.lightning.trainer_object import refused

SAME_EACH_TIME = "each optimizer must take one step in every training_step, in the same order"


def losses_in_place(module: Any, optimizers: Sequence[Any]) -> str:
    """Alternative workload for a module with an unsupported `training_step`: one loss per optimizer."""
    name, numbers = type(module).__name__, range(len(optimizers))
    by_name = lambda value: "{" + ", ".join(f'"optimizer_{n}": {value(n)}' for n in numbers) + "}"
    losses = "".join(
        f"""

        def loss_{n}(self, model, batch):  # its {type(optimizers[n]).__name__} takes the step after it
            loss = ...  # the mean that training_step gives to manual_backward
            return loss * len(batch[0]), len(batch[0])"""
        for n in numbers
    )
    return f"""a plain workload has a loss for each optimizer instead (docs/workloads.md):

    class Workload(scaleray.Workload):
        def build_model(self):
            return {name}()

        def datasets(self):
            return {{"train": ..., "val": ...}}  # the Datasets of the DataLoaders

        def optimizer(self, model, settings):
            optimizers = model.configure_optimizers()  # without schedulers, which schedule() returns
            return {by_name(lambda n: f"optimizers[{n}]")}

        def losses(self):  # in the order of the steps: each sees the weights after those before
            return {by_name(lambda n: f"self.loss_{n}")}{losses}"""


class _Reached(BaseException):
    """Exception that ends a training_step at the step of the requested loss's optimizer."""


class ManualSteps:
    """Optimizers and schedulers of a module with manual optimisation, and the losses of its steps.

    order: indices of the optimizers in the order of their steps, empty before the first `training_step`. clip_norm:
    from the config. due: indices of the schedulers stepped by the last `training_step`.
    """

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.order: list[int] = []
        self.clip_norm: float | None = None
        self.due: set[int] = set()
        self._parameters: list[list[nn.Parameter]] = []
        self._events: list[tuple[str, Any]] | None = None
        self._after: _AfterTheLast | None = None
        self._place = -1
        self._ordinal = 0
        self._states: list[Any] = []
        self._buffers: list[list[torch.Tensor]] = []
        self._old: dict[int, list[torch.Tensor]] = {}
        self._new: dict[int, list[torch.Tensor]] = {}
        self._later_buffers: list[torch.Tensor] | None = None
        self._loss: torch.Tensor | None = None
        self._stepped: list[int] | None = None
        self._wanted = 0
        self._model: Any = None

    def __deepcopy__(self, memo: Any) -> ManualSteps:
        return self  # of a copied module, whose steps are none

    def attach(self, module: Any) -> None:
        """Make a module use these optimizers and schedulers in place of its Trainer's."""
        module.optimizers = self._given_optimizers
        module.lr_schedulers = self._given_schedulers
        module.manual_backward = self._backward
        module.clip_gradients = self._clip
        # the gradients of other optimizers' parameters are dropped anyway
        module.toggle_optimizer = module.untoggle_optimizer = lambda optimizer: None
        module.toggled_optimizer = lambda optimizer: contextlib.nullcontext()

    def take(self, optimizers: Sequence[torch.optim.Optimizer], clip_norm: float | None) -> None:
        """Use these optimizers. Raises ConfigError for several optimizers with sharded parameters."""
        self.optimizers, self.clip_norm = list(optimizers), clip_norm
        self._parameters = [[p for group in each.param_groups for p in group["params"]] for each in optimizers]
        if len(optimizers) > 1 and any(isinstance(p, DTensor) for own in self._parameters for p in own):
            raise ConfigError.problem(
                "strategy.name",
                "splits parameters, while manual optimisation with several optimizers needs whole parameters before "
                "and after each step",
                "use ddp or zero1",
            )

    def begin(self) -> None:
        """Discard the micro-batches of a previous training."""
        self._place, self._old = -1, {}

    def run(self, number: int, model: Any, step: Callable[[], Any], *, trains: bool) -> tuple[torch.Tensor, Any]:
        """Loss of optimizer `number`, and the result of the `training_step` `step` if it is the last optimizer. trains:
        whether optimizers step; otherwise the loss is only evaluated."""
        self._model = model
        if not self.order:
            self._learn(step)
        place = self._wanted = self.order.index(number)
        is_last = place == len(self.order) - 1
        given, self._loss, self._stepped = None, None, []
        with contextlib.ExitStack() as stack:
            if not is_last:
                stack.enter_context(left_alone(model))
                stack.enter_context(_same_attributes(model))
            if trains and len(self.order) > 1:
                stack.enter_context(self._as_before(place))
            with contextlib.suppress(_Reached):
                given = step()
            if self._loss is None or len(self._stepped) != place + 1:
                raise self._refused("takes different steps than in the first batch", SAME_EACH_TIME)
        loss, self._loss, self._stepped = self._loss, None, None
        return loss, given

    @contextlib.contextmanager
    def _as_before(self, place: int) -> Iterator[None]:
        """Context of a micro-batch for the optimizer at this position: the state at the micro-batch's start, plus the
        steps of earlier optimizers."""
        device = _device_of(self._model)
        if place != self._place:
            self._place, self._ordinal = place, 0
            if place == 0:
                self._states, self._buffers = [], []
            if place < len(self.order) - 1:
                own = self.order[place]
                self._old[own] = [p.detach().clone() for p in self._parameters[own]]
        if place == 0:
            self._states.append(random_state(device))
            self._buffers.append([b.clone() for b in self._model.buffers()])
            yield
            return
        set_random_state(self._states[self._ordinal], device)
        self._later_buffers = [b.clone() for b in self._model.buffers()]
        _copy(self._model.buffers(), self._buffers[self._ordinal])
        self._ordinal += 1
        for number in self.order[:place]:
            self._new[number] = [p.detach().clone() for p in self._parameters[number]]
            self._put(number, self._old[number])
        try:
            yield
        finally:
            for number in list(self._new):  # after an error
                self._put(number, self._new.pop(number))

    def _put(self, number: int, values: list[torch.Tensor]) -> None:
        _copy([p.detach() for p in self._parameters[number]], values)

    def _put_buffers(self, values: Sequence[torch.Tensor]) -> None:
        """Set the buffers in the middle of a pass. torch refuses a backward pass that needs a changed buffer;
        BatchNorm's needs none."""
        unused = {
            id(b)
            for part in self._model.modules()
            if isinstance(part, nn.modules.batchnorm._BatchNorm)
            for b in part.buffers()
        }
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            if not torch.equal(buffer, value):
                _copy([buffer.data if id(buffer) in unused else buffer], [value])

    def stepped(self, number: int) -> None:
        """Handle a call of an optimizer's step."""
        if self._events is not None:
            self._events.append(("step", number))
            if len({n for kind, n in self._events if kind == "step"}) == len(self.optimizers) and self._after is None:
                self._after = _AfterTheLast(self._model, self._refused)
                self._after.__enter__()
            return
        if self._stepped is None:
            raise refused("the step of an optimizer", "optimizers may step only in training_step", self._advice)
        place, wanted = len(self._stepped), self.order
        self._stepped.append(number)
        if place >= len(wanted) or wanted[place] != number:
            raise self._refused("takes different steps than in the first batch", SAME_EACH_TIME)
        if number in self._new:
            self._put(number, self._new.pop(number))
            if not self._new and self._later_buffers is not None:
                self._put_buffers(self._later_buffers)
                self._later_buffers = None
        elif place < len(wanted) - 1 and self._loss is not None:
            raise _Reached

    def scheduler_stepped(self, number: int, args: Sequence[Any]) -> None:
        """Handle a call of a scheduler's step: after the current step, or now."""
        if self._events is not None or self._stepped is not None:
            if args:
                hint = "step it in on_validation_epoch_end, with a value of self.trainer.callback_metrics"
                raise refused(
                    "the step of a scheduler with a value", "a value in training_step belongs to one worker", hint
                )
            self.due.add(number)
        else:
            self.schedulers[number].step(*args)

    def zeroed(self, number: int) -> None:
        """Handle a call of an optimizer's zero_grad."""
        if self._events is not None:
            self._events.append(("zero_grad", number))

    def _backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if args or "gradient" in kwargs:
            raise refused(
                "a gradient for self.manual_backward", "scaleray uses the gradient of the loss", "weight the loss"
            )
        if self._events is not None:
            self._events.append(("backward", None))
        elif self._stepped is None:
            raise refused("self.manual_backward", "gradients are computed only in training_step", self._advice)
        elif len(self._stepped) == self._wanted:
            self._loss = loss if self._loss is None else self._loss + loss

    def _clip(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None) -> None:
        if str(gradient_clip_algorithm or "norm") != "norm" or gradient_clip_val != self.clip_norm:
            found = f"self.clip_gradients by {gradient_clip_algorithm or 'norm'} of {gradient_clip_val}"
            raise refused(found, f"optimizer.clip_norm applies instead, and is {self.clip_norm}", "set it to that norm")
        if self._events is not None:
            self._events.append(("clip", optimizer.number))

    def _given_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        found = [OptimizerStandIn(self, number, each) for number, each in enumerate(self.optimizers)]
        return found[0] if len(found) == 1 else found

    def _given_schedulers(self) -> Any:
        found = [SchedulerStandIn(self, number) for number in range(len(self.schedulers))]
        return found[0] if len(found) == 1 else found or None

    def _learn(self, step: Callable[[], Any]) -> None:
        """Run a whole training_step without changes, and store the order of its steps. Raises WorkloadError for
        unsupported steps."""
        buffers = [b.clone() for b in self._model.buffers()]
        self._events = []
        try:
            with same_random_numbers(_device_of(self._model)), left_alone(self._model), _same_attributes(self._model):
                step()
            events = self._events
        finally:
            self._events = None
            self.due.clear()
            if self._after is not None:
                self._after.__exit__(None, None, None)
                self._after = None
            _copy(self._model.buffers(), buffers)
        steps = [number for kind, number in events if kind == "step"]
        for number in range(len(self.optimizers)):
            if (times := steps.count(number)) != 1:
                found = f"takes {times} steps of optimizer {number}"
                hint = "batch.global_size sets the rows of a step" if times == 0 else ""
                raise self._refused(found, SAME_EACH_TIME, hint)
        clipped = {number for kind, number in events if kind == "clip"}
        if clipped and len(clipped) < len(self.optimizers):
            raise self._refused("clips the gradients of some optimizers", "optimizer.clip_norm applies to all")
        zeroed: set[int] = set()
        waiting = False
        for kind, number in events:
            if kind == "zero_grad" and waiting:
                raise self._refused("calls zero_grad() between manual_backward and a step", "call it before both")
            zeroed |= {number} if kind == "zero_grad" else set()
            waiting = kind == "backward" or (waiting and kind != "step")
            if kind == "step" and number not in zeroed and len(self.optimizers) > 1:
                raise self._refused(
                    f"does not call zero_grad() of optimizer {number} before its manual_backward",
                    "gradients of other losses would be added",
                )
        kinds = [kind for kind, _ in events if kind in ("backward", "step")]
        if waiting or kinds[0] == "step" or ("step", "step") in itertools.pairwise(kinds):
            raise self._refused("takes a step without a manual_backward of its own", SAME_EACH_TIME)
        self.order = steps

    @property
    def _advice(self) -> str:
        return losses_in_place(self._model, self.optimizers)

    def _refused(self, found: str, allowed: str, hint: str = "") -> WorkloadError:
        where = place_of(type(self._model), "training_step")
        return WorkloadError.problem(where, f"{found}: {allowed}", hint or self._advice)


class OptimizerStandIn:
    """Stand-in for an optimizer in a training_step; its step runs later. number: index in `configure_optimizers`."""

    def __init__(self, steps: ManualSteps, number: int, optimizer: torch.optim.Optimizer) -> None:
        self._steps, self.number, self.optimizer = steps, number, optimizer

    def step(self, closure: Any = None, **kwargs: Any) -> None:
        """Request a step of this optimizer."""
        if closure is not None:
            raise refused("a closure of optimizer.step()", "the loss is computed once per step", "call manual_backward")
        self._steps.stepped(self.number)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, as every step begins without gradients."""
        self._steps.zeroed(self.number)

    def toggle_model(self, sync_grad: bool = True) -> contextlib.AbstractContextManager[None]:
        """Replacement for Lightning's context, which has no effect here."""
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class SchedulerStandIn:
    """Stand-in for a scheduler in a module, which is stepped after the current step."""

    def __init__(self, steps: ManualSteps, number: int) -> None:
        self._steps, self._number = steps, number

    def step(self, *args: Any) -> None:
        """Request a step of this scheduler."""
        self._steps.scheduler_stepped(self._number, args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps.schedulers[self._number], name)


class ManualSchedule(LightningSchedule):
    """Schedulers of one optimizer, stepped by the module. numbers: their indices among all schedulers."""

    def __init__(self, steps: ManualSteps, numbers: Sequence[int], *args: Any) -> None:
        super().__init__(*args)
        self._steps, self._numbers = steps, numbers

    def step(self, epoch: int | None = None) -> None:
        """Step the schedulers that the last training_step has stepped."""
        self.last_epoch += 1
        for number, due in zip(self._numbers, self.schedulers, strict=True):
            if number in self._steps.due:
                self._steps.due.discard(number)
                step_scheduler(due.scheduler)


class _AfterTheLast(TorchFunctionMode):
    """Refuses use of a model's parameters after the call of the last optimizer step, since steps run later."""

    def __init__(self, model: nn.Module, refuse: Callable[..., WorkloadError]) -> None:
        super().__init__()
        self._ids, self._refuse = {id(p) for p in model.parameters()}, refuse

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(id(each) in self._ids for each in tree_leaves((args, kwargs or {}))):
            hint = "move it to on_train_batch_end"
            raise self._refuse("uses the model after its last step", "the steps run after it ends", hint)
        return func(*args, **(kwargs or {}))


def may_be_manual(module: Any) -> bool:
    """Whether a module or class may use manual optimisation."""
    if not isinstance(module, type):
        return not module.automatic_optimization
    members = [m for parent in module.__mro__ if not _is_of_library(parent) for m in vars(parent).items()]
    codes = [getattr(value, "__code__", None) for _, value in members]
    return any(name == "automatic_optimization" for name, _ in members) or any(
        code is not None and "automatic_optimization" in code.co_names for code in codes
    )


def _is_of_library(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in (*PACKAGES, "torch", "builtins")


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _copy(to: Iterable[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(to, values, strict=True):
            tensor.copy_(value)


@contextlib.contextmanager
def _same_attributes(module: nn.Module) -> Iterator[None]:
    """Context that restores counters and lists among a module's attributes on exit."""
    kept = {k: copy.copy(v) for k, v in vars(module).items() if isinstance(v, (int, float, str, list))}
    try:
        yield
    finally:
        vars(module).update(kept)
