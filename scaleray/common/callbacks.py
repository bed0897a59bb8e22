"""Interface of a workload's callbacks: hooks that observe the training and log results.

`Workload.callbacks()` returns them; any class with some of these methods can be used. This module does not import
torch.
"""

from __future__ import annotations

from typing import Any

from scaleray.common.user_code import call_user_code
from scaleray.errors import WorkloadError

HOOKS = (
    "on_begin", "on_epoch_start", "on_step", "on_evaluation_start", "on_evaluation", "on_epoch_end", "on_checkpoint",
    "on_end",
)  # fmt: skip


class Callback:
    """Hooks of a training. Each worker has its own callbacks and calls them after the same steps, in the order of the
    list; what rank 0 logs is stored. `run` is a `scaleray.training.callbacks.RunContext`.

    A callback only observes: it must not change the model; gradients are off, and random generators are restored. An
    exception in a hook ends the run. `state_dict()` and `load_state_dict(state)`, if present, store its state in
    checkpoints, separately for every worker. A resume with another number of workers calls `load_states(states)` on
    each worker with the states of all former workers in order; without that method, each gets rank 0's state.
    """

    def on_begin(self, run: Any) -> None:
        """Called once the training is set up and, after an interruption, restored."""

    def on_epoch_start(self, run: Any) -> None:
        """Called before the first step of an epoch, whose number from 0 is `run.epoch`."""

    def on_step(self, run: Any) -> None:
        """Called after an optimizer step whose result is known. On a GPU the model may be some steps ahead."""

    def on_evaluation_start(self, run: Any) -> None:
        """Called before an evaluation."""

    def on_evaluation(self, run: Any) -> None:
        """Called after an evaluation, whose metrics are in `run.metrics`."""

    def on_epoch_end(self, run: Any) -> None:
        """Called after the last step of an epoch and the evaluation that follows it, when `run.epoch` epochs are
        complete. Not called for an incomplete last epoch."""

    def on_checkpoint(self, run: Any) -> None:
        """Called right before a checkpoint, which will include this callback's state."""

    def on_end(self, run: Any) -> None:
        """Called with the trained model after the last evaluation. Not called if the training failed."""


def callbacks_of(workload: Any) -> list[Any]:
    """Return the callbacks of a workload. Raises WorkloadError for invalid ones."""
    give = getattr(workload, "callbacks", None)
    if not callable(give):
        return []
    found = call_user_code(give, what="callbacks()", doing="creating the callbacks")
    if found is None:
        return []
    if not isinstance(found, (list, tuple)):
        raise WorkloadError("callbacks()", type(found).__name__, "it must return a list of callbacks")
    for each in found:
        if isinstance(each, type) or not any(callable(getattr(each, hook, None)) for hook in HOOKS):
            shown = each.__name__ if isinstance(each, type) else type(each).__name__
            raise WorkloadError("callbacks()", shown, f"a callback must have some of the methods {', '.join(HOOKS)}")
    return list(found)
