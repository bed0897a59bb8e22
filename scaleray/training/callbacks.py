"""The callbacks of a workload as an observer of the training, and the context passed to them."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from scaleray.common.callbacks import Callback, callbacks_of
from scaleray.common.equal_models import equal_states
from scaleray.common.metric_names import GRAD_NORM, LEARNING_RATE, LOSS, LOSS_OF, by_loss
from scaleray.common.seeding import same_random_numbers
from scaleray.common.user_code import call_user_code
from scaleray.errors import WorkloadError
from scaleray.records.run_record import Emit, EvaluationRecord, StepRecord
from scaleray.training.logged import Logger
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step.evaluation import NamedSums

SCALING = ("on_epoch_start", "on_step", "on_evaluation_start", "on_evaluation", "on_epoch_end")
"""Hooks that may change the learning rate."""


class RunContext(Logger):
    """Context passed to a callback: the training's progress, its model, and the requests that a callback may make.
    step: number of optimizer steps taken. epoch: passes over the training data, as a fraction. metrics: by name as in
    MLflow; in `on_step` those of the step, elsewhere those of the last evaluation. rank, world_size: of this worker."""

    def __init__(self, place: RankContext, emit: Emit, setup: Setup) -> None:
        super().__init__(emit, is_kept=place.rank == 0)
        self.rank, self.world_size, self._place, self._setup = place.rank, place.world_size, place, setup
        self._sums = NamedSums(place)
        self.epoch = 0.0
        self.metrics: Mapping[str, float] = {}
        self._wish: str | None = None
        self._hook = ""
        self.steps_ahead = 0

    @property
    def model(self) -> nn.Module:
        """Model as `build_model` made it; under strategies that shard it, only this worker's part. See `on_model`."""
        return self._setup.parallel.module

    def on_model(self, compute: Callable[[nn.Module], Any]) -> Any:
        """Result of `compute(model)` in evaluation mode. Collective: every worker must call it."""
        parallel = self._setup.parallel
        modes = [(part, part.training) for part in parallel.module.modules()]
        parallel.module.eval()
        try:
            return parallel.run_alone(compute)
        finally:
            for part, was_training in modes:
                part.training = was_training

    def sums(self, own: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """(sum, count) by name, added up over the values of all workers. Collective."""
        return self._sums(own)

    def gather(self, value: Any) -> list[Any]:
        """The value of every worker, in the order of ranks. Collective."""
        return self._place.gathered(value)

    def stop(self, reason: str) -> None:
        """Request the end of the training. Any worker may call this; all end after the same step, at most one later."""
        self._wish = reason

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the rates of all parameter groups by `factor` from the next step on (on a GPU, two steps later if
        called in `on_step`), on top of the schedule and of earlier factors. All workers must make the same request,
        which is checked. Checkpoints hold the factor."""
        if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise WorkloadError("the factor of scale_learning_rate()", factor, "it must be a number above 0")
        if self._hook not in SCALING:
            allowed = f"only {', '.join(SCALING)} may call it, because they run at the same steps after an interruption"
            raise WorkloadError.problem("scale_learning_rate()", f"was called in {self._hook}(): {allowed}")
        ahead = self.steps_ahead if self._hook == "on_step" else 0
        self._setup.rate_scale.change(float(factor), first_step=self.step + ahead + 1)


class Callbacks:
    """Calls the callbacks of a workload; does nothing if there are none. emit: receives what they log."""

    def __init__(self, workload: Any, place: RankContext, emit: Emit) -> None:
        self.place, self.emit = place, emit
        self.callbacks = callbacks_of(workload)
        self.context: RunContext | None = None
        self.steps_ahead = 0
        self._is_hook_said = False
        self.follows_epochs = self.has("on_epoch_start") or self.has("on_epoch_end")

    def begin(self, setup: Setup) -> None:
        if self.callbacks:
            self.context = RunContext(self.place, self.emit, setup)
            self.context.steps_ahead = self.steps_ahead

    def has(self, hook: str) -> bool:
        """Whether any callback overrides this hook of the base class."""
        idle = getattr(Callback, hook)
        found = (getattr(each, hook, None) for each in self.callbacks)
        return any(callable(call) and getattr(call, "__func__", None) is not idle for call in found)

    def started(self, step: int, epoch: float, metrics: Mapping[str, float]) -> None:
        """Call `on_begin`, after everything has been restored and before the first step."""
        self._call("on_begin", step=step, epoch=epoch, metrics=metrics)

    def after_step(self, taken: StepRecord) -> None:
        if not self.callbacks:
            return
        metrics = {LOSS.name: taken.loss, LEARNING_RATE.name: taken.learning_rate, **by_loss(LOSS_OF, taken.losses)}
        if taken.grad_norm is not None:
            metrics[GRAD_NORM.name] = taken.grad_norm
        self._call("on_step", step=taken.step, epoch=taken.epoch, metrics=metrics)

    def epoch_starts(self, epoch: float, metrics: Mapping[str, float]) -> None:
        """Call `on_epoch_start`."""
        self._call("on_epoch_start", epoch=epoch, metrics=metrics)

    def epoch_ended(self, epoch: float, metrics: Mapping[str, float]) -> None:
        """Call `on_epoch_end`."""
        self._call("on_epoch_end", epoch=epoch, metrics=metrics)

    def evaluation_starts(self, metrics: Mapping[str, float]) -> None:
        """Call `on_evaluation_start`."""
        self._call("on_evaluation_start", metrics=metrics)

    def evaluated(self, record: EvaluationRecord, *, at_end: bool = False) -> str | None:
        """Call `on_evaluation`. Returns the reason to end the training now, if a callback requests that. Collective."""
        self._call("on_evaluation", step=record.step, metrics=record.metrics)
        if at_end or not self.callbacks:
            return None
        return self._agreed() if self._share()[0] > 0 else None

    def before_checkpoint(self) -> None:
        """Call `on_checkpoint`. Collective."""
        self._call("on_checkpoint")
        if self.callbacks:
            self._share()

    def ended(self, metrics: Mapping[str, float]) -> None:
        """Call `on_end`."""
        self._call("on_end", metrics=metrics)

    def signals(self) -> tuple[float, ...]:
        """Signals that the ranks share in every step: whether a callback requests the end, and the requested learning
        rate."""
        if self.context is None:
            return ()
        return (float(self.context._wish is not None), *self.context._setup.rate_scale.signals())

    def check_rates(self, sums: tuple[float, ...]) -> tuple[float, ...]:
        """Return the sums of a step's signals without those of the learning rate, which come last. Raises WorkloadError
        on every worker if the requests for it differ."""
        if not sums or self.context is None:
            return sums
        *others, code, square = sums
        if code * code != self.place.world_size * square:
            raise WorkloadError.problem(
                "scale_learning_rate()",
                "was called differently on different workers, which would train with different rates",
                "decide by run.metrics, which are the same on all workers, or by run.sums() and run.gather()",
            )
        return tuple(others)

    def _share(self) -> tuple[float, ...]:
        """Sum `signals` over all ranks, between two steps. Collective."""
        return self.check_rates(tuple(self.place.all_reduce(list(self.signals()))))

    def verdict(self, signals: tuple[float, ...]) -> str | None:
        """Reason for ending the training, after a step in which a rank requested it. Collective."""
        return self._agreed() if self.callbacks and signals and signals[-1] > 0 else None

    @property
    def have_state(self) -> bool:
        """Whether any callback has a state to save."""
        return any(callable(getattr(each, "state_dict", None)) for each in self.callbacks)

    def state_dict(self) -> dict[str, Any]:
        """State of this worker's callbacks, by position in the list, and the files logged so far."""
        if self.context is None:
            return {}
        states = {
            f"{number}": each.state_dict()
            for number, each in enumerate(self.callbacks)
            if callable(getattr(each, "state_dict", None))
        }
        return {"states": states, "logged_bytes": self.context.logged_bytes}

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the callbacks from the states of all workers, in the order of ranks. A callback without a saved state
        starts from scratch. If the number of workers has changed, each callback converts the states itself or gets the
        state of rank 0."""
        if self.context is None or not states or not states[0]:
            return
        self.context.logged_bytes = states[0].get("logged_bytes", 0)
        is_same_size = len(states) == self.place.world_size
        for number, each in enumerate(self.callbacks):
            before = [state.get("states", {}).get(f"{number}") for state in states]
            if before[0] is None or not callable(load := getattr(each, "load_state_dict", None)):
                continue
            if is_same_size:
                self._user_code(each, "load_state_dict", partial(load, before[self.place.rank]))
            elif callable(load_all := getattr(each, "load_states", None)):
                self._user_code(each, "load_states", partial(load_all, before))
            else:
                self._user_code(each, "load_state_dict", partial(load, before[0]))
                if not all(equal_states(before[0], other) for other in before[1:]):
                    self.context.warn(
                        f"callback {type(each).__name__} had different states on {len(states)} workers; all "
                        f"{self.place.world_size} workers now use that of rank 0 (define load_states(states) to "
                        "convert them)"
                    )

    def _call(self, hook: str, **known: Any) -> None:
        context = self.context
        if context is None:
            return
        for name, value in known.items():
            setattr(context, name, value)
        context._hook = hook
        groups, schedule = context._setup.optimizer.param_groups, context._setup.schedule
        rates = [group.get("lr") for group in groups]
        forwards, first_hook = _forwards(context.model), RemovableHandle.next_id
        with _leaving_no_trace(self.place.device):
            for each in self.callbacks:
                if callable(call := getattr(each, hook, None)):
                    self._user_code(each, hook, partial(call, context))
                now = [group.get("lr") for group in groups]
                if now != rates and now != schedule.get_last_lr():  # the schedule's own change is one of its state
                    raise WorkloadError(
                        f"the learning rate after {hook}() of callback {type(each).__name__}",
                        now[0],
                        "the schedule sets the rate in every step, which would undo this change",
                        "call run.scale_learning_rate(factor), or return a schedule from schedule()",
                    )
                self._check_code(each, hook, forwards, first_hook)

    def _check_code(self, callback: Callback, hook: str, forwards: Mapping[str, Any], first_hook: int) -> None:
        """Raise an error if a callback replaced a `forward`, and warn once about hooks that it leaves on the model."""
        assert self.context is not None
        where, now = f"after {hook}() of callback {type(callback).__name__}", _forwards(self.context.model)
        if now != forwards:
            name = next(name for name in {**now, **forwards} if now.get(name) != forwards.get(name))
            raise WorkloadError.problem(
                f"forward() of {f'the module {name}' if name else 'the model'}",
                f"was replaced {where}: resumed runs and evaluations use the one from build_model()",
                "let forward() depend on an attribute of the module, which is saved",
            )
        if RemovableHandle.next_id > first_hook and not self._is_hook_said:
            for name, part in self.context.model.named_modules():
                hooks = {**part._forward_hooks, **part._forward_pre_hooks, **part._backward_hooks}
                if any(number >= first_hook for number in (*hooks, *part._backward_pre_hooks)):
                    self._is_hook_said = True
                    self.context.warn(
                        f"{f'the module {name}' if name else 'the model'} has a new hook {where}: its changes are "
                        "missing from the final weights and their evaluation; a hook that only reads is harmless, "
                        "any other belongs in build_model()"
                    )
                    return

    def _user_code(self, callback: Any, hook: str, call: Callable[[], Any]) -> None:
        step = self.context.step if self.context is not None else 0
        call_user_code(call, what=f"callback {type(callback).__name__}", doing=f"{hook}() after step {step}")

    def _agreed(self) -> str:
        """The reason given by the lowest rank that has one. Collective."""
        assert self.context is not None
        everyone = self.place.gathered(self.context._wish)
        return f"ended by a callback: {next(reason for reason in everyone if reason is not None)}"


def _forwards(model: nn.Module) -> dict[str, Any]:
    """Replaced `forward` functions of modules, by module."""
    return {name: vars(part)["forward"] for name, part in model.named_modules() if "forward" in vars(part)}


@contextlib.contextmanager
def _leaving_no_trace(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), same_random_numbers(device):
        yield
