"""What a run does about steps whose loss or gradient is not finite: `on_nonfinite` raise, stop or skip."""

from __future__ import annotations

import math

from scaleray.errors import NonFiniteLossError
from scaleray.training.observer import StepResult

MAX_SKIPPED_IN_A_ROW = 10  # with `skip`: a run that only skips is not training any more


def stops_at(step: int, result: StepResult, policy: str) -> bool:
    """Whether the run ends in good order after a step that was not finite. Raises NonFiniteLossError where it fails."""
    if policy == "raise":
        raise NonFiniteLossError(
            f"{what_was_nonfinite(step, result)}. "
            "Lower the learning rate, clip gradients (optimizer.clip_norm), or set on_nonfinite to skip or stop."
        )
    if policy == "stop":
        return True
    if result.nonfinite_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        raise NonFiniteLossError(
            f"{result.nonfinite_in_a_row} steps in a row up to step {step} were not finite and skipped: "
            "the model is lost"
        )
    return False


def what_was_nonfinite(step: int, result: StepResult) -> str:
    """What was not finite, and where."""
    if not math.isfinite(result.loss):
        return f"the loss became {result.loss} at step {step}"
    if result.grad_norm is not None and not math.isfinite(result.grad_norm):
        return f"the gradient norm became {result.grad_norm} at step {step}"
    # replicas that train apart learn of each other's losses only where they meet
    return f"the loss or gradient of a worker was not finite in {result.nonfinite_steps} step(s) up to step {step}"
