"""Handling of steps whose loss or gradient is not finite, according to `on_nonfinite`: raise, stop or skip."""

import math
from collections.abc import Callable

from scaleray.data import RowsOfStep
from scaleray.errors import NonFiniteLossError
from scaleray.records.run_record import StepRecord

RowInspector = Callable[[int], RowsOfStep | None]
"""Function that describes the rows of a step, given its number counted from 1; None if unknown."""
MAX_SKIPPED_IN_A_ROW = 10  # with `skip`: a run that only skips is not training any more


def stops_at(taken: StepRecord, policy: str, inspect: RowInspector) -> bool:
    """Whether the run stops normally after a step that was not finite. Raises NonFiniteLossError if the run fails."""
    if policy == "raise":
        rows = inspect(taken.step)
        advice = "Lower the learning rate, clip gradients (optimizer.clip_norm), or set on_nonfinite to skip or stop."
        if rows is not None and rows.bad is not None:
            advice = "Clean the data or fill the gaps; with on_nonfinite skip such steps are left out."
        raise NonFiniteLossError(f"{_what_was_nonfinite(taken)}{_in_rows(rows)}. {advice}")
    if policy == "stop":
        return True
    if taken.nonfinite_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise NonFiniteLossError(
            f"{taken.nonfinite_in_a_row} steps in a row up to step {taken.step} were not finite and skipped: "
            "the model is lost"
        )
    return False


def verdict_of(taken: StepRecord, inspect: RowInspector) -> str:
    """Reason why a run stopped after a non-finite step."""
    rows = inspect(taken.step)
    because = f": {rows.bad}" if rows is not None and rows.bad is not None else ""
    return f"stopped: {_what_was_nonfinite(taken)}{because}"


def _in_rows(rows: RowsOfStep | None) -> str:
    if rows is None:
        return ""
    if rows.bad is not None:
        return f": {rows.bad}"
    return ", and every number in the rows of that step is finite" if rows.is_whole else ""


def _what_was_nonfinite(taken: StepRecord) -> str:
    """Description of the value that was not finite, and where it occurred."""
    if not math.isfinite(taken.loss):
        return f"the loss became {taken.loss} at step {taken.step}"
    if taken.grad_norm is not None and not math.isfinite(taken.grad_norm):
        return f"the gradient norm became {taken.grad_norm} at step {taken.step}"
    # replicas that train apart learn of each other's losses only where they meet
    return f"the loss or gradient of a worker was not finite in {taken.nonfinite_steps} step(s) up to step {taken.step}"
