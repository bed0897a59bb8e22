"""Interface of a user's workload: a model, the data, and a loss that is a sum and a count.

A workload is a class with three methods and a few optional ones; `scaleray.Workload` is a base class that
documents them, and any class with the same methods works. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from scaleray.common.idle_warnings import leave_out_idle_warnings
from scaleray.common.progress import stage
from scaleray.common.user_code import call_user_code as call_user_code
from scaleray.common.user_code import exit_error as exit_error
from scaleray.common.user_code import no_exit as no_exit
from scaleray.common.user_code import user_frames as user_frames
from scaleray.common.user_code import user_modules as user_modules
from scaleray.common.user_code import user_traceback as user_traceback
from scaleray.errors import WorkloadError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle

Batch = Mapping[str, "torch.Tensor"]
"""One micro-batch on the device: tensors by column name, rows along dimension 0."""

SumAndCount = tuple["torch.Tensor", "torch.Tensor | int | float"]
"""Value summed over rows (or tokens), and the number of rows (or tokens) in the sum."""

Outputs = Mapping[str, "torch.Tensor"]
"""Outputs needed by a loss over the whole batch: tensors by name, each with one row for each row of the batch."""

NEEDED = (("build_model",), ("datasets",), ("loss", "losses", "batch_loss"))
"""Required methods of a workload: at least one of each group."""
BARE = {
    "LightningModule": "name the result of scaleray.lightning.as_workload(Module, DataModule), a line in the same file",
    "PreTrainedModel": "use a workload of scaleray.hugging_face, such as scaleray.hugging_face:CausalLanguageModel, "
    "with the model's folder as workload.args.model",
    "Module": "return the model from build_model() of a scaleray.Workload, next to its datasets() and loss()",
}
"""How to make a workload from a class of another library, by the name of that library's base class."""


