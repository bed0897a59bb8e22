"""Interface of a callback, which a workload may bring: hooks that look at the training, and log what it makes.

`Workload.callbacks()` returns them; any class with some of these methods works. Nothing here imports torch.
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
    """Hooks of a training. Each worker has its own callbacks, and calls them after the same steps in the order of the
    list; rank 0's logs are kept. `run` is a `scaleray.training.callbacks.RunContext`.

    A callback observes: what it draws from random generators is put back, gradients are off, and it must not change the
    model. An exception in a hook ends the run. `state_dict()` and `load_state_dict(state)`, if it has them, keep its
    state in checkpoints, on every worker its own. A resume on another number of workers calls `load_states(states)`
    with the states of all workers in their order, on each worker with the same; without that method each gets rank 0's.
    """

    def on_begin(self, run: Any) -> None:
        """Look at the training once it is set up and, after an interruption, restored."""

    def on_epoch_start(self, run: Any) -> None:
        """Look at the training before the first step of an epoch, whose number from 0 is `run.epoch`."""

    def on_step(self, run: Any) -> None:
        """Look at an optimizer step whose result is known. On a GPU the model may be some steps further."""

    def on_evaluation_start(self, run: Any) -> None:
        """Look at the training before an evaluation."""

    def on_evaluation(self, run: Any) -> None:
        """Look at an evaluation, whose metrics are in `run.metrics`."""

    def on_epoch_end(self, run: Any) -> None:
        """Look at the training after the last step of an epoch and the evaluation that follows it; `run.epoch` epochs
        are complete. Not called for an epoch that the end of the training cuts short."""

    def on_checkpoint(self, run: Any) -> None:
        """Look at the training right before a checkpoint is taken of it, and of this callback's state."""

    def on_end(self, run: Any) -> None:
        """Look at the trained model, after the last evaluation. Not called where the training failed."""


def callbacks_of(workload: Any) -> list[Any]:
    """The callbacks that a workload brings. Raises WorkloadError for what is none."""
    give = getattr(workload, "callbacks", None)
    if not callable(give):
        return []
    found = call_user_code(give, what="callbacks()", doing="making the callbacks")
    if found is None:
        return []
    if not isinstance(found, (list, tuple)):
        raise WorkloadError("callbacks()", type(found).__name__, "it must return a list of callbacks")
    for each in found:
        if isinstance(each, type) or not any(callable(getattr(each, hook, None)) for hook in HOOKS):
            shown = each.__name__ if isinstance(each, type) else type(each).__name__
            raise WorkloadError(
                "callbacks()", shown, f"a callback is an object with some of the methods {', '.join(HOOKS)}"
            )
    return list(found)
