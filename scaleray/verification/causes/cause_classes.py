"""Diagnosis of a divergence: find the class of its cause in the traces of both runs.

If several classes would look alike, the caller repeats both runs without one part and calls
`cause_experiments.from_experiment`, or `explanation.from_shares` if the gradient could be decomposed by worker and
micro-batch."""

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from scaleray.records.certificate import Divergence
from scaleray.verification.bounds import IDLE_GRADIENT, SAME_RATIO
from scaleray.verification.traces.compare_traces import gradient_differences, narrower, other_buffer, same_rows
from scaleray.verification.traces.run_trace import Layer, StepTrace, Trace

AVERAGE_OF = "average of "
"""Prefix of a parameter average's name among the buffers of a saved state."""
RESUMED = ("restored parameters", "restored state", "restored buffers", "resume")


class Cause(StrEnum):
    """Class of the cause of a mismatch."""

    MODEL = "another model"
    DTYPE = "dtype"
    INITIAL_PARAMETERS = "initial parameters"
    DATA_NOT_REPEATABLE = "data not repeatable"
    DATA_ORDER = "data order"
    LOSS_NORMALISATION = "loss normalisation"
    MISSING_SYNCHRONISATION = "missing gradient synchronisation"
    DOUBLE_SYNCHRONISATION = "double gradient synchronisation"
    ACCUMULATION = "gradient accumulation"
    RANDOMNESS = "dropout or random numbers"
    BATCH_NORM = "BatchNorm statistics"
    SCHEDULE = "schedule or learning-rate step count"
    CLIPPING = "clipping on a local norm"
    UPDATE = "optimizer's update"
    PARAMETERS = "missing parameter synchronisation"
    AVERAGING = "averaging of replicas"
    COMPRESSION = "gradient compression"
    EVALUATION = "evaluation"
    RESUME = "state after a resume"
    WEIGHTS = "final weights"
    CUT = "loss that depends on how a batch is cut"
    FAILED = "the run failed"
    UNKNOWN = "not recognised"


@dataclass(frozen=True)
class Finding:
    """Class of the cause, with an explanation. parameter: the first affected one, if known better than before."""

    cause: Cause
    why: str
    parameter: str | None = None


@dataclass(frozen=True)
class Layout:
    """How the other run is distributed over workers and micro-batches."""

    world_size: int
    accumulation: int
    is_right_without_accumulation: bool = False
    """Whether the same strategy agrees on the same number of workers without accumulation."""
    draws_by_itself: bool = False
    """Whether the strategy itself draws random numbers, so that draws do not indicate randomness in the model."""


def from_traces(reference: Trace, other: Trace, divergence: Divergence, layout: Layout) -> Finding | None:
    """Class of the cause if the traces alone are conclusive, else None."""
    if divergence.step == 0 or divergence.quantity == "steps":
        return _before_training(reference, other, divergence)
    if divergence.quantity in RESUMED:
        return _restored(divergence)
    if divergence.quantity == "averaging":
        return _averaging(divergence)
    if divergence.quantity == "final weights":
        return _final_weights(divergence)
    if divergence.quantity == "final values" and divergence.parameter not in reference.names:
        return Finding(Cause.BATCH_NORM, "all parameters agree, but not the buffers that the forward pass changes")
    ours, theirs = (trace.step(divergence.step) for trace in (reference, other))
    if divergence.quantity in ("parameters before", "replicas before"):
        return _between_steps(other, divergence, theirs)
    if divergence.quantity in ("state before", "buffers before") and divergence.step - 1 in other.evaluations:
        return _between_steps(other, divergence, theirs)
    if divergence.quantity in ("buffers before", "buffers"):
        why = f"all parameters agree, and {divergence.parameter} is not what the forward passes should make of it"
        return _narrow_state(reference, other, divergence) or Finding(Cause.BATCH_NORM, why, divergence.parameter)
    if divergence.quantity == "layers":
        return _layers(ours, theirs, str(divergence.parameter))
    if divergence.quantity == "inputs" and theirs.rows_agree:
        return _inputs(ours, theirs)
    if not theirs.rows_agree:
        return Finding(Cause.DATA_ORDER, "workers of one replica read different rows")
    if not same_rows(ours.rows, theirs.rows, in_order=divergence.quantity == "rows"):
        return _rows(ours, theirs)
    if divergence.quantity == "learning rate":
        return _updates(other, ours, theirs)
    if divergence.quantity == "evaluation":
        return _evaluated(reference, other, divergence)  # most causes only an experiment can tell
    return (
        _narrow_numbers(reference, other, divergence, ours, theirs)
        or _ranks_disagree(other, divergence, theirs, layout)
        or _loss(ours, theirs, divergence, layout)
        or _clipping(other, theirs)
        or _updates_disagree(other, divergence, theirs, layout)
        or _uniform_ratio(ours, theirs, divergence, layout)
    )


