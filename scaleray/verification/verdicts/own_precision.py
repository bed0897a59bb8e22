"""Check that a run in its own precision is as exact as its numbers allow.

Every step starts from the same parameters, so differences arise within a step and do not grow. The measure is the
distance of one process in this precision from one in float64. Another order of the same sums may differ by a few times
that distance, or by one rounding for each summed part. A gradient sent in fewer digits differs by far more, or has
visibly fewer digits."""

from dataclasses import dataclass

import numpy as np

from scaleray.records.certificate import Divergence
from scaleray.verification.bounds import IDLE_GRADIENT, PRECISION_TIMES
from scaleray.verification.traces.compare_traces import gradient_differences, narrower, signature_differences
from scaleray.verification.traces.run_trace import StepTrace, Trace

Trio = tuple[StepTrace, StepTrace, StepTrace]
"""The same step of one process in float64, of one process in the run's precision, and of the run."""


@dataclass(frozen=True)
class Rounding:
    """Allowed difference of a gradient. epsilon: machine epsilon of the type in which gradients are summed; num_parts:
    number of summed parts.

    compares_gradients: false if each replica has its own gradients, or they are approximated. is_narrow: whether
    gradients are sent in fewer digits because the config says so."""

    epsilon: float
    num_parts: int
    compares_gradients: bool = True
    is_narrow: bool = False


@dataclass(frozen=True)
class Excess:
    """Difference beyond rounding. allowed: largest difference that rounding would explain."""

    divergence: Divergence
    allowed: float
    format: str = ""
    """Number format that all values fit, if that shows the cause."""


def excess(exact: Trace, reference: Trace, other: Trace, rounding: Rounding) -> Excess | None:
    """First difference from one process that rounding does not explain; None if there is none.

    exact: one process in float64; reference: one in the run's precision; other: the run. Every step of all three starts
    from the same parameters.
    """
    if reference.names != other.names:
        return None
    trios = list(zip(exact.steps, reference.steps, other.steps, strict=False))
    # steps with an overflow are left out: with loss scaling such a step is skipped
    trios = [t for t in trios if all(np.isfinite(step.grad_norm) and np.isfinite(step.loss) for step in t)]
    if not trios:
        return None
    floor = rounding.epsilon * (1 + rounding.num_parts)
    return (
        _parameters(reference, other, trios, floor)
        or _kept(trios)
        or (_formats(reference, other, trios) if rounding.compares_gradients and not rounding.is_narrow else None)
        or (_gradients(reference, trios, floor) if rounding.compares_gradients else None)
        or _losses(trios, floor)
    )


def _parameters(reference: Trace, other: Trace, trios: list[Trio], floor: float) -> Excess | None:
    for _, ours, theirs in trios:
        apart = np.maximum(signature_differences(ours.parameters, theirs.parameters), theirs.parameter_spread)
        above = np.flatnonzero(~(apart <= floor))
        if len(above):
            first = int(above[0])
            formats = (reference.parameter_formats, other.parameter_formats)
            is_rounded = all(formats) and formats[1][first] and not formats[0][first]
            divergence = Divergence(theirs.step, "parameters", float(apart[first]), reference.names[first])
            return Excess(divergence, floor, formats[1][first] if is_rounded else "")
    return None


def _kept(trios: list[Trio]) -> Excess | None:
    _, ours, theirs = trios[-1]
    name = narrower(ours, theirs)
    if name is None:
        return None
    return Excess(Divergence(theirs.step, "kept state", 0.0, name), 0.0, theirs.formats[name])


def _formats(reference: Trace, other: Trace, trios: list[Trio]) -> Excess | None:
    for position, name in enumerate(reference.names):
        used = [t for t in trios if t[2].gradients[position, 0] > IDLE_GRADIENT * t[2].grad_norm]
        narrow = [theirs.gradient_formats[position] for _, _, theirs in used]
        if used and all(narrow) and not any(ours.gradient_formats[position] for _, ours, _ in used):
            apart = gradient_differences(used[0][1], used[0][2])[position]
            return Excess(Divergence(used[0][2].step, "gradient", float(apart), name), 0.0, narrow[0])
    return None


def _gradients(reference: Trace, trios: list[Trio], floor: float) -> Excess | None:
    rounded = np.median([gradient_differences(best, ours) for best, ours, _ in trios], axis=0)
    apart = np.median([gradient_differences(ours, theirs) for _, ours, theirs in trios], axis=0)
    # one parameter may happen to be rounded little, and the gradient of all is not rounded less than its largest parts
    allowed = PRECISION_TIMES * np.maximum(np.maximum(rounded, np.median(rounded)), floor)
    above = np.flatnonzero(~(apart <= allowed))
    if not len(above):
        return None
    first = int(above[0])
    step = next(t[2].step for t in trios if not gradient_differences(t[1], t[2])[first] <= allowed[first])
    return Excess(Divergence(step, "gradient", float(apart[first]), reference.names[first]), float(allowed[first]))


def _losses(trios: list[Trio], floor: float) -> Excess | None:
    def median(one: int, other: int) -> float:
        return float(np.median([abs(t[one].loss - t[other].loss) / (abs(t[one].loss) or 1.0) for t in trios]))

    allowed = PRECISION_TIMES * max(median(0, 1), floor)
    if (apart := median(1, 2)) <= allowed:
        return None
    return Excess(Divergence(trios[0][2].step, "loss", apart), allowed)
