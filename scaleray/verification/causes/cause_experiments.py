"""Diagnosis by experiment: choose a part to remove from both runs, and find the class of cause if they then agree."""

from scaleray.records.certificate import Divergence
from scaleray.verification.causes.cause_classes import Cause, Finding, Layout, count_finding
from scaleray.verification.traces.run_trace import Trace

EVALUATION_MODE, NO_CLIPPING = "evaluation mode", "no clipping"
"""Names of the experiments, after the part that is removed from both runs."""


def needs_experiments(reference: Trace, other: Trace) -> list[str]:
    """Parts to remove from both runs, one at a time, to test whether the runs then agree."""
    # a strategy may draw random numbers of its own: what counts is whether the model does
    steps = any(s.draws_random_numbers or s.changes_buffers for s in reference.steps)
    found = [EVALUATION_MODE] if steps or other.quieted else []
    return found + ([NO_CLIPPING] if other.clip_norm is not None else [])


def from_experiment(name: str, reference: Trace, other: Trace) -> Finding:
    """Class of the cause if both runs agree once `name` (from `needs_experiments`) is removed."""
    if name == NO_CLIPPING:
        return Finding(
            Cause.CLIPPING, "without clipping, both runs agree: the run does not clip by the norm of the whole gradient"
        )
    changes = any(s.changes_buffers for s in (*reference.steps, *other.steps))
    draws = any(s.draws_random_numbers for s in (*reference.steps, *other.steps))
    if draws and not (changes and "dropout" not in other.quieted and "everything" not in other.quieted):
        return Finding(
            Cause.RANDOMNESS, "in evaluation mode, both runs agree, and the training step draws random numbers"
        )
    return Finding(
        Cause.BATCH_NORM,
        "in evaluation mode, both runs agree, and the training step changes buffers: statistics of a part of the batch",
    )


def without_experiment(reference: Trace, other: Trace, divergence: Divergence, layout: Layout) -> Finding:
    """Finding if neither experiments nor the decomposed gradient explain the divergence."""
    if divergence.quantity == "evaluation":
        return Finding(
            Cause.EVALUATION, f"all parameters agree, but {divergence.parameter} is not what one process measures"
        )
    if any(s.draws_random_numbers for s in reference.steps):
        return Finding(
            Cause.RANDOMNESS,
            "even in evaluation mode, the step draws random numbers, which differ from rank to rank; "
            "use nn.Dropout, or check module.training before drawing",
        )
    if any(s.draws_random_numbers for s in other.steps) and not layout.draws_by_itself:
        return Finding(
            Cause.RANDOMNESS,
            "even in evaluation mode, the step draws random numbers that it does not draw in one process",
        )
    steps = {s.step for s in reference.steps} & {s.step for s in other.steps}
    if divergence.step in steps:
        ours, theirs = reference.step(divergence.step), other.step(divergence.step)
        if ours.count != theirs.count:
            return count_finding(ours, theirs)
    if divergence.quantity in ("parameters", "state before"):
        why = "rows, loss, gradient, norm and learning rate agree, but the optimizer makes a different update from them"
        return Finding(Cause.UPDATE, why, divergence.parameter)
    if divergence.quantity in ("loss", "gradient") and divergence.step - 1 in other.evaluations:
        why = f"everything agrees up to the evaluation at step {divergence.step - 1}, which leaves a different state"
        return Finding(Cause.EVALUATION, why)
    return Finding(Cause.UNKNOWN, "none of the known classes fits")
