"""Phases of a worker, as named in heartbeats, errors, profiles and verdicts."""

from collections.abc import Callable
from enum import StrEnum


class Phase(StrEnum):
    """Activity of a worker, or part of a step's time."""

    START = "start"
    """Set-up, until the first step."""
    MODEL = "model"
    """Building the model and distributing it over the workers."""
    COMPILING = "compiling"
    """Running torch.compile's compiler. A profile counts this time for the phase that compiled."""
    END = "end"
    """After its last step."""

    INPUT = "input"
    """Waiting for its rows."""
    COPY = "copy_to_device"
    """Converting rows to tensors on the device."""
    FORWARD = "forward"
    """A forward pass, up to the loss."""
    BACKWARD = "backward"
    """A backward pass; with concurrent collectives it may include waiting for other ranks."""
    COMMUNICATION = "exposed_communication"
    """Waiting for a collective, without the time in which the rank computes. If the ranks' arrivals are known, a
    profile counts only the transfer here, otherwise also the wait for the slowest rank.
    """
    STRAGGLER = "waiting_for_slowest"
    """Idle in a collective that another rank has not reached yet. Derived from arrivals; no worker enters this phase.
    """
    OPTIMIZER = "optimizer"
    """Inspection of gradients, clipping and the update."""
    HOST = "host"
    """The host's own work around passes and update: the loop, hooks, launching, waiting for room on the device."""
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    OTHER = "other"
    """All other activity: records, observers, callbacks."""


Enter = Callable[[Phase], Phase]
"""Function that enters a phase and returns the previous one."""

PARTS = (
    Phase.INPUT,
    Phase.COPY,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.COMMUNICATION,
    Phase.STRAGGLER,
    Phase.OPTIMIZER,
    Phase.HOST,
    Phase.EVALUATION,
    Phase.CHECKPOINT,
    Phase.OTHER,
)
"""Parts of a step in a profile, in display order. Their sum is the step."""

OWN_BUSINESS = (Phase.INPUT, Phase.COMPILING)
"""Phases in which a worker does not wait for other workers."""
MAY_WAIT = (Phase.BACKWARD, Phase.COMMUNICATION, Phase.HOST, Phase.OTHER)
"""Phases in which a worker may wait for other workers, directly or through its device."""
TIMED = (Phase.COPY, Phase.FORWARD, Phase.OPTIMIZER, Phase.EVALUATION)
"""Phases without a time limit of their own; input and collectives have one."""

EVALUATING = "evaluating"
IN_WORDS = {
    Phase.START: "preparing the first step",
    Phase.MODEL: "building the model",
    Phase.INPUT: "waiting for input",
    Phase.COMPILING: "compiling the model",
    Phase.EVALUATION: EVALUATING,
    Phase.CHECKPOINT: "saving a checkpoint",
    Phase.END: "saving the final weights",
}
"""Descriptions of phases that may take long, for users; other phases are described by their step."""
PART_IN_WORDS = {
    Phase.INPUT: "input",
    Phase.COPY: "copy to device",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.COMMUNICATION: "exposed communication",
    Phase.STRAGGLER: "waiting for the slowest rank",
    Phase.OPTIMIZER: "optimizer",
    Phase.HOST: "host, launching",
    Phase.EVALUATION: "evaluation",
    Phase.CHECKPOINT: "checkpoint",
    Phase.OTHER: "other",
}
"""Names of the parts of a step, for users."""


def to_text(phase: str, step: int) -> str:
    """Description of the activity of a worker that has completed `step` steps."""
    if phase == Phase.INPUT and step == 0:
        return "reading the first batch"
    return IN_WORDS.get(Phase(phase), f"step {step + 1}") if phase in set(Phase) else phase