class Workload:
    """Base class of workloads; a class with the same methods works too.
    Keyword arguments of `__init__` come from the config."""

    depends_on_micro_batch = False
    """Whether `loss` may depend on the rows that share a micro-batch, as a load-balancing loss of experts does. If a
    loss depends on them without this flag, it is refused at the first batch; a loss over the whole batch is a
    `batch_loss`."""

    def build_model(self) -> nn.Module:
        """Build a new model on the default device. Called once per worker, after the run's seed has been set."""
        raise NotImplementedError

    def datasets(self) -> Mapping[str, Any]:
        """Data by split. `train` is required; every other split (`val`, `test`, ...) is evaluated.

        A value is a dict of arrays with rows along dimension 0, a source of `scaleray.data`
        (`ParquetSource`, `TokenSource`, `TarSource`), a torch Dataset or IterableDataset, or a Ray Dataset."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Batch) -> SumAndCount:
        """Loss summed over the micro-batch, and the number of samples (or tokens) summed over.

        Return the sum, not the mean: the gradient is the sum over all micro-batches and workers divided by the
        total count, which stays exact with accumulation, padding and uneven shares."""
        raise NotImplementedError

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Tensors of a micro-batch for `batch_loss`, each with one row for each row of the micro-batch. Optional."""
        raise NotImplementedError

    def batch_loss(self, outputs: Outputs) -> SumAndCount:
        """Loss over the whole global batch in place of `loss`, for one that depends on several rows at once: in-batch
        negatives, a contrastive or Dice loss. Optional.

        outputs: those of all rows of all workers and micro-batches, in the order of the batch; every worker computes
        the loss of them. Return the sum over rows with their number, or (mean, 1). Evaluations take it over
        `batch.global_size` rows at a time."""
        raise NotImplementedError

    def preprocessor(self) -> Any:
        """A preprocessor of Ray Data, or an object with `fit(columns)` and `transform(columns)`. Optional.

        It is fitted once on the train split, applied to all splits as they are read, before `transform`, and saved with
        the run for `scaleray predict`. Columns may still contain text before it is applied."""
        return None

    def transform(self, rows: dict[str, Any], rng: Any) -> Mapping[str, Any]:
        """The rows of a block, changed for training: columns of as many rows, under any names. Optional.

        rows: the columns of a block, arrays with the rows along dimension 0 (or `scaleray.data.Ragged`). rng: a
        `scaleray.data.RowRandom`, which draws for each row from that row's own seed. An optional third parameter,
        `split`, is the name of the split. Runs where rows are read, in the worker or in Ray tasks."""
        return rows

    def collate(self, rows: Any) -> Any:
        """Make a micro-batch of tensors, in any structure, from its rows: a list of dicts of tensors. Optional.

        Rows may differ in length; `rows.columns` has their values by column. `collate = scaleray.data.Padding(...)` can
        replace the method. Without it, the columns themselves are the batch."""
        return rows.columns

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, SumAndCount]:
        """Evaluation metrics as sums and counts, for example {"accuracy": (num_right, num_rows)}. Optional.

        Include `loss` if it is available: evaluation then saves the forward pass of `loss()`."""
        return {}

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Any] | None:
        """Predictions of the model for a batch, for `scaleray predict`: tensors by name with an element for each row,
        for example {"label": logits.argmax(1)}; lists of texts are allowed too. Optional.

        The batch may lack labels. If the result is None, the model's output in `loss` is used."""
        return None

    def read_data(self, path: str) -> Any:
        """Rows of other data at a local path, in the form of a split of `datasets()`, for `--data` of `scaleray
        predict` and `scaleray evaluate`. Labels may be missing. Optional. If the result is None, the path is read as
        files of tables."""
        return None

    def optimizer(
        self, model: nn.Module, settings: Any
    ) -> torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None:
        """The workload's own optimizer, or None for the configured one. `settings` holds the derived learning rate.

        May return several optimizers by name if they share no parameters, or if `losses()` returns a loss for each."""
        return None

    def losses(self) -> Mapping[str, Callable[[nn.Module, Batch], SumAndCount]] | None:
        """Several losses instead of `loss`, by the name of their optimizer. Optional.

        A step runs them in this order on the same rows: forward, backward, clipping and update of one, then of the
        next, so that each sees the weights that the previous one has updated. A loss changes only the parameters of its
        own optimizer. If `loss` is also defined, it is only evaluated."""
        return None

    def schedule(self, optimizer: torch.optim.Optimizer, recipe: Any) -> torch.optim.lr_scheduler.LRScheduler | None:
        """The workload's own learning-rate schedule, stepped once per optimizer step; None for the configured one.

        recipe: derived values, such as `total_steps`, `steps_per_epoch`, `warmup_steps`, `schedule_steps` and
        `learning_rate`; the optimizer already has its rates. Called again on copies of the optimizer that train
        nothing. With several optimizers it receives them by name and returns schedules by name."""
        return None

    def end_of_split(self) -> Mapping[str, tuple[float, float]]:
        """Metrics of the split that was just evaluated, as sums and counts, for values that `metrics()` accumulates
        itself, such as the state of a torchmetrics object. Optional."""
        return {}

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which `metrics()` measures a row that does not count, so it must not change accumulated values.
        Optional."""
        return contextlib.nullcontext()

    def step_metrics(self) -> Mapping[str, Any]:
        """Measurements of the last step, by name (`train/...`): numbers, or functions that return one. Those of rank 0
        are recorded. Optional."""
        return {}

    def metric_objects(self) -> Mapping[str, Any]:
        """Metrics that are not a sum and a count, such as AUROC, as torchmetrics objects by name. Optional.

        `metrics` then returns the arguments of their `update` under these names."""
        return {}

    def evaluate(
        self, model: nn.Module, batches: Iterable[Batch], *, split: str, rank: int, world_size: int
    ) -> Mapping[str, SumAndCount]:
        """Measurements that take more than a forward pass, such as generation, as sums and counts over this worker's
        `batches` of a split. They are summed over workers. Optional, in addition to `metrics`."""
        return {}

    def callbacks(self) -> Iterable[Any]:
        """Callbacks that observe the training and log images, text, tables and figures: see `scaleray.Callback`.
        Optional."""
        return []

    def blocks(self, model: nn.Module) -> Iterable[nn.Module] | None:
        """Repeated blocks of the model, for sharding, checkpointing and pipelines. Optional."""
        return None

    def weight_names(self, model: nn.Module, config: Mapping[str, Any]) -> Mapping[str, str] | None:
        """Name of each tensor of the model's state dict in a folder of weights in Hugging Face's layout. Optional.

        config: the folder's config.json; raise WorkloadError if it describes another model. If the result is None, the
        names are the model's own."""
        return None

    def export(self, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Write a new folder from which another library can read the trained model, for `scaleray export RUN --out
        FOLDER`. Optional.

        weights: by the names of the model's state dict, on the CPU, with any adapters merged."""
        raise NotImplementedError

    def tensor_plan(
        self, model: nn.Module, *, size: int, sequence_parallel: bool
    ) -> Mapping[str, ParallelStyle] | None:
        """Plan of how each layer is split over `size` workers, for `strategy.name: tensor`. Optional.
        None means that the model cannot be split.

        The plan holds a style of `torch.distributed.tensor.parallel` by module name (`blocks.*.attention.query` for all
        blocks). The model must return what the loss needs whole, as plain tensors equal on all workers. With
        `sequence_parallel`, activations between the layers should be split along the sequence, and every module with
        parameters must be named; otherwise, omitted modules compute the same on all workers. Raise ConfigError for a
        size that does not fit."""
        return None


def load_workload(
    name: str,
    args: Mapping[str, Any],
    *,
    base_dir: Path | None = None,
    imported: Callable[[str], ModuleType] | None = None,
) -> Any:
    """Import `package.module:Name` or `path/to/file.py:Name` and build it with `args`.

    A relative path is looked up from the current directory, then from `base_dir` (the folder of the config file).
    imported: function that imports the part before the colon, in place of Python's import and these folders. Raises
    WorkloadError with the user's own part of the traceback."""
    target, _, attribute = name.partition(":")
    if not target or not attribute:
        raise WorkloadError(
            "workload.name",
            name,
            "it must be package.module:Name or path/to/file.py:Name",
            "for example: jobs/digits.py:Digits",
        )
    leave_out_idle_warnings()
    with stage(f"importing {target}"):
        if imported is not None:
            module = call_user_code(lambda: imported(target), what=f"workload module {target}", doing="being imported")
        else:
            module = _import_file(target, base_dir) if target.endswith(".py") else _import_module(target)
    if not hasattr(module, attribute):
        classes = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
        raise WorkloadError(
            "workload.name", name, f"{target} has no {attribute!r}", f"it defines: {', '.join(classes) or 'no class'}"
        )
    return build_workload(getattr(module, attribute), args, name=name)


def name_of(workload: Any) -> str:
    """Name by which `load_workload` finds a class or the class of an object. It is the run's `workload.name` if the
    workload was passed in Python. A class from a notebook cell can only be passed again."""
    kind = workload if isinstance(workload, type) else type(workload)
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_importable = kind.__module__ != "__main__" or path is None or not str(path).endswith(".py")
    return f"{kind.__module__ if is_importable else Path(path).resolve()}:{kind.__qualname__}"  # type: ignore[arg-type]


def make_workload(given: Any, name: str, args: Mapping[str, Any], *, base_dir: Path | None = None) -> Any:
    """The given object, or the given class built with `args`, or, for None, the workload of that name."""
    if given is None:
        return load_workload(name, args, base_dir=base_dir)
    return build_workload(given, args, name=given.__name__) if isinstance(given, type) else with_loss(given)


def build_workload(factory: Any, args: Mapping[str, Any], *, name: str) -> Any:
    """Call the workload class with the config's keyword arguments, and check that it has the required methods."""
    missing = [names for names in NEEDED if not any(callable(getattr(factory, method, None)) for method in names)]
    if missing:
        text = f"lacks {_listed(missing)}: it needs the methods {_listed(NEEDED)}"
        bases = (base.__name__ for base in (factory if isinstance(factory, type) else type(factory)).__mro__)
        hint = next((BARE[base] for base in bases if base in BARE), "see 'Bring your own workload' in the README")
        raise WorkloadError.problem(f"workload {name}", text, hint)
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as exc:
        raise WorkloadError(
            "workload.args",
            dict(args),
            f"{name} does not accept them: {exc}",
            f"its signature is {getattr(factory, '__name__', name)}{inspect.signature(factory)}",
        ) from exc
    return with_loss(call_user_code(lambda: factory(**args), what=f"workload {name}", doing="being built"))


_outputs_taken = contextvars.ContextVar[Callable[[Outputs], SumAndCount] | None]("outputs_taken", default=None)


@contextlib.contextmanager
def outputs_go_to(take: Callable[[Outputs], SumAndCount]) -> Iterator[None]:
    """Context in which `take(outputs)` replaces the loss of a workload with `batch_loss`."""
    token = _outputs_taken.set(take)
    try:
        yield
    finally:
        _outputs_taken.reset(token)


def with_loss(workload: Any) -> Any:
    """Return the workload. If it has `batch_loss`, it gets a `loss`: the batch loss of its outputs, as if they were the
    whole batch, or the function set by `outputs_go_to`. Raises WorkloadError for methods that contradict each other."""
    if own_method(workload, "batch_loss") is None or isinstance(getattr(workload, "loss", None), partial):
        return workload
    for name in ("loss", "losses"):
        if own_method(workload, name) is not None:
            raise WorkloadError.problem("batch_loss()", f"and {name}() have the same purpose", f"leave {name}() out")
    if own_method(workload, "outputs") is None:
        hint = "outputs(model, batch) returns a micro-batch's tensors by name"
        raise WorkloadError.problem("batch_loss()", "needs outputs()", hint)
    workload.loss = partial(_loss_of_outputs, workload)
    return workload


def _loss_of_outputs(workload: Any, model: nn.Module, batch: Batch) -> SumAndCount:
    outputs = workload.outputs(model, batch)
    _check_outputs(outputs)
    return (_outputs_taken.get() or workload.batch_loss)(outputs)


def _check_outputs(outputs: Any) -> None:
    found = type(outputs).__name__
    if isinstance(outputs, Mapping) and all(hasattr(value, "shape") for value in outputs.values()):
        sizes = {tuple(value.shape[:1]) for value in outputs.values()}
        if len(sizes) == 1 and () not in sizes:
            return
        found = ", ".join(f"{name} {list(value.shape)}" for name, value in outputs.items()) or "empty"
    raise WorkloadError(
        "outputs()",
        found,
        "it must return tensors by name, each with one row for each row of the batch",
        "return a number for all rows, such as a temperature, with expand(rows)",
    )


def _listed(methods: Iterable[Iterable[str]]) -> str:
    return ", ".join(" or ".join(names) for names in methods)


def built_model(workload: Any, *, doing: str = "building the model") -> Any:
    """The model from `build_model()`, without a wrapper of torch.compile or DataParallel, which would rename its
    parameters. A model compiled in place by `model.compile()` stays compiled."""
    model = call_user_code(workload.build_model, what="build_model()", doing=doing)
    while True:
        eval_frame, torch = sys.modules.get("torch._dynamo.eval_frame"), sys.modules.get("torch")
        if eval_frame is not None and isinstance(model, eval_frame.OptimizedModule):
            inner = model._orig_mod
            inner._compiled_call_impl = model.dynamo_ctx(inner._call_impl)
            model = inner
        elif torch is not None and isinstance(model, torch.nn.DataParallel):
            model = model.module
        else:
            return model


def own_method(workload: Any, name: str) -> Any:
    """The workload's method of that name; None if it has none, or only that of the base class."""
    method, base = getattr(workload, name, None), getattr(Workload, name, None)
    is_inherited = base is not None and getattr(method, "__func__", None) is base
    return method if callable(method) and not is_inherited else None


def brings_optimizer(workload: Any) -> bool:
    """Whether the workload may have its own optimizer; its method may still return None."""
    return own_method(workload, "optimizer") is not None


def brings_schedule(workload: Any) -> bool:
    """Whether the workload may have its own schedule; its method may still return None."""
    return own_method(workload, "schedule") is not None


def _import_file(target: str, base_dir: Path | None) -> ModuleType:
    candidates = [Path(target)] if base_dir is None or Path(target).is_absolute() else [Path(target), base_dir / target]
    path = next((p.resolve() for p in candidates if p.is_file()), None)
    if path is None:
        raise WorkloadError(
            "workload file",
            target,
            "it does not exist",
            "looked in: " + ", ".join(str(p.parent.resolve()) for p in candidates),
        )
    module_name = path.stem
    loaded = sys.modules.get(module_name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if loaded is not None:  # a file called json.py must not replace the library of that name
        module_name = f"scaleray_workload_{path.stem}"
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that the file can import its neighbours

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
        return module

    return call_user_code(load, what=f"workload file {target}", doing="being imported")


def _import_module(target: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a console script does not look in the current directory
    return call_user_code(
        lambda: importlib.import_module(target), what=f"workload module {target}", doing="being imported"
    )
