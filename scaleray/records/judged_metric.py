"""Evaluation metric that measures a run's success: the one its config watches, or else the most informative."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

HIGHER = re.compile(
    r"(^|_|/)(acc\w*|f1|auroc|auc|average_precision|precision|recall|dice|iou|map|bleu|rouge\w*|r2|exact_match)(_|@|$)"
)
LOWER = re.compile(r"(^|_|/)(loss|error|perplexity|ppl|mse|mae|rmse|wer|cer|bits\w*|nll)(_|$)")
"""Metric names for which higher or lower is known to be better; nothing is assumed about others."""


@dataclass(frozen=True)
class JudgedMetric:
    """The metric that measures success. name: `split/metric`. better: whether higher or lower is; None if unknown."""

    name: str
    better: Literal["min", "max"] | None

    def best(self, values: Sequence[float]) -> float | None:
        """The best of these values; None if there are none, or if the better direction is unknown."""
        finite = [value for value in values if value == value]
        return None if self.better is None or not finite else max(finite) if self.better == "max" else min(finite)


def judged_metric(names: Iterable[str], config: Mapping[str, Any]) -> JudgedMetric | None:
    """Return the metric of `stop.watch`, `checkpoint.best` or `stop.at`, in this order; if none is set, the first
    metric of split `val` or of the first split, preferably not the loss. config: of a run, by section. None without an
    evaluation."""
    there = sorted(names)
    stop, checkpoint = config.get("stop") or {}, config.get("checkpoint") or {}
    for words in (stop.get("watch"), checkpoint.get("best"), stop.get("at")):
        name, _, rest = str(words or "").partition(" ")
        if name in there:
            return JudgedMetric(name, "max" if rest.startswith((">", "max")) else "min")
    first = min(
        there,
        key=lambda name: (not name.startswith("val/"), name.partition("/")[0], _is_loss(name), name),
        default=None,
    )
    return None if first is None else JudgedMetric(first, _better(first))


def _is_loss(name: str) -> bool:
    return name.rpartition("/")[2] == "loss"


def _better(name: str) -> Literal["min", "max"] | None:
    return "min" if LOWER.search(name.lower()) else "max" if HIGHER.search(name.lower()) else None
