"""Losses of a workload: usually a single `loss()`, or `losses()` by name for several optimizers, or `batch_loss()` over
the whole batch."""

from collections.abc import Callable, Mapping
from typing import Any

from scaleray.config import RunConfig
from scaleray.config.strategy_traits import TRAITS, traits_of
from scaleray.errors import ConfigError, WorkloadError
from scaleray.workload import call_user_code, own_method


def losses_of(workload: Any) -> dict[str, Callable[[Any, Any], Any]] | None:
    """A workload's several losses by name; None for a single `loss`."""
    give = own_method(workload, "losses")
    if give is None:
        return None
    found = call_user_code(give, what="losses()", doing="naming the losses")
    if found is None:
        return None
    if not isinstance(found, Mapping) or not found or not all(callable(loss) for loss in found.values()):
        raise WorkloadError(
            "losses()", type(found).__name__, "it must return functions (model, batch) -> (sum, count) by name, or None"
        )
    return {str(name): loss for name, loss in found.items()}


def summed_loss(workload: Any, model: Any, batch: Any) -> Any:
    """Loss of a batch; for several losses their sum, with the count of the first."""
    losses = losses_of(workload)
    if losses is None:
        return workload.loss(model, batch)
    found = [loss(model, batch) for loss in losses.values()]
    return sum(total for total, _ in found), found[0][1]


def has_loss(workload: Any) -> bool:
    """Whether there is a loss to evaluate, which a workload with several losses may not have."""
    return bool(getattr(workload, "has_loss", True)) and own_method(workload, "loss") is not None


class OneLoss:
    """Workload reduced to one of its losses."""

    def __init__(self, workload: Any, loss: Callable[[Any, Any], Any]) -> None:
        self._workload, self.loss = workload, loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)


def has_batch_loss(workload: Any) -> bool:
    """Whether a workload computes its loss over the whole global batch."""
    return own_method(workload, "batch_loss") is not None


def check_batch_loss(workload: Any, config: RunConfig, strategy: str) -> None:
    """Raise ConfigError for settings that do not support a loss over the whole batch."""
    if not has_batch_loss(workload):
        return
    why = "the workload has a batch_loss(), over the outputs of all workers"
    if traits_of(strategy).trains_apart or strategy == "pipeline":
        reason = (
            "the stages of a pipeline run one micro-batch at a time"
            if strategy == "pipeline"
            else "its workers train separately"
        )
        able = [n for n, t in TRAITS.items() if not t.trains_apart and n not in ("pipeline", "single")]
        raise ConfigError("strategy.name", strategy, f"{why}, but {reason}", f"use {', '.join(able)}")
    if config.parallel.context not in (None, 1):
        raise ConfigError("parallel.context", config.parallel.context, f"{why}, and this splits rows", "leave it out")
    if config.noise_scale.measure is not False:
        reason = "the noise scale needs gradients of rows that do not depend on each other"
        hint = "leave noise_scale.measure out"
        raise ConfigError("noise_scale.measure", config.noise_scale.measure, f"{why}, and {reason}", hint)
