"""Methods of a LightningModule or LightningDataModule that scaleray runs, and methods that it refuses by name at the
start. Lightning is not imported: its classes are found among the base classes, under either package name."""

import inspect
from collections.abc import Mapping
from typing import Any

from scaleray.common.user_code import place_of as place_of
from scaleray.errors import WorkloadError

PACKAGES = ("lightning", "pytorch_lightning")
OWN_STEP = "scaleray performs the step itself, in the same way under every strategy"
REFUSED_OF_MODULE = {
    "backward": (OWN_STEP, "leave it out"),
    "optimizer_step": (OWN_STEP, "leave it out"),
    "optimizer_zero_grad": (OWN_STEP, "leave it out"),
    "lr_scheduler_step": (
        "schedulers are stepped as Lightning does by default",
        "return a scheduler with torch's interface from configure_optimizers",
    ),
    "configure_gradient_clipping": (
        "gradients are clipped by their norm over all workers",
        "omit it, and use --optimizer.clip-norm",
    ),
    "on_before_zero_grad": (OWN_STEP, "use on_train_batch_start or on_train_batch_end"),
    "on_before_backward": (OWN_STEP, "compute it in training_step"),
    "on_after_backward": (OWN_STEP, "gradient norms are in the record; use --optimizer.clip-norm to clip"),
    "on_before_optimizer_step": (OWN_STEP, "gradient norms are in the record; use --optimizer.clip-norm to clip"),
    "on_before_batch_transfer": ("scaleray moves batches to the device", "use on_after_batch_transfer"),
    "transfer_batch_to_device": ("scaleray moves batches to the device", "use on_after_batch_transfer"),
    "configure_sharded_model": ("Lightning has removed it", "use configure_model"),
    "on_save_checkpoint": ("checkpoints are scaleray's own", "keep state in buffers, which are saved"),
    "on_load_checkpoint": ("checkpoints are scaleray's own", "keep state in buffers, which are saved"),
}
"""Refused hooks, which would change a step or belong to Lightning's Trainer: reason and alternative."""
REFUSED_OF_DATA = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")


def lightning_base(cls: Any, name: str) -> type | None:
    """Lightning class of this name (`LightningModule`, ...) from which `cls` derives, or None."""
    parents = cls.__mro__ if isinstance(cls, type) else ()
    return next((p for p in parents if p.__name__ == name and p.__module__.partition(".")[0] in PACKAGES), None)


def is_overridden(name: str, made: Any, base: str = "LightningModule") -> bool:
    """Whether a class or an object overrides Lightning's method."""
    own = getattr(made, name, None)
    cls = made if isinstance(made, type) else type(made)
    return own is not None and getattr(own, "__func__", own) is not getattr(lightning_base(cls, base), name, None)


def check_module_class(cls: Any) -> None:
    """Raise WorkloadError for anything but a LightningModule, or for hooks that scaleray cannot run."""
    if lightning_base(cls, "LightningModule") is None:
        found = cls.__name__ if isinstance(cls, type) else type(cls).__name__
        raise WorkloadError("the module of as_workload()", found, "it must be a LightningModule or its class")
    if not is_overridden("training_step", cls):
        raise WorkloadError.problem(place_of(cls), "lacks training_step: it must return the loss of a batch")
    for name, (allowed, hint) in REFUSED_OF_MODULE.items():
        if is_overridden(name, cls):
            raise WorkloadError.problem(place_of(cls, name), f"defines its own {name}(): {allowed}", hint)
    if "dataloader_iter" in inspect.signature(cls.training_step).parameters:
        allowed = "scaleray gives it one batch at a time"
        raise WorkloadError.problem(
            place_of(cls, "training_step"), f"takes dataloader_iter: {allowed}", "take (batch, batch_idx)"
        )


def check_data_class(cls: type) -> None:
    """Raise WorkloadError for a LightningDataModule with hooks that scaleray cannot run."""
    for name in REFUSED_OF_DATA:
        if is_overridden(name, cls, "LightningDataModule"):
            allowed = "scaleray moves batches to the device"
            hint = "transform rows in the Dataset, or batches in the module's on_after_batch_transfer"
            raise WorkloadError.problem(place_of(cls, name), f"defines its own {name}(): {allowed}", hint)


def is_attached(module: Any) -> bool:
    """Whether a LightningModule has a stand-in for its trainer; copies of a module have none."""
    try:
        return module.trainer is not None
    except RuntimeError:
        return False


def arguments_of(made_of: Any) -> Mapping[str, inspect.Parameter]:
    """Names of a class's or function's arguments; empty for an object."""
    if not (isinstance(made_of, type) or inspect.isfunction(made_of)):
        return {}
    return {p.name: p for p in inspect.signature(made_of).parameters.values() if p.kind is not p.VAR_POSITIONAL}
