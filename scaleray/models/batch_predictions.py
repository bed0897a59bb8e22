"""Predictions of a model for a batch: the workload's own `predict`, or the model's output in the loss.

Without a `predict`, the loss, which defines the model's inputs, is run until the model has returned. Columns that only
the rest of the loss needs, such as labels, may therefore be missing."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from scaleray.data.source_interface import Columns, rows_in
from scaleray.errors import WorkloadError
from scaleray.workload import Workload, call_user_code, user_traceback

ADD_PREDICT = "add predict(self, model, batch) to the workload; it returns {name: tensor with one element per row}"
ONLY = "output"
"""Name of an unnamed output of a model."""


class Answers:
    """Function from rows, arrays by column, to predictions, arrays by name. as_batch: makes the workload's batch of
    rows."""

    def __init__(
        self,
        workload: Any,
        model: nn.Module,
        as_batch: Callable[[Columns], Any],
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self.workload, self.model, self.as_batch, self.autocast = workload, model, as_batch, autocast
        self._own = own_predict(workload)
        self._has_looked = False

    def __call__(self, rows: Columns) -> dict[str, Any]:
        """Raises WorkloadError."""
        batch = self.as_batch(rows)
        num_rows = rows_in(rows) if rows else 0
        with torch.no_grad(), self.autocast():
            if (own := self._own) is not None:
                given = call_user_code(lambda: own(self.model, batch), what="predict()", doing="predicting a batch")
                if given is not None:
                    return by_name(given, num_rows, what="predict()", is_own=True)
            given = returned_to_loss(self.workload, self.model, batch, to_the_end=not self._has_looked)
            self._has_looked = True
        return by_name(given, num_rows, what="the model", is_own=False)


def own_predict(workload: Any) -> Callable[[nn.Module, Any], Any] | None:
    """The workload's `predict`, unless it is the base class's default."""
    method = getattr(workload, "predict", None)
    if not callable(method) or getattr(method, "__func__", None) is Workload.predict:
        return None
    return method


class _Returned(BaseException):
    """Ends a loss as soon as the model has returned. The user's `except Exception` does not catch it."""


def returned_to_loss(workload: Any, model: nn.Module, batch: Any, *, to_the_end: bool = False) -> Any:
    """Output of the model when the loss calls it for this batch. to_the_end: let the loss continue, as far as the
    available columns allow, to check that it calls the model only once. Raises WorkloadError unless the loss calls the
    whole model exactly once."""
    seen: list[Any] = []

    def look(module: nn.Module, given: Any, output: Any) -> None:
        seen.append(output)
        if not to_the_end:
            raise _Returned

    handle = model.register_forward_hook(look)
    try:
        with contextlib.suppress(_Returned):
            workload.loss(model, batch)
    except Exception as exc:
        if not seen:
            raise WorkloadError.problem(
                "the workload",
                "lacks predict(): its loss() fails on these columns before it calls the model",
                f"{ADD_PREDICT}\n  {user_traceback(exc)}",
            ) from exc
    finally:
        handle.remove()
    if len(seen) != 1:
        calls = f"calls the model {len(seen)} times" if seen else "calls a part or a method of the model"
        raise WorkloadError.problem("the workload", f"lacks predict(): its loss() {calls}", ADD_PREDICT)
    return seen[0]


def by_name(given: Any, num_rows: int, *, what: str, is_own: bool) -> dict[str, Any]:
    """Arrays by name with an element for each row. is_own: whether it comes from the workload's `predict`, whose values
    must all be such arrays. Other values in a model's output are omitted."""
    found = dict(_named(given))
    columns = {name: _as_array(value) for name, value in found.items()}
    good = {name: value for name, value in columns.items() if value is not None and len(value) == num_rows}
    if good and (not is_own or len(good) == len(found)):
        return good
    wrong = next((name for name in found if name not in good), None)
    shown = type(given).__name__ if wrong is None else f"{wrong}: {_shape(found[wrong])}"
    raise WorkloadError(
        f"the result of {what}",
        shown,
        f"it must be {{name: tensor}} with one element for each of the {num_rows} rows of the batch",
        "" if is_own else ADD_PREDICT,
    )


def _named(given: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(given, Mapping):
        for name, value in given.items():
            yield str(name), value
    elif isinstance(given, (tuple, list)) and not all(isinstance(value, str) for value in given):
        for number, value in enumerate(given):
            yield f"{ONLY}_{number}", value
    elif isinstance(given, (torch.Tensor, np.ndarray, list)):
        yield ONLY, given


def _as_array(value: Any) -> Any:
    """A value as an array or a list of texts; None if it has no rows."""
    if isinstance(value, torch.Tensor):
        wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        return wide.detach().cpu().numpy() if value.dim() else None
    if isinstance(value, np.ndarray):
        return value if value.ndim else None
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return None


def _shape(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"shape {list(value.shape)}"
    return f"{len(value)} of {type(value).__name__}" if isinstance(value, (list, tuple)) else type(value).__name__
