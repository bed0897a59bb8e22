"""Call the `on_*` hooks of a module and its callbacks when Lightning's Trainer would, and step schedulers that follow a
measured value."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from scaleray.common.callbacks import Callback
from scaleray.common.equal_models import equal_states
from scaleray.errors import WorkloadError
from scaleray.lightning.hooks_refused import is_overridden, place_of
from scaleray.lightning.lightning_metrics import computed, connect, restore_states, states_of
from scaleray.lightning.lightning_optimizers import Due, LightningSchedule
from scaleray.lightning.logs import Logged, recorded_name, step_values
from scaleray.lightning.trainer_object import TrainerStandIn


class EpochSums:
    """Sums and counts on this worker by name, which stay on the device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, kept: Mapping[str, Logged]) -> None:
        """Add a step's logged values. A value not averaged over epochs replaces the previous one, as in Lightning."""
        for name, logged in kept.items():
            if logged.is_metric:
                continue
            value = logged.value.double()
            pair = torch.stack([value * logged.weight, torch.as_tensor(logged.weight).to(value)])
            before = self._sums.get(name) if logged.on_epoch else None
            self._sums[name] = pair if before is None else before + pair

    def values(self) -> dict[str, tuple[float, float]]:
        """(sum, count) by name. Waits for the device."""
        found = {name: pair.tolist() for name, pair in self._sums.items()}
        return {name: (total, count) for name, (total, count) in found.items()}

    def load(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the `values` of one worker, or of several combined."""
        self._sums = {}
        for of_worker in values:
            for name, pair in of_worker.items():
                own = torch.tensor(list(pair), dtype=torch.float64)
                self._sums[name] = own + self._sums[name] if name in self._sums else own

    def means(self, run: Any) -> dict[str, float]:
        """Return the means over all workers, and reset the sums. Collective."""
        found = run.sums(self.values())
        self._sums.clear()
        return {name: total / count for name, (total, count) in found.items() if count}


NEVER_MEASURED = "set evaluation.every, for example '1 epoch'"


class LightningHooks(Callback):
    """Calls the hooks of a module and its callbacks between steps and around evaluations, on every worker.

    callbacks: callbacks whose hooks are called, before the module's. monitors: for each value in the record, the
    callback that follows it and its name in `self.log`. schedule: the module's schedulers, if any. evaluate_every:
    steps between evaluations. metrics: torchmetrics objects logged by training steps, by name. evaluated_metrics:
    torchmetrics objects logged by the evaluated split, by name in the record. logged_as: name in `self.log` of each
    value that an evaluation records."""

    def __init__(self, trainer: TrainerStandIn) -> None:
        self.trainer = trainer
        self.module: Any = None
        self.callbacks: list[Any] = []
        self.monitors: Mapping[str, tuple[str, str]] = {}
        self.schedule: LightningSchedule | None = None
        self.evaluate_every: int | None = None
        self.logged_as: dict[str, str] = {}
        self.sums = EpochSums()
        self.values_of_step: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.evaluated_metrics: dict[str, Any] = {}
        self._run: Any = None
        self._last: tuple[Any, Any, int] | None = None
        self._rows_of_last = self._began_step = -1
        self._stages: list[str] = []
        self._ends_epoch = self._has_evaluated = self._has_warned = self._are_set_up = False
        self._metrics_before: list[Mapping[str, Any]] = []
        self._had_others: list[str] = []

    @property
    def is_running(self) -> bool:
        """Whether training steps are running; the first batch is only inspected."""
        return self._run is not None

    def on_begin(self, run: Any) -> None:
        """Begin the training, or continue it."""
        self._run, self.trainer.global_step = run, run.step
        self.trainer.place = run.rank, run.world_size
        connect(self.module, run)
        if restarted := restore_states(self.module, self._metrics_before):
            run.warn(
                f"{', '.join(restarted)}: the workers' states cannot be added, so it covers only the rest of the epoch"
            )
        self._set_up_callbacks()
        if self._had_others:
            run.warn(f"{', '.join(self._had_others)}: the workers had different states; all now use rank 0's")
        self.call("on_fit_start")
        self._call_logging("on_train_start")
        if self.trainer.batch_idx == 0:
            self._call_logging("on_train_epoch_start")

    def before_batch(self, batch: Any) -> None:
        """Called before a micro-batch; hooks receive only the first one of a step."""
        if not self.is_running or self._began_step == self.trainer.global_step:
            return
        self._began_step = self.trainer.global_step
        if self.call("on_train_batch_start", batch, self.trainer.batch_idx) == -1:
            place = place_of(type(self.module), "on_train_batch_start")
            raise WorkloadError.problem(place, "skips the rest of an epoch: every row is used once per epoch")

    def after_batch(self, outputs: Any, batch: Any, rows: int, kept: Mapping[str, Logged]) -> None:
        """Store a micro-batch with its loss until its step is complete."""
        if not self.is_running:
            return
        if self._has("on_train_batch_end"):
            shown = {"loss": outputs} if isinstance(outputs, torch.Tensor) else outputs
            detached = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in shown.items()}
            self._last, self._rows_of_last = (detached, batch, self.trainer.batch_idx), rows
        self.values_of_step = step_values(kept)
        self._keep(kept)

    def _keep(self, kept: Mapping[str, Logged]) -> None:
        self.sums.add(kept)
        self.metrics.update({name: logged.value for name, logged in kept.items() if logged.is_metric})

    def on_step(self, run: Any) -> None:
        """Called after an optimizer step."""
        self.trainer.global_step, self.trainer.looks_back = run.step, True
        if self._last is not None:
            last, self._last = self._last, None
            with self.module.log.keeping(self._rows_of_last, is_training=True) as kept:
                self.call("on_train_batch_end", *last)
            self._keep(kept)
            if by_step := step_values(kept):
                run.log_metrics({name: value() for name, value in by_step.items()})
        self.trainer.looks_back = False
        self._ends_epoch = run.step % (self.trainer.steps_per_epoch or 1) == 0
        if not self._is_evaluated(run.step):
            self._follow("step")
            self._end_epoch()

    def before_evaluation(self, stage: str) -> None:
        """Called before a batch of an evaluation. stage: `validation` or `test`."""
        if self.is_running and stage not in self._stages:
            self._stages.append(stage)
            self.call(f"on_{stage}_start")
            self.call(f"on_{stage}_epoch_start")

    def on_evaluation(self, run: Any) -> None:
        """Called at the end of an evaluation."""
        if not self.is_running:
            return
        self._check_monitors(run.metrics)
        measured = {logged: run.metrics[name] for name, logged in self.logged_as.items() if name in run.metrics}
        self.trainer.callback_metrics.update(measured)
        for stage in self._stages:
            with self._logging({"validation": "val"}.get(stage, stage)):
                self.call(f"on_{stage}_epoch_end")
            self.call(f"on_{stage}_end")
        self._stages.clear()
        self._has_evaluated = True
        self.trainer.stage, self.trainer.looks_back = "training", False
        self._follow("step")
        self._end_epoch()

    def on_end(self, run: Any) -> None:
        """Called at the end of the training."""
        if not self.is_running:  # nothing was left to train
            return
        self._ends_epoch = self._ends_epoch or self.trainer.batch_idx != 0  # one that was cut short ends too
        self._end_epoch()
        self.call("on_train_end")
        self.call("on_fit_end")
        self.call("teardown", "fit")

    def state_dict(self) -> dict[str, Any]:
        """This worker's logged values in the current epoch, the last measurements, and the callbacks' states."""
        return {
            "sums": self.sums.values(),
            "metrics": {} if self.module is None else states_of(self.module),
            "measured": dict(self.trainer.callback_metrics),
            "callbacks": {key: state for key, each in self._by_key().items() if (state := each.state_dict())},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._go_on([state], state["measured"])
        self._load_callbacks([state])

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of a different number of workers; rank 0 loads all of them."""
        self._go_on(states if self.trainer.is_global_zero else [], states[0]["measured"])
        self._load_callbacks(states)

    def _go_on(self, states: Sequence[Mapping[str, Any]], measured: Mapping[str, float]) -> None:
        self.sums.load([state["sums"] for state in states])
        self.trainer.callback_metrics.update(measured)
        self._metrics_before = [state["metrics"] for state in states]

    def _by_key(self) -> dict[str, Any]:
        """Callbacks by Lightning's state key and a number, since several may share a key."""
        return {f"{number} {each.state_key}": each for number, each in enumerate(self.callbacks)}

    def _set_up_callbacks(self) -> None:
        if not self._are_set_up:
            self._are_set_up = True
            for callback in self.callbacks:
                callback.setup(self.trainer, self.module, "fit")

    def _load_callbacks(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the callbacks' states; if the number of workers changed, all workers get rank 0's."""
        self._set_up_callbacks()
        for key, callback in self._by_key().items():
            found = [state["callbacks"][key] for state in states if key in state["callbacks"]]
            if found:
                callback.load_state_dict(found[0])
            if not all(equal_states(found[0], other) for other in found[1:]):
                self._had_others.append(type(callback).__name__)

    def _end_epoch(self) -> None:
        if not self._ends_epoch:
            return
        self._ends_epoch = False
        self.trainer.looks_back = True
        means = {**self.sums.means(self._run), **computed(self.metrics)}
        self.metrics.clear()
        self.trainer.callback_metrics.update(means, **{f"{name}_epoch": mean for name, mean in means.items()})
        self._record("train", means)
        with self._logging("train"):
            self.call("on_train_epoch_end")
        self._follow("epoch")
        self.trainer.looks_back = False
        if self.trainer.total_steps is None or self.trainer.global_step < self.trainer.total_steps:
            self._call_logging("on_train_epoch_start")

    def _call_logging(self, hook: str) -> None:
        """Call a hook and record the values that it logs."""
        if self._has(hook):
            with self._logging("train"):
                self.call(hook)

    def _check_monitors(self, metrics: Mapping[str, float]) -> None:
        """Raise WorkloadError for a callback whose monitored name is that of another value in the record."""
        for recorded, (callback, monitor) in self.monitors.items():
            splits = {name.partition("/")[0] for name in self.logged_as}
            if recorded.partition("/")[0] in splits and self.logged_as.get(recorded) != monitor:
                known = ", ".join(sorted(self.logged_as.values()))
                raise WorkloadError(f"the monitor of {callback}", monitor, f"validation_step logs {known}")

    @contextlib.contextmanager
    def _logging(self, split: str) -> Iterator[None]:
        """Context for a hook, whose logged values are averaged over workers and recorded."""
        with self.module.log.keeping(1, is_training=False) as kept:
            yield
        sums = EpochSums()
        sums.add(kept)
        means = {
            **sums.means(self._run),
            **computed({n: logged.value for n, logged in kept.items() if logged.is_metric}),
        }
        self.trainer.callback_metrics.update(means)
        self._record(split, means)

    def _record(self, split: str, means: Mapping[str, float]) -> None:
        if means:
            self._run.log_metrics({recorded_name(split, name): value for name, value in means.items()})

    def _follow(self, interval: str) -> None:
        """Step the schedulers that follow a measured value."""
        taken, in_epoch = self.trainer.global_step, self.trainer.steps_per_epoch or 1
        number = (taken - 1) % in_epoch + 1 if interval == "step" else taken // in_epoch
        for due in self.schedule.plateaus if self.schedule is not None else ():
            if due.interval == interval and due.is_due(number):
                self._follow_value(due)

    def _follow_value(self, due: Due) -> None:
        measured, name, kind = self.trainer.callback_metrics, due.monitor or "", type(due.scheduler).__name__
        assert self.schedule is not None
        if name in measured:
            self.schedule.follow(due, float(measured[name]))
        elif self._has_evaluated and due.strict:
            known = ", ".join(sorted(measured))
            raise WorkloadError(
                f"the monitor of {kind}", name, f"no logged value has this name; the logged values are {known}"
            )
        elif not self._has_warned:
            self._has_warned = True
            text = f"{name} was never measured, so {kind} leaves the learning rate unchanged"
            self._run.warn(f"{text}: {NEVER_MEASURED}")

    def _is_evaluated(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        is_last = self.trainer.total_steps is not None and step >= self.trainer.total_steps
        return is_last or bool(self.evaluate_every and step % self.evaluate_every == 0)

    def _has(self, hook: str) -> bool:
        return any(is_overridden(hook, each, "Callback") for each in self.callbacks) or self._is_of_module(hook)

    def _is_of_module(self, hook: str) -> bool:
        return self.module is not None and is_overridden(hook, self.module)

    def call(self, hook: str, *args: Any) -> Any:
        """Call a hook of the callbacks, then the module's, and return its result. Does nothing unless
        training steps run."""
        if not self.is_running:
            return None
        for callback in self.callbacks:
            if is_overridden(hook, callback, "Callback"):
                getattr(callback, hook)(self.trainer, self.module, *args)
        result = getattr(self.module, hook)(*args) if self._is_of_module(hook) else None
        if self.trainer.should_stop:
            self._run.stop("trainer.should_stop was set")
        return result
