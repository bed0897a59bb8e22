"""Values logged by a module: `self.log` and `self.log_dict` store them with their weights, by Lightning's rules.

A mean over an epoch is weighted by the rows of each batch (or the given `batch_size`), as in Lightning. It is stored as
a sum and a count, so the mean covers the rows of all workers, regardless of `sync_dist`."""

import numbers
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scaleray.common.metric_names import of_user_code
from scaleray.lightning.trainer_object import refused

SHORT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test",)}
"""Prefixes of logged names that only repeat the split."""
KNOWN_OF_A_STEP = ("loss", "learning_rate", "grad_norm", "epoch")


@dataclass(frozen=True)
class Logged:
    """One logged value. value: a tensor without gradient, or a torchmetrics object. weight: number of rows in the
    mean."""

    name: str
    value: Any
    weight: Any
    on_step: bool
    on_epoch: bool

    @property
    def is_metric(self) -> bool:
        """Whether the value is a torchmetrics object, which accumulates its own sums."""
        return not isinstance(self.value, torch.Tensor)


class Log:
    """Replaces a module's `log`: stores values logged during a step and ignores others."""

    def __init__(self) -> None:
        self._kept: dict[str, Logged] | None = None
        self._rows = 0
        self._step_by_default = False

    @contextmanager
    def keeping(self, rows: int, *, is_training: bool) -> Iterator[dict[str, Logged]]:
        """Context that stores logged values by name. rows: number of rows in the batch."""
        self._kept, self._rows, self._step_by_default = {}, rows, is_training
        try:
            yield self._kept
        finally:
            self._kept = None

    def __call__(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Store a value, like `LightningModule.log` with the same arguments."""
        if self._kept is None:
            return
        if reduce_fx not in ("mean", torch.mean) and isinstance(value, (torch.Tensor, numbers.Number)):
            found = getattr(reduce_fx, "__name__", reduce_fx)
            hint = "log the mean, or use a torchmetrics object (SumMetric, MaxMetric, MinMetric)"
            raise refused(f"reduce_fx={found} of self.log({name!r})", "values over workers are weighted means", hint)
        if isinstance(value, numbers.Number):
            value = torch.tensor(float(value))  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor):
            value = _one_number(name, value)
        elif not hasattr(value, "compute") or not hasattr(value, "update"):
            raise refused(
                f"self.log({name!r})", "it must be a number, a tensor of one element or a torchmetrics object"
            )
        self._kept[name] = Logged(
            name,
            value,
            self._rows if batch_size is None else batch_size,
            on_step=self._step_by_default if on_step is None else on_step,
            on_epoch=not self._step_by_default if on_epoch is None else on_epoch,
        )


def _one_number(name: str, value: torch.Tensor) -> torch.Tensor:
    if value.numel() != 1:
        shape = list(value.shape)
        raise refused(f"self.log({name!r}) of a tensor of shape {shape}", "it must be one number", "log its mean()")
    value = value.detach().reshape(())
    return value.clone() if value.is_floating_point() else value.float()


def short_names(names: Iterable[str], split: str) -> dict[str, str]:
    """Names under which a split's values are recorded, by the names under which they were logged.

    `val_loss` and `val/loss` of the split `val` become `loss`, recorded as `val/loss`. If several are logged, they keep
    their names."""
    words = SHORT_NAMES.get(split.partition("_")[0], ())
    found = {name: _without(name, words) for name in names}
    shorts = list(found.values())
    return {name: short if shorts.count(short) == 1 else name for name, short in found.items()}


def recorded_name(split: str, name: str) -> str:
    """Name in the record of a value that is logged once; the names of means over a training epoch are marked."""
    short = _without(name, SHORT_NAMES.get(split.partition("_")[0], ()))
    return f"{split}/{short.removesuffix('_epoch')}_epoch" if split == "train" else f"{split}/{short}"


def evaluated_name(name: str) -> str:
    """Name in the record of a value logged in a validation step, if no other value has its short name."""
    logged, _, number = name.partition("/dataloader_idx_")
    split = f"val_{number}" if number else "val"
    return recorded_name(split, logged)


def _without(name: str, words: Iterable[str]) -> str:
    for word in words:
        for mark in "/_.":
            if name.startswith(word + mark) and len(name) > len(word) + 1:
                return name[len(word) + 1 :]
    return name


def step_values(kept: Mapping[str, Logged]) -> dict[str, Any]:
    """Values that a training step logs per step, by name in the record, from this worker's last micro-batch. The loss
    over all rows is omitted, since scaleray has a more exact value.
    """
    shown = short_names(kept, "train")
    return {
        of_user_code(shown[name]): partial(float, logged.value)
        for name, logged in kept.items()
        if logged.on_step and not logged.is_metric and shown[name] not in KNOWN_OF_A_STEP
    }


def sums(kept: Mapping[str, Logged]) -> dict[str, tuple[Any, Any]]:
    """(sum, count) of each value that is averaged over an epoch."""
    return {
        name: (logged.value * logged.weight, logged.weight)
        for name, logged in kept.items()
        if logged.on_epoch and not logged.is_metric
    }
