"""Metrics that are not a sum and a count: torchmetrics objects, whose state is gathered from all ranks.

Each evaluation starts from scratch. The state is gathered by the metric's own rules, so that a ranking such as AUROC
covers all rows together, however they are divided."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from scaleray.common.installed import install_command
from scaleray.common.metric_states import check_rules, share
from scaleray.errors import WorkloadError
from scaleray.training.setup.rank_context import RankContext
from scaleray.workload import call_user_code, own_method


class MetricObjects:
    """Metrics that a workload makes in `metric_objects()`, if any, for one split. names: keys of their arguments in the
    result of `metrics()`."""

    def __init__(self, workload: Any, place: RankContext, split: str) -> None:
        self.place, self.split = place, split
        give = own_method(workload, "metric_objects")
        found = call_user_code(give, what="metric_objects()", doing="making the metrics") if give else {}
        if found and place.mesh.context > 1:
            raise WorkloadError.problem(
                "metric_objects()",
                "needs whole rows, but under parallel.context a worker has only a part of each",
                "return sums and counts from metrics(), or use other degrees",
            )
        self._objects = {str(name): _checked(str(name), metric, place) for name, metric in dict(found or {}).items()}

    @property
    def names(self) -> set[str]:
        return set(self._objects)

    def reset(self) -> None:
        """Forget all rows."""
        for metric in self._objects.values():
            metric.reset()

    def update(self, name: str, given: Any, *, counts: bool) -> None:
        """Update a metric with its arguments from metrics(), by position or by name. counts: whether the rows count."""
        if not counts or self.place.rank != self.place.mesh.replica(self.place.data_rank)[0]:
            return  # a placeholder, or the same rows as another rank's
        metric, what = self._objects[name], f"metrics()[{name!r}]"
        if not isinstance(given, (tuple, list, Mapping)):
            allowed = f"{type(metric).__name__} takes arguments: a tuple, or a mapping by name"
            raise WorkloadError(what, type(given).__name__, allowed)
        by_name = given if isinstance(given, Mapping) else {}
        by_place = () if isinstance(given, Mapping) else given
        doing = f"being given to {type(metric).__name__}"
        call_user_code(lambda: metric.update(*by_place, **by_name), what=what, doing=doing)

    def values(self) -> dict[str, float]:
        """Value of each metric over all rows of all ranks. Collective."""
        return {name: self._value(name, metric) for name, metric in self._objects.items()}

    def _value(self, name: str, metric: Any) -> float:
        what = f"{self.split}/{name}"
        # torchmetrics gathers while it computes, and forgets what it gathered
        share(metric, self.place.gathered, lambda: self.place.world_size > 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that this rank has had no rows: others had some
            value = call_user_code(metric.compute, what=what, doing=f"computing {type(metric).__name__}")
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shown = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise WorkloadError(what, shown, "a metric's value must be one number", "average or split it")
        return float(value)


def _checked(name: str, metric: Any, place: RankContext) -> Any:
    what = f"metric_objects()[{name!r}]"
    try:
        from torchmetrics import Metric
    except ImportError as exc:
        raise WorkloadError.problem(
            "metric_objects()", "needs torchmetrics, which is not installed", install_command("metrics")
        ) from exc
    if not isinstance(metric, Metric):
        raise WorkloadError(what, type(metric).__name__, "it must be a torchmetrics.Metric", "return each under a name")
    inner = [type(part).__name__ for part in metric.modules() if part is not metric and isinstance(part, Metric)]
    if inner or not metric._reductions:
        allowed = f"its state is stored in other metrics ({', '.join(inner)})" if inner else "it has no state to gather"
        raise WorkloadError(what, type(metric).__name__, allowed, "return those metrics under their own names")
    check_rules(metric, what)
    return metric.to(place.device)