def from_repetition(reference: Trace, again: Trace) -> Finding | None:
    """Class of the cause if even the reference reads other values when run again, so that orders are incomparable."""
    for ours, theirs in zip(reference.steps, again.steps, strict=False):
        if not same_rows(ours.rows, theirs.rows, in_order=True):
            return Finding(
                Cause.DATA_NOT_REPEATABLE,
                f"one process reads other values in step {ours.step} when it runs again: "
                "rows change when they are read again, regardless of their order",
            )
    return None


def _before_training(reference: Trace, other: Trace, divergence: Divergence) -> Finding:
    name = divergence.parameter
    if divergence.quantity == "dtype":
        position = reference.names.index(str(name))
        return Finding(Cause.DTYPE, f"{name} is {other.dtypes[position]} instead of {reference.dtypes[position]}", name)
    if divergence.quantity == "initial parameters":
        return Finding(
            Cause.INITIAL_PARAMETERS, f"{name} starts from different values, {divergence.difference:.2g} apart", name
        )
    if divergence.quantity == "steps":
        return Finding(Cause.SCHEDULE, f"{len(other.steps)} steps instead of {len(reference.steps)}")
    return Finding(Cause.MODEL, f"the models do not have the same parameters: {name}", name)


def _restored(divergence: Divergence) -> Finding:
    name = divergence.parameter
    what = "the state" if name is None else f"the optimizer's {name.rpartition(': ')[2]} of {name.rpartition(': ')[0]}"
    kinds = {"restored parameters": "parameter", "restored buffers": "buffer"}
    what = f"the {kinds[divergence.quantity]} {name}" if divergence.quantity in kinds else what
    what = f"the {name}" if str(name).startswith(AVERAGE_OF) else what
    missing = "is missing" if math.isinf(divergence.difference) else "is not what was saved"
    return Finding(Cause.RESUME, f"after a resume on another number of workers {what} {missing}")


def _averaging(divergence: Divergence) -> Finding:
    if divergence.parameter is None:
        return Finding(Cause.AVERAGING, "after an averaging, the replicas hold different optimizer states")
    why = f"after the step, {divergence.parameter} is not what the strategy should make of the replicas' earlier values"
    return Finding(Cause.AVERAGING, why)


def _final_weights(divergence: Divergence) -> Finding:
    name, _, tensor = str(divergence.parameter).partition(": ")
    missing = "lack" if math.isinf(divergence.difference) else "have another"
    return Finding(Cause.WEIGHTS, f"the {name} that the run exports at its end {missing} {tensor}", tensor)


def _between_steps(other: Trace, divergence: Divergence, theirs: StepTrace) -> Finding:
    """Finding for parameters that agree after a step but not at the beginning of the next step."""
    name, before = divergence.parameter, divergence.step - 1
    assert theirs.begins_spread is not None
    apart = bool((theirs.begins_spread > SAME_RATIO).any())
    how = "the ranks hold different values of" if apart else "the values differ from those in one process of"
    if before in other.evaluations:
        cause = Cause.BATCH_NORM if divergence.quantity == "buffers before" else Cause.EVALUATION
        return Finding(cause, f"after the evaluation at step {before} {how} {name}", name)
    if divergence.quantity == "replicas before":
        why = f"between step {before} and the next, {name} of the replicas has changed"
        return Finding(Cause.AVERAGING, why, name)
    why = f"between step {before} and the next, as by a callback, {how} {name}"
    return Finding(Cause.PARAMETERS if apart else Cause.UPDATE, why, name)


