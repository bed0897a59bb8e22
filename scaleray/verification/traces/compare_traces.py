"""Compare two runs by their traces, step by step: where and by how much they differ.

Used by verification.variants for a strategy against one process, and for other pairs of runs. With a bound of 0 they
must agree to the bit."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from scaleray.records.certificate import Comparison, Divergence
from scaleray.verification.bounds import BOUND, IDLE_GRADIENT, SMALL_GRADIENT
from scaleray.verification.traces.run_trace import Restored, StepTrace, Trace

WIDTHS = ("bf16", "fp16", "fp32", "")
"""Number formats by increasing number of digits; the last one means float64."""


def compare(reference: Trace, other: Trace, *, bound: float = BOUND) -> Comparison:
    """Compare a run with the one that it should equal. bound: relative difference; 0 requires identical bits and the
    same order of rows."""
    divergence = next(divergences(reference, other, bound), None)
    if reference.names != other.names or not reference.steps or not other.steps:
        return Comparison(divergence=divergence)
    pairs = list(zip(reference.steps, other.steps, strict=False))
    loss_floor, norm_floor = _floor([r.loss for r, _ in pairs]), _floor([r.grad_norm for r, _ in pairs])
    final = final_differences(reference, other)
    if not final:  # too large to keep: the signatures of the last step stand for it
        last = parameter_differences(reference, other, len(pairs) - 1)
        final = dict(zip(reference.names, last.tolist(), strict=True))
    return Comparison(
        loss=max(_relative(r.loss, o.loss, loss_floor) for r, o in pairs),
        grad_norm=max(_relative(r.grad_norm, o.grad_norm, norm_floor) for r, o in pairs),
        parameters=max(final.values(), default=0.0),
        divergence=divergence,
    )


def largest_difference(reference: Trace, other: Trace) -> float:
    """Largest relative difference over all steps and all quantities that rounding affects."""
    found = [compare(reference, other, bound=math.inf).largest]
    for number, (ours, theirs) in enumerate(zip(reference.steps, other.steps, strict=False)):
        found += gradient_differences(ours, theirs).tolist()
        found += parameter_differences(reference, other, number).tolist()
        found += [evaluated.difference for evaluated in _evaluations(reference, other, ours.step, 0.0)]
        found += [
            begun.difference for begun in _begin_apart(reference, ours, theirs, 0.0) if math.isfinite(begun.difference)
        ]
    return max(found)


def divergences(reference: Trace, other: Trace, bound: float) -> Iterator[Divergence]:
    """Yield all differences, causes before effects."""
    if reference.names != other.names:
        pairs = zip((*reference.names, ""), (*other.names, ""), strict=False)
        yield Divergence(0, "model", math.inf, next((a or b for a, b in pairs if a != b), None))
        return
    for name, expected, found in zip(reference.names, reference.dtypes, other.dtypes, strict=True):
        if expected != found:
            yield Divergence(0, "dtype", math.inf, name)
    yield from _first_above(
        reference.names, signature_differences(reference.initial, other.initial), bound, 0, "initial parameters"
    )
    loss_floor = _floor([s.loss for s in reference.steps])
    norm_floor = _floor([s.grad_norm for s in reference.steps])
    for number, (ours, theirs) in enumerate(zip(reference.steps, other.steps, strict=False)):
        if other.restored is not None and other.restored.step == ours.step - 1:
            yield from restored_differences(reference.saved, other.restored, reference.names, bound)
        yield from _begin_apart(reference, ours, theirs, bound)
        if not theirs.rows_agree or not same_rows(ours.rows, theirs.rows, in_order=bound == 0):
            yield Divergence(ours.step, "rows", math.inf)
        if not theirs.inputs_agree or _lacks_inputs(ours, theirs):
            yield Divergence(ours.step, "inputs", math.inf)
        if (layer := _other_layer(ours, theirs)) is not None:
            yield Divergence(ours.step, "layers", math.inf, layer)
        if ours.count != theirs.count:
            yield Divergence(ours.step, "count", _relative(ours.count, theirs.count))
        if (loss := _relative(ours.loss, theirs.loss, loss_floor)) > bound:
            yield Divergence(ours.step, "loss", loss)
        apart = _otherwise_apart(ours.gradient_spread, theirs.gradient_spread)
        gradients = np.maximum(gradient_differences(ours, theirs), apart)
        yield from _first_above(reference.names, gradients, bound, ours.step, "gradient")
        if (norm := _relative(ours.grad_norm, theirs.grad_norm, norm_floor)) > bound:
            yield Divergence(ours.step, "gradient", norm)
        if (rate := max(_update_difference(ours.updates, theirs.updates), _from_due(other, theirs))) > 1e-12:
            yield Divergence(ours.step, "learning rate", rate)
        apart = _otherwise_apart(ours.parameter_spread, theirs.parameter_spread)
        parameters = np.maximum(parameter_differences(reference, other, number), apart)
        yield from _first_above(reference.names, parameters, bound, ours.step, "parameters")
        yield from _evaluations(reference, other, ours.step, bound)
    last = len(reference.steps)
    if last != len(other.steps):
        yield Divergence(1 + min(last, len(other.steps)), "steps", math.inf)
    final = final_differences(reference, other)
    yield from _first_above(tuple(final), np.array(list(final.values())), bound, last, "final values")
    yield from _by_name(reference.exported, other.exported, bound, last, "final weights")


def restored_differences(
    saved: Restored | None, restored: Restored, names: tuple[str, ...], bound: float
) -> Iterator[Divergence]:
    """Yield the differences between a restored state and the saved one, as divergences of the step after the
    checkpoint."""
    if saved is None:
        return
    norms = saved.parameters[:, 0]
    # a parameter without a gradient but rounding differs by rounding alone
    scale = np.maximum(norms, SMALL_GRADIENT * float(np.linalg.norm(norms)))
    apart = signature_differences(saved.parameters, restored.parameters, scale)
    yield from _first_above(names, apart, bound, saved.step + 1, "restored parameters")
    yield from _by_name(saved.state, restored.state, bound, saved.step + 1, "restored state")
    yield from _by_name(saved.buffers, restored.buffers, bound, saved.step + 1, "restored buffers")


def _by_name(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], bound: float, step: int, quantity: str
) -> Iterator[Divergence]:
    """Yield the first recorded tensor that differs. The scale for a small tensor is the largest one of its kind, which
    is the last part of a name such as `0.weight: exp_avg`."""
    kinds = {name: name.rpartition(": ")[2] if quantity.endswith(("state", "state before")) else "" for name in ours}
    largest: dict[str, float] = {}
    for name, value in ours.items():
        largest[kinds[name]] = max(largest.get(kinds[name], 0.0), float(value[0]))
    for name, value in ours.items():
        found = theirs.get(name)
        scale = np.array([max(float(value[0]), SMALL_GRADIENT**2 * largest[kinds[name]])])
        difference = math.inf if found is None else float(signature_differences(value[None], found[None], scale)[0])
        if not difference <= bound:
            yield Divergence(step, quantity, difference, name)
            return


def _begin_apart(reference: Trace, ours: StepTrace, theirs: StepTrace, bound: float) -> Iterator[Divergence]:
    """Yield differences in parameters at the beginning of a step, which callbacks or evaluations cause."""
    if ours.begins is None or theirs.begins is None or ours.begins_spread is None or theirs.begins_spread is None:
        return
    scale = np.where(_is_idle(reference), np.linalg.norm(ours.begins[:, 0]), ours.begins[:, 0])
    apart = np.maximum(
        signature_differences(ours.begins, theirs.begins, scale),
        _otherwise_apart(ours.begins_spread, theirs.begins_spread),
    )
    yield from _first_above(reference.names, apart, bound, ours.step, "parameters before")
    yield from _by_name(ours.state_begins, theirs.state_begins, bound, ours.step, "state before")
    yield from _by_name(ours.buffers_begin, theirs.buffers_begin, bound, ours.step, "buffers before")


def other_buffer(ours: StepTrace, theirs: StepTrace) -> str | None:
    """Name of the first buffer that differs at the beginning of a step."""
    found = _by_name(ours.buffers_begin, theirs.buffers_begin, BOUND, ours.step, "buffers before")
    return next((divergence.parameter for divergence in found), None)


def narrower(ours: StepTrace, theirs: StepTrace) -> str | None:
    """Name of the first value that has fewer digits than in one process at the beginning of a step."""
    shared = theirs.formats.keys() & ours.formats.keys()
    return next((n for n in ours.formats if n in shared and _is_narrower(ours.formats[n], theirs.formats[n])), None)


def _is_narrower(ours: str, theirs: str) -> bool:
    return WIDTHS.index(theirs) < WIDTHS.index(ours)


def _lacks_inputs(ours: StepTrace, theirs: StepTrace) -> bool:
    """Whether the loss lacked rows; additional rows may be placeholders and do not count."""
    if ours.inputs is None or theirs.inputs is None:
        return False
    return len(np.setdiff1d(ours.inputs, theirs.inputs)) > 0


def _other_layer(ours: StepTrace, theirs: StepTrace) -> str | None:
    return next((n for n, layer in ours.layers.items() if theirs.layers.get(n, layer) != layer), None)


def _evaluations(reference: Trace, other: Trace, step: int, bound: float) -> Iterator[Divergence]:
    ours, theirs = reference.evaluations.get(step, {}), other.evaluations.get(step, {})
    for name in dict.fromkeys((*ours, *theirs)):
        apart = _relative(ours[name], theirs[name], 1e-3) if name in ours and name in theirs else math.inf
        if not apart <= bound:
            yield Divergence(step, "evaluation", apart, name)
            return


def _from_due(trace: Trace, step: StepTrace) -> float:
    """Relative difference between the learning rates and those implied by the config."""
    if step.due_factor is None or not step.updates:
        return 0.0
    due = tuple(rate * step.due_factor for rate in trace.base_rates)
    return _update_difference((due,), step.updates[:1])


def _first_above(
    names: tuple[str, ...], differences: np.ndarray, bound: float, step: int, quantity: str
) -> Iterator[Divergence]:
    above = np.flatnonzero(~(differences <= bound))
    if len(above):
        yield Divergence(step, quantity, float(differences[above[0]]), names[above[0]])


def _otherwise_apart(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """How much farther apart the ranks of a run are than those of the reference, (parameters,).

    Replicas that train separately differ by design. In any other training, ranks agree, as in one process."""
    with np.errstate(invalid="ignore"):
        return np.where(ours == theirs, 0.0, np.abs(theirs - ours))


def signature_differences(ours: np.ndarray, theirs: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """Estimate of |a - b| / |a| for every parameter, (parameters,), from signatures. scale: divisor instead of |a|."""
    apart = _apart(ours, theirs).max(axis=1)
    below = ours[:, 0] if scale is None else scale
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(apart == 0, 0.0, apart / below)
    return np.where(np.isnan(relative), math.inf, relative)


def gradient_differences(ours: StepTrace, theirs: StepTrace) -> np.ndarray:
    """Relative differences of the gradients of one step, (parameters,)."""
    norms = ours.gradients[:, 0]
    return signature_differences(ours.gradients, theirs.gradients, np.maximum(norms, SMALL_GRADIENT * ours.grad_norm))


def parameter_differences(reference: Trace, other: Trace, number: int) -> np.ndarray:
    """Relative differences of the parameters after step `number` (from 0), (parameters,)."""
    ours = reference.steps[number].parameters
    scale = np.where(_is_idle(reference), np.linalg.norm(ours[:, 0]), ours[:, 0])
    return signature_differences(ours, other.steps[number].parameters, scale)


def final_differences(reference: Trace, other: Trace) -> dict[str, float]:
    """Largest difference of each final tensor, relative to its largest value; {} if the tensors were not stored."""
    if not reference.final or not other.final:
        return {}
    idle = {name for name, is_idle in zip(reference.names, _is_idle(reference), strict=True) if is_idle}
    largest = {n: float(np.abs(v).max(initial=0.0)) for n, v in reference.final.items()}
    widest = max((v for n, v in largest.items() if n in reference.names), default=0.0)
    found = {}
    for name, ours in reference.final.items():
        theirs = other.final.get(name)
        if theirs is None or theirs.shape != ours.shape:
            found[name] = math.inf
            continue
        apart = _apart(ours.astype(np.float64), theirs.astype(np.float64))
        found[name] = _ratio(float(apart.max(initial=0.0)), widest if name in idle else largest[name])
    return found


def _apart(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Elementwise |a - b|; 0 if both are the same infinity or both NaN, since fp16 skips the step of an overflow in
    both runs."""
    with np.errstate(invalid="ignore"):
        return np.where((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)), 0.0, np.abs(ours - theirs))


