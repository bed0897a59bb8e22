"""A LightningModule and its data as a workload, without changes to the module. scaleray replaces Lightning's Trainer.
The module's own optimizer and schedulers train it. The loss of its step, a mean, becomes the sum and the count that
every strategy needs."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scaleray.common.seeding import same_random_numbers
from scaleray.config import RunConfig
from scaleray.config.brought import Brought
from scaleray.data.collation import Columnwise, refuse_ragged
from scaleray.data.source_interface import TRAIN, Columns, rows_in
from scaleray.errors import DataError, WorkloadError
from scaleray.lightning import loaders
from scaleray.lightning.hooks import LightningHooks
from scaleray.lightning.hooks_refused import (
    arguments_of,
    check_data_class,
    check_module_class,
    is_attached,
    is_overridden,
    lightning_base,
    place_of,
)
from scaleray.lightning.lightning_batches import batch_of, items_of, split_of
from scaleray.lightning.lightning_metrics import computed, left_alone
from scaleray.lightning.lightning_optimizers import (
    LightningSchedule,
    configured,
    configured_by_hand,
    give_rate,
    without_schedule,
)
from scaleray.lightning.logs import Log, short_names, sums
from scaleray.lightning.manual_steps import ManualSchedule, ManualSteps, may_be_manual
from scaleray.lightning.trainer_callbacks import called, check_callbacks, monitors, settings_of, together
from scaleray.lightning.trainer_object import TrainerStandIn
from scaleray.workload import Workload


class Collation(Columnwise):
    """Collates batches with their split and number of rows. own: returns a split's own collate_fn, or else torch's is
    used."""

    def __init__(self, own: Callable[[str], Any]) -> None:
        self.own = own

    def __call__(self, rows: Columns) -> dict[str, Any]:
        split, has_own = split_of(rows)
        num_rows = rows_in(rows)
        if has_own:
            batch = self.own(split)(list(items_of(rows)))
        else:
            refuse_ragged(rows, what=f"the {split} data")
            batch = batch_of({name: torch.from_numpy(column) for name, column in rows.items()})
        return {"split": split, "rows": num_rows, "batch": batch}


STAGES = {loaders.VAL: ("validation_step", "validating"), loaders.TEST: ("test_step", "testing")}
"""Step and stage of each kind of evaluation split."""
ROWS = "rows"


@dataclass(frozen=True)
class Parts:
    """Parts of a workload. module, data: classes or objects; data may be a function. count: weight of a batch in the
    loss; ROWS: its rows, even if the loss is not a mean over them; None: its rows, which is checked. callbacks:
    Lightning callbacks, as for a Trainer."""

    module: Any
    data: Any
    count: Callable[[Any], Any] | str | None
    callbacks: tuple[Any, ...]
    home: str


def as_workload(
    module: Any, datamodule: Any = None, *, count: Any = None, callbacks: Sequence[Any] = ()
) -> type[LightningWorkload]:
    """The workload class that trains a LightningModule; name it in a config, or give it to `scaleray.train`.

    module: the class, built with the arguments in `workload.args` that it accepts, or an object, from whose weights
    each training starts. datamodule: a LightningDataModule (class or object), a function that returns DataLoaders or
    Datasets by split, or None if the module has its own `train_dataloader`. count: `count(batch)`, the number of
    elements in the mean of the training loss if not the rows of the batch, for example tokens; "rows" weights batches
    by rows anyway. callbacks: Lightning callbacks, as for a Trainer, in addition to those of the module's
    `configure_callbacks`; each training starts with copies. Raises WorkloadError for unsupported features."""
    cls = module if isinstance(module, type) else type(module)
    check_module_class(cls)
    data_class = datamodule if isinstance(datamodule, type) else type(datamodule)
    if lightning_base(data_class, "LightningDataModule") is not None:
        check_data_class(data_class)
    elif datamodule is not None and not (callable(datamodule) and not isinstance(datamodule, type)):
        found = datamodule.__name__ if isinstance(datamodule, type) else type(datamodule).__name__
        allowed = "it must be a LightningDataModule, or a function that returns loaders by split"
        raise WorkloadError("the datamodule of as_workload()", found, allowed)
    if count is not None and count != ROWS and not callable(count):
        raise WorkloadError("count of as_workload()", count, "it must be a function of the batch, or 'rows'")
    check_callbacks(callbacks)
    home = sys._getframe(1).f_globals.get("__name__", cls.__module__)
    return _made(Parts(module, datamodule, count, tuple(callbacks), home))


def _made(parts: Parts) -> type[LightningWorkload]:
    cls = parts.module if isinstance(parts.module, type) else type(parts.module)
    # as of the file that names it, which travels to the workers with what it needs
    members = {"parts": parts, "__module__": parts.home, "__doc__": cls.__doc__, "__signature__": _signature(parts)}
    return type(cls.__name__, (LightningWorkload,), members)


def _signature(parts: Parts) -> inspect.Signature:
    """Keys allowed in `workload.args`: arguments of the module and of the data."""
    known = {**arguments_of(parts.data), **arguments_of(parts.module)}
    ordered = sorted(known.values(), key=lambda p: (p.kind == p.VAR_KEYWORD, p.default is not p.empty))
    seen: dict[Any, inspect.Parameter] = {}
    for parameter in ordered:
        is_rest = parameter.kind == parameter.VAR_KEYWORD
        plain = parameter if is_rest else parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        seen.setdefault("**" if is_rest else parameter.name, plain)
    return inspect.Signature(list(seen.values()))


def _rebuilt(parts: Parts, args: Mapping[str, Any]) -> LightningWorkload:
    return _made(parts)(**args)


def _rebuilt_as(cls: type[LightningWorkload], args: Mapping[str, Any], own: Mapping[str, Any]) -> LightningWorkload:
    """A workload of a class derived from the one made by `as_workload`, with its attributes."""
    workload = cls.__new__(cls)
    LightningWorkload.__init__(workload, **args)
    vars(workload).update(own)
    return workload


class LightningWorkload(Workload):
    """A LightningModule as a workload; `as_workload` makes a subclass for each module.

    Keyword arguments go to the constructors of the module and of the data; each gets the arguments that it accepts by
    name.
    """

    parts: Parts

    def __init__(self, **args: Any) -> None:
        self.args = args
        self.collate = Collation(self._collation_of)  # type: ignore[method-assign]
        self._trainer = TrainerStandIn()
        self._model: Any = None
        self._hooks = LightningHooks(self._trainer)
        self._collations: dict[str, Any] | None = None
        self._steps = ManualSteps()
        self._names: tuple[str, ...] | None = None
        self._names_of_base = {*vars(self), "_names_of_base"}

    def __reduce__(self) -> Any:
        if "parts" in vars(type(self)):
            return _rebuilt, (self.parts, self.args)
        own = {name: value for name, value in vars(self).items() if name not in self._names_of_base}
        return _rebuilt_as, (type(self), self.args, own)

    def build_model(self) -> Any:
        """The module itself, set up as for `Trainer.fit`."""
        module = self._new_module()
        if not self._hooks.is_running:  # else another look at the model
            self._trainer.callbacks = callbacks = copy.deepcopy(self._callbacks_of(module))
            self._hooks.callbacks, self._hooks.monitors = called(callbacks), monitors(callbacks)
        if is_overridden("setup", type(module)):
            module.setup("fit")
        if is_overridden("configure_model", type(module)):
            module.configure_model()
        self._model = module
        return module

    def datasets(self) -> Mapping[str, Any]:
        """Datasets of the loaders by split, with the evaluation splits for which the module has a step."""
        given = self._loaders(prepare=True)
        sources = {TRAIN: loaders.train_source(given.pop(TRAIN))}
        cls = self._class()
        for split, of_split in given.items():
            if split in STAGES and not is_overridden(STAGES[split][0], cls):
                continue
            sources.update(loaders.evaluation_sources(split, of_split))
        return sources

    def loss(self, model: Any, batch: Any) -> tuple[Any, Any]:
        """The mean that `training_step` returns, times its count."""
        _, rows, batch = self._batch(model, batch)
        self._trainer.stage, self._trainer.looks_back = "training", False
        if not model.training:  # the loss of an evaluation, which is none of the module's steps
            return self._sum_and_count(self._step(model, "training_step", batch), batch, rows)
        with model.log.keeping(rows, is_training=True) as kept:
            self._hooks.before_batch(batch)
            given = self._step(model, "training_step", batch)
        self._hooks.after_batch(given, batch, rows, kept)
        return self._sum_and_count(given, batch, rows)

    @property
    def has_loss(self) -> bool:
        """Whether `training_step` returns a loss to evaluate; manual optimisation does not."""
        return not self._optimizer_names()

    def losses(self) -> Mapping[str, Callable[[Any, Any], Any]] | None:
        """The losses of a module with manual optimisation, by optimizer."""
        names = self._optimizer_names()
        return {name: partial(self._loss_of, number) for number, name in enumerate(names)} or None

    @property
    def order_of_losses(self) -> list[str]:
        """Names of the losses in the order of the module's steps; empty before the first `training_step`."""
        return [self._optimizer_names()[number] for number in self._steps.order]

    def _loss_of(self, number: int, model: Any, batch: Any) -> tuple[Any, Any]:
        _, rows, batch = self._batch(model, batch)
        self._trainer.stage, self._trainer.looks_back = "training", False
        trains = self._hooks.is_running and model.training
        with model.log.keeping(rows, is_training=True) as kept:
            if trains:
                self._hooks.before_batch(batch)
            step = partial(self._step, model, "training_step", batch)
            loss, given = self._steps.run(number, model, step, trains=trains)
        if trains and number == self._steps.order[-1]:
            self._hooks.after_batch({} if given is None else given, batch, rows, kept)
        return self._sum_and_count(loss, batch, rows)

    def _optimizer_names(self) -> tuple[str, ...]:
        """Names of the optimizers of a module with manual optimisation; otherwise none."""
        if self._names is None:
            self._names = ()
            if may_be_manual(self.parts.module):
                self._names = self._names_of_new_module()
        return self._names

    def _names_of_new_module(self) -> tuple[str, ...]:
        with same_random_numbers(torch.device("cpu")):
            module, trainer = self._new_module(), self._trainer
            if module.automatic_optimization:
                return ()
            length = trainer.total_steps, trainer.steps_per_epoch
            trainer.total_steps, trainer.steps_per_epoch = length[0] or 1000, length[1] or 1000  # only to be counted
            try:
                found = configured_by_hand(module.configure_optimizers())
            finally:
                trainer.total_steps, trainer.steps_per_epoch = length
        return tuple(f"optimizer_{number}" for number in range(len(found)))

    def _check_manual(self) -> None:
        """Raise WorkloadError if manual optimisation was set in a way that the class does not show."""
        if not may_be_manual(self.parts.module):
            allowed = "scaleray detects it only in the module's own class"
            hint = "set self.automatic_optimization = False in its __init__"
            raise WorkloadError.problem(place_of(self._class()), f"uses manual optimisation: {allowed}", hint)

    def metrics(self, model: Any, batch: Any) -> Mapping[str, Any]:
        """Values that `validation_step` or `test_step` logs, as sums and counts; its loss if it returns one."""
        split, rows, batch = self._batch(model, batch)
        name, self._trainer.stage = STAGES.get(split.partition("_")[0], STAGES[loaders.VAL])
        if not is_overridden(name, type(model)):
            return {}
        self._trainer.looks_back = True
        kind, number = name.removesuffix("_step"), loaders.loader_number(split)
        self._hooks.before_evaluation(kind)
        with model.log.keeping(rows, is_training=False) as kept:
            given = self._with_batch_hooks(model, kind, batch, number)
        found = sums(kept)
        objects = {logged: each.value for logged, each in kept.items() if each.is_metric and each.on_epoch}
        shown = short_names([*found, *objects], split)
        values = {shown[logged]: pair for logged, pair in found.items()}
        self._hooks.evaluated_metrics.update({shown[logged]: metric for logged, metric in objects.items()})
        suffix = "" if number is None else f"/dataloader_idx_{number}"
        self._hooks.logged_as.update({f"{split}/{shown[logged]}": f"{logged}{suffix}" for logged in shown})
        loss = given.get("loss") if isinstance(given, Mapping) else given
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and "loss" not in values:
            values["loss"] = self._sum_and_count(loss, batch, rows)
        return values

    def explain_weight(self, whole: Any, first: Any, second: Any) -> WorkloadError | None:
        """Error for a training loss that is not a mean over its count: (loss times count, count) of some rows and of
        their halves do not add up."""
        if self.parts.count == ROWS:
            return None
        over = "rows" if self.parts.count is None else "the count"
        shown = ", ".join(f"{total / count:.6g} for {count:g}" for total, count in (whole, first, second))
        return WorkloadError.problem(
            place_of(self._class(), "training_step"),
            f"returns a loss that is not a mean over {over} ({shown}: some rows and their two halves), so its "
            "sum over micro-batches and workers would depend on how they are split",
            "give its count, such as the tokens, with as_workload(..., count=lambda batch: ...), or count='rows' to "
            "weight micro-batches by their rows anyway, as Lightning does with batches",
        )

    def optimizer(self, model: Any, settings: Any) -> Any:
        """The module's own optimizer, with its own rates or with the config's rate if it accepts one."""
        if not is_attached(model):  # a copy, with stages in the place of some parts
            raise WorkloadError.problem(
                place_of(self._class(), "training_step"),
                "cannot run in a pipeline: its stages are on different workers, and a LightningModule's step "
                "needs the whole model",
                "use --strategy.name fsdp, or tensor with a tensor_plan()",
            )
        self._model = self._hooks.module = self._trainer.lightning_module = model
        self._trainer.total_steps, self._trainer.steps_per_epoch = settings.total_steps, settings.steps_per_epoch
        give_rate(model, settings, self.args)
        if names := self._optimizer_names():
            made = [each for each, _ in configured_by_hand(model.configure_optimizers())]
            self._trainer.optimizers = [without_schedule(each) for each in made]
            self._steps.take(made, settings.clip_norm)
            return dict(zip(names, made, strict=True))
        own = configured(model.configure_optimizers()) if is_overridden("configure_optimizers", type(model)) else None
        if own is None or own.optimizer is None:
            return None
        self._trainer.optimizers = [own.optimizer]
        return without_schedule(own.optimizer) if own.schedulers else own.optimizer

    def schedule(self, optimizer: Any, recipe: Any) -> Any:
        """The module's own schedulers, or None."""
        model, trainer = self._model, self._trainer
        trainer.total_steps, trainer.steps_per_epoch = recipe.total_steps, recipe.steps_per_epoch
        if not is_overridden("configure_optimizers", type(model)):
            return None
        self._hooks.evaluate_every, self._hooks.schedule = recipe.evaluate_every_steps, None
        give_rate(model, recipe, self.args)
        if names := self._optimizer_names():
            return self._schedules_by_hand(optimizer, names, recipe)
        own = configured(model.configure_optimizers())
        if not own.schedulers or own.optimizer is None:
            return None
        trainer.lr_scheduler_configs = own.schedulers
        made = LightningSchedule(optimizer, own.optimizer, own.schedulers, recipe.steps_per_epoch)
        self._hooks.schedule = made
        return made

    def _schedules_by_hand(self, optimizers: Any, names: Sequence[str], recipe: Any) -> dict[str, Any] | None:
        found = configured_by_hand(self._model.configure_optimizers())
        everyone = {number: due.scheduler for _, dues in found for number, due in dues.items()}
        self._steps.schedulers = [everyone[number] for number in sorted(everyone)]
        return {
            name: ManualSchedule(
                self._steps, list(dues), optimizers[name], made, list(dues.values()), recipe.steps_per_epoch
            )
            for name, (made, dues) in zip(names, found, strict=True)
            if dues
        } or None

    def end_of_split(self) -> Mapping[str, Any]:
        """Values over all workers of the torchmetrics objects logged by the split. Collective."""
        found = computed(self._hooks.evaluated_metrics)
        self._hooks.evaluated_metrics.clear()
        return {name: (value, 1.0) for name, value in found.items()}

    def aside(self) -> Any:
        """Context that preserves the module's torchmetrics objects."""
        return left_alone(self._model)

    def predict(self, model: Any, batch: Any) -> Mapping[str, Any]:
        """Result of `predict_step`, or of the module's forward pass, by name."""
        _, _, batch = self._batch(model, batch)
        self._trainer.stage = "predicting"
        given = self._step(model, "predict_step", batch)
        return given if isinstance(given, Mapping) else {"prediction": given}

    def callbacks(self) -> list[Any]:
        """Callback that calls the hooks, newly created for each training."""
        self._hooks = LightningHooks(self._trainer)
        self._steps.begin()
        self._trainer.place, self._trainer.callback_metrics, self._trainer.should_stop = None, {}, False
        return [self._hooks]

    def brought_settings(self, config: RunConfig) -> Mapping[str, Brought]:
        """Settings that Lightning's callbacks become, by key of the config."""
        is_asked = is_overridden("configure_callbacks", self._class())
        return settings_of(self._callbacks_of(self._new_module()) if is_asked else self.parts.callbacks, config)

    def _callbacks_of(self, module: Any) -> list[Any]:
        return together(module.configure_callbacks(), self.parts.callbacks)

    def step_metrics(self) -> Mapping[str, Any]:
        """Values that the last step logged on this worker, for the record of that step."""
        return self._hooks.values_of_step

    def _class(self) -> type:
        module = self.parts.module
        return module if isinstance(module, type) else type(module)

    def _new_module(self) -> Any:
        """A new module with the stand-in as its trainer."""
        made_of = self.parts.module
        module = made_of(**self._args_of(made_of)) if isinstance(made_of, type) else copy.deepcopy(made_of)
        module.trainer = self._trainer
        if not module.automatic_optimization:
            self._check_manual()
            self._steps.attach(module)
        for part in module.modules():
            if lightning_base(type(part), "LightningModule") is not None:
                part.log = Log() if part is module else module.log
        return module

    def _args_of(self, made_of: Any) -> dict[str, Any]:
        """Arguments that a class or function accepts, by name or by `**`."""
        taken = arguments_of(made_of)
        named = {name: value for name, value in self.args.items() if name in taken}
        if any(p.kind is p.VAR_KEYWORD for p in taken.values()):
            everyone = {**arguments_of(self.parts.data), **arguments_of(self.parts.module)}
            named.update({name: value for name, value in self.args.items() if name not in everyone})
        return named

    def _collation_of(self, split: str) -> Any:
        """A loader's own collate_fn. A worker creates the loaders for it once, as under Lightning."""
        if self._collations is None:
            self._collations = {}
            for name, given in self._loaders(prepare=False).items():
                self._collations.update(loaders.collations(name, given))
        return self._collations[split]

    def _loaders(self, *, prepare: bool) -> dict[str, Any]:
        """Results of the loader hooks, by split."""
        data = self.parts.data
        if (
            data is not None
            and lightning_base(data if isinstance(data, type) else type(data), "LightningDataModule") is None
        ):
            given = data(**self._args_of(data))
            if not isinstance(given, Mapping) or TRAIN not in given:
                text = f"returned {type(given).__name__}: it must return a mapping with the split 'train'"
                raise DataError.problem(f"{data.__name__}()", text)
            return dict(given)
        source = self._new_module() if data is None else data(**self._args_of(data)) if isinstance(data, type) else data
        base = "LightningModule" if data is None else "LightningDataModule"
        source.trainer = self._trainer
        if prepare:
            source.prepare_data()
        source.setup("fit")
        found = {TRAIN: source.train_dataloader()}
        for split, (step, _) in STAGES.items():
            if is_overridden(f"{split}_dataloader", source, base) and is_overridden(step, self._class()):
                if split == loaders.TEST:
                    source.setup("test")
                found[split] = getattr(source, f"{split}_dataloader")()
        return found

    def _batch(self, model: Any, batch: Any) -> tuple[str, int, Any]:
        """Split, rows, and the batch as the module's loader would return it."""
        split, rows = batch["split"], batch["rows"]
        return split, rows, model.on_after_batch_transfer(batch["batch"], loaders.loader_number(split) or 0)

    def _with_batch_hooks(self, model: Any, kind: str, batch: Any, number: int | None) -> Any:
        """Result of an evaluation step, run between its batch hooks."""
        args = (batch, self._trainer.batch_idx, *([] if number is None else [number]))
        self._hooks.call(f"on_{kind}_batch_start", *args)
        given = self._step(model, f"{kind}_step", batch, number)
        self._hooks.call(f"on_{kind}_batch_end", given, *args)
        return given

    def _step(self, model: Any, name: str, batch: Any, loader: int | None = None) -> Any:
        """Call a step with the arguments of its signature."""
        step = getattr(model, name)
        asked = list(inspect.signature(step).parameters)
        args = [self._trainer.batch_idx] if len(asked) > 1 else []
        if len(asked) > 2 and loader is not None:
            args.append(loader)
        return step(batch, *args)

    def _sum_and_count(self, given: Any, batch: Any, rows: int) -> tuple[Any, Any]:
        loss = given.get("loss") if isinstance(given, Mapping) else given
        if not isinstance(loss, torch.Tensor):
            found = f"a dict without 'loss': {sorted(given)}" if isinstance(given, Mapping) else type(loss).__name__
            allowed = "it must return the loss, or a dict with 'loss', for every batch"
            raise WorkloadError("training_step()", found, allowed)
        count = self.parts.count(batch) if callable(self.parts.count) else rows
        return loss * count, count