def _layers(ours: StepTrace, theirs: StepTrace, name: str) -> Finding:
    """Finding for a layer whose mode or rate differs from one process."""
    due, found = ours.layers[name], theirs.layers[name]
    is_norm = due is not None and any(setting == "eps" for setting, _ in due[1])
    how = "is not the same on all ranks" if found is None else f"has {_of_layer(found)} instead of {_of_layer(due)}"
    why = f"in the training step {name or 'the model'} {how}"
    return Finding(Cause.BATCH_NORM if is_norm else Cause.RANDOMNESS, why)


def _of_layer(layer: Layer | None) -> str:
    assert layer is not None
    is_training, settings = layer
    return ", ".join([f"training={is_training}", *(f"{name}={value:g}" for name, value in settings)])


def _inputs(ours: StepTrace, theirs: StepTrace) -> Finding:
    if (name := narrower(ours, theirs)) is not None:
        return Finding(Cause.DTYPE, f"{name} was rounded to {theirs.formats[name]} before the loss received it")
    return Finding(Cause.DATA_ORDER, "the right rows were read, but the loss received different ones")


def _evaluated(reference: Trace, other: Trace, divergence: Divergence) -> Finding | None:
    """Finding for an evaluation in training mode or with wrong statistics, as the next step shows."""
    name, number = divergence.parameter, divergence.step + 1
    both = [step for trace in (reference, other) for step in trace.steps if step.step == number]
    if len(both) < 2:
        return None
    ours, theirs = both
    if theirs.evaluates_in_training and not ours.evaluates_in_training:
        return Finding(Cause.EVALUATION, f"{name} was measured in training mode")
    if (buffer := other_buffer(ours, theirs)) is not None:
        return Finding(Cause.BATCH_NORM, f"{name} was measured with a different {buffer} than in one process", buffer)
    return None


def _rows(ours: StepTrace, theirs: StepTrace) -> Finding:
    expected, found = (np.unique(step.rows, return_counts=True) for step in (ours, theirs))
    missing = len(np.setdiff1d(expected[0], found[0]))
    strange = len(np.setdiff1d(found[0], expected[0]))
    twice = int((found[1] > 1).sum()) - int((expected[1] > 1).sum())
    if not missing and not strange and len(ours.rows) == len(theirs.rows) and twice <= 0:
        return Finding(Cause.DATA_ORDER, "the step has the same rows in another order")
    words = [f"{missing} of {len(expected[0])} rows are missing"]
    words += [f"{strange} belong to other steps"] if strange else []
    words += [f"{twice} appear twice"] if twice > 0 else []
    return Finding(Cause.DATA_ORDER, "in this step " + ", ".join(words))


def _updates(other: Trace, ours: StepTrace, theirs: StepTrace) -> Finding:
    if len(ours.updates) != len(theirs.updates):
        return Finding(
            Cause.SCHEDULE, f"the optimizer made {len(theirs.updates)} updates instead of {len(ours.updates)}"
        )
    found, expected = (step.updates[0][0] if step.updates and step.updates[0] else math.nan for step in (theirs, ours))
    if found == expected and other.base_rates and theirs.due_factor is not None:  # one process makes the same mistake
        expected = other.base_rates[0] * theirs.due_factor
    return Finding(Cause.SCHEDULE, f"the learning rate is {found:.6g} instead of {expected:.6g}")