def _is_idle(reference: Trace) -> np.ndarray:
    """Mask of parameters whose gradients never exceed rounding, so that a relative difference would compare noise."""
    finite = [s for s in reference.steps if math.isfinite(s.grad_norm)]
    shares = np.array([s.gradients[:, 0] / (s.grad_norm or 1.0) for s in finite])
    most = shares.max(axis=0) if len(shares) else np.zeros(len(reference.names))
    return np.asarray((most > 0) & (most < IDLE_GRADIENT))


def same_rows(ours: np.ndarray, theirs: np.ndarray, *, in_order: bool) -> bool:
    """Whether a step had the same rows; their order within the step does not change a sum."""
    return np.array_equal(ours, theirs) if in_order else np.array_equal(np.sort(ours), np.sort(theirs))


def _update_difference(ours: tuple[tuple[float, ...], ...], theirs: tuple[tuple[float, ...], ...]) -> float:
    if [len(u) for u in ours] != [len(u) for u in theirs]:
        return math.inf
    return max(
        (_relative(a, b) for u, w in zip(ours, theirs, strict=True) for a, b in zip(u, w, strict=True)), default=0.0
    )


def _floor(values: list[float]) -> float:
    """Minimum scale for losses and norms near zero: a thousandth of the largest value."""
    return 1e-3 * max((abs(v) for v in values if math.isfinite(v)), default=0.0)


def _relative(ours: float, theirs: float, floor: float = 0.0) -> float:
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    return _ratio(abs(ours - theirs), max(abs(ours), floor))


def _ratio(apart: float, scale: float) -> float:
    if apart == 0:
        return 0.0
    return apart / scale if scale > 0 and math.isfinite(apart) and math.isfinite(scale) else math.inf