def _narrow_numbers(
    reference: Trace, other: Trace, divergence: Divergence, ours: StepTrace, theirs: StepTrace
) -> Finding | None:
    # a rank without the last stage of a pipeline knows of no loss
    if "" not in (other.loss_dtype, reference.loss_dtype) and other.loss_dtype != reference.loss_dtype:
        return Finding(Cause.DTYPE, f"the loss is {other.loss_dtype} instead of {reference.loss_dtype}")
    for position, name in enumerate(reference.names):
        expected, found = ours.gradient_formats[position], theirs.gradient_formats[position]
        # a gradient that is nothing but rounding has few digits by nature
        is_idle = ours.gradients[position, 0] <= IDLE_GRADIENT * ours.grad_norm
        if found and not expected and not is_idle:
            why = f"every value of the gradient of {name} fits into {found}, so it was rounded to {found}"
            return Finding(Cause.DTYPE, why, name)
        # both sides compute in fewer digits, so that an honest reordering of sums is larger than the bound
        if found and not is_idle and name == divergence.parameter and divergence.difference < 1e-2:
            return Finding(Cause.DTYPE, f"in both runs the gradient of {name} was rounded to {found}", name)
    return _narrow_state(reference, other, divergence) or _narrow_loss(reference, divergence)


def _narrow_state(reference: Trace, other: Trace, divergence: Divergence) -> Finding | None:
    """Finding for a state with fewer digits at the beginning of this step or the next one."""
    for ours, theirs in zip(reference.steps, other.steps, strict=False):
        if divergence.step <= ours.step <= divergence.step + 1 and (kept := narrower(ours, theirs)) is not None:
            why = f"every value of {kept} fits into {theirs.formats[kept]}, so it was rounded"
            return Finding(Cause.DTYPE, why)
    return None


def _narrow_loss(reference: Trace, divergence: Divergence) -> Finding | None:
    is_double = "float64" in reference.dtypes and reference.loss_dtype not in ("", "float64")
    if is_double and divergence.difference < 1e-2:
        return Finding(
            Cause.DTYPE, f"the parameters are float64, but the model computes its loss in {reference.loss_dtype}"
        )
    return None


def _ranks_disagree(other: Trace, divergence: Divergence, theirs: StepTrace, layout: Layout) -> Finding | None:
    apart = np.flatnonzero(~(theirs.gradient_spread <= SAME_RATIO))
    if layout.world_size == 1 or not len(apart):
        return None
    names = [other.names[i] for i in apart]
    which = "any parameter" if len(names) == len(other.names) else f"{len(names)} of {len(other.names)} parameters"
    return Finding(
        Cause.MISSING_SYNCHRONISATION,
        f"after synchronisation, the ranks do not hold the same gradient of {which} "
        f"({names[0]}: {theirs.gradient_spread[apart[0]]:.2g} apart)",
        names[0],
    )


def _loss(ours: StepTrace, theirs: StepTrace, divergence: Divergence, layout: Layout) -> Finding | None:
    if ours.count != theirs.count:
        ratio = theirs.count / ours.count
        if ratio < 1 and not any(is_near(ratio, 1 / size) for size in _sizes(layout)):
            return None  # a part is missing: the gradient tells which
        return count_finding(ours, theirs)
    if divergence.quantity != "loss" or ours.loss == 0:
        return None
    ratio = theirs.loss / ours.loss
    for size, what in _sizes(layout).items():
        if size > 1 and (is_near(ratio, size) or is_near(ratio, 1 / size)):
            times = f"{size} times" if ratio > 1 else f"1/{size} of"
            return Finding(Cause.LOSS_NORMALISATION, f"the loss is {times} that of one process: it depends on {what}")
    if not (gradient_differences(ours, theirs) > SAME_RATIO).any():
        return Finding(
            Cause.LOSS_NORMALISATION, "the gradients agree, but the reported loss is not the mean over all workers"
        )
    return None


def _sizes(layout: Layout) -> dict[int, str]:
    sizes = {layout.world_size: "the number of workers", layout.accumulation: "the accumulation steps"}
    return {**sizes, layout.world_size * layout.accumulation: "the number of micro-batches in all workers"}


def count_finding(ours: StepTrace, theirs: StepTrace) -> Finding:
    """Finding for a step whose loss was divided by a wrong count."""
    return Finding(
        Cause.LOSS_NORMALISATION,
        f"the loss was divided by a count of {theirs.count:g} instead of {ours.count:g} for the same rows",
    )


def _clipping(other: Trace, theirs: StepTrace) -> Finding | None:
    if other.clip_norm is None:
        return None
    # replicas that train apart have a gradient each, and only rank 0's is here
    norms = (theirs.used_norm,) if theirs.replicas is not None else (theirs.used_norm, *theirs.used_norms)
    for norm in norms:
        if norm is not None and not is_near(norm, theirs.grad_norm):
            return Finding(
                Cause.CLIPPING,
                f"it clipped by a norm of {norm:.6g}, but the norm of the whole gradient is {theirs.grad_norm:.6g}",
            )
    return None


def _updates_disagree(other: Trace, divergence: Divergence, theirs: StepTrace, layout: Layout) -> Finding | None:
    """Finding for ranks that all have the right gradient and norm but different parameters after the update."""
    if divergence.quantity != "parameters" or layout.world_size == 1:
        return None
    apart = np.flatnonzero(~(theirs.parameter_spread <= SAME_RATIO))
    if not len(apart):
        return _update_lost(other, theirs, str(divergence.parameter))
    first = other.names[apart[0]]
    return Finding(
        Cause.PARAMETERS,
        f"all ranks had the same gradient, but after the step they hold different values of {len(apart)} of "
        f"{len(other.names)} parameters ({first}: {theirs.parameter_spread[apart[0]]:.2g} apart)",
        first,
    )


def _update_lost(other: Trace, theirs: StepTrace, name: str) -> Finding | None:
    """Finding for a parameter that one rank's optimizer updates, but that is unchanged on all ranks."""
    position = other.names.index(name)
    if name not in other.owned or theirs.begins is None:
        return None
    if not np.array_equal(theirs.begins[position], theirs.parameters[position]):
        return None
    why = f"one rank's optimizer updates {name}, but after the step all ranks hold its old value"
    return Finding(Cause.PARAMETERS, why, name)


def _uniform_ratio(ours: StepTrace, theirs: StepTrace, divergence: Divergence, layout: Layout) -> Finding | None:
    if divergence.quantity != "gradient":
        return None
    a, b = ours.gradients[:, 1:].ravel(), theirs.gradients[:, 1:].ravel()
    if not np.isfinite(b).all() or not a.any():
        return None
    ratio = float(a @ b / (a @ a))
    if np.linalg.norm(b - ratio * a) > SAME_RATIO * np.linalg.norm(b) or ratio <= 0 or is_near(ratio, 1.0):
        return None
    return ratio_finding(ratio, layout)


def ratio_finding(ratio: float, layout: Layout) -> Finding:
    """Finding for a gradient that is `ratio` times the right one in all parameters, although the loss is right."""
    world, accumulation = layout.world_size, layout.accumulation
    times = f"the gradient is {ratio:.6g} times that of one process in every parameter"
    if abs(ratio) < SAME_RATIO:
        return Finding(Cause.MISSING_SYNCHRONISATION, f"{times}: it is missing")
    by_accumulation = is_near(ratio, accumulation) or is_near(ratio, 1 / accumulation)
    if by_accumulation and (world != accumulation or layout.is_right_without_accumulation):
        return Finding(Cause.LOSS_NORMALISATION, f"{times}: the {accumulation} accumulation steps are weighted wrongly")
    if world > 1 and is_near(ratio, world):
        return Finding(
            Cause.DOUBLE_SYNCHRONISATION,
            f"{times}: it was summed over the {world} workers and not divided, or summed twice",
        )
    if world > 1 and is_near(ratio, 1 / world):
        return Finding(Cause.DOUBLE_SYNCHRONISATION, f"{times}: it was divided by the {world} workers twice")
    return Finding(Cause.LOSS_NORMALISATION, f"{times}")


def is_near(value: float, target: float) -> bool:
    """Whether two ratios are equal up to `SAME_RATIO`."""
    return abs(value - target) <= SAME_RATIO * abs(target)
