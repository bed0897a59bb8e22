"""Are two runs the same training, step by step? What is kept of a run for that, and where two of them part.

A run leaves a Trace: losses, norms, learning rates and rows of every step, and of every parameter a signature instead
of its values, so that large models need little memory. Used by training.verification, for single process against
strategy, and for any other pair of runs; with a bound of 0 they must agree to the bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

BOUND = 1e-9
"""In float64 an honest reordering of sums differs by about 1e-12; anything above this is a bug."""
SMALL_GRADIENT = 1e-3
"""A parameter's gradient is compared relative to its norm, and to at least this share of the whole gradient's."""
IDLE_GRADIENT = 1e-10
"""Below this share of the whole gradient a parameter has no gradient but rounding, such as a bias before a normalisation."""
CHUNK = 2**22
FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}  # by their digits


@dataclass(frozen=True)
class StepTrace:
    """What one optimizer step did. Arrays over parameters are in the order of `Trace.names`."""

    step: int
    """From 1."""
    loss: float
    count: float
    grad_norm: float
    """Global norm before clipping, computed from the full gradients."""
    used_norm: float | None
    """The norm that the step itself took, for clipping and for its record."""
    updates: tuple[tuple[float, ...], ...]
    """The learning rates of all parameter groups, once for every update that the optimizer made."""
    rows: np.ndarray
    """A digest of every row of the global batch, in order, uint64 (num_rows,)."""
    gradients: np.ndarray
    """Signatures (parameters, 4) of the gradient that is meant, synchronised and not yet clipped."""
    parameters: np.ndarray
    """Signatures (parameters, 4) after the step."""
    gradient_spread: np.ndarray
    """Largest relative difference between two ranks' gradients, (parameters,)."""
    parameter_spread: np.ndarray
    gradient_formats: tuple[str, ...]
    """The number format of fewest digits that holds every value of the gradient; "" for a wide one or for zeros."""
    draws_random_numbers: bool
    shares_random_state: bool
    """Two ranks began the step with the same random generator."""
    changes_buffers: bool
    rows_agree: bool = True
    """Workers of one replica had the same rows."""
    used_norms: tuple[float | None, ...] = ()
    """`used_norm` of every rank."""
    due_factor: float | None = None
    """The schedule's factor of this step, as it follows from the config alone."""
    draws: tuple[tuple[tuple[str, bytes], ...], ...] = ()
    """By rank: the layers that drew dropout masks, each with the state of the generator that it drew from."""
    num_pieces: tuple[int, ...] = ()
    """Micro-batches with rows, by rank."""
    replicas: Replicas | None = None
    """Of replicas that differ."""


@dataclass(frozen=True)
class Replicas:
    """What replicas that train apart did in a step. Signatures are (ranks, parameters, 4)."""

    before: np.ndarray
    """Parameters before the optimizer's update."""
    updated: np.ndarray
    """After it, before ranks communicate."""
    after: np.ndarray
    """When the step is over."""
    state_spread: float
    """Largest relative difference between two ranks' state of the optimizer, when the step is over."""


@dataclass(frozen=True)
class Restored:
    """A training right after it was loaded from a checkpoint of `step`, or when that was saved. parameters: signatures
    (parameters, 4); state: of the optimizer's tensors, by name."""

    step: int
    parameters: np.ndarray
    state: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Trace:
    """A run, kept for comparison."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    initial: np.ndarray
    """Signatures (parameters, 4) before the first step."""
    steps: tuple[StepTrace, ...]
    final: Mapping[str, np.ndarray]
    """Parameters and buffers after the last step, in full; empty for a model too large for that."""
    clip_norm: float | None = None
    loss_dtype: str = ""
    quieted: tuple[str, ...] = ()
    """What was switched off in the model: `dropout`, `BatchNorm`, `everything` for evaluation mode."""
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics by the number of steps before them; on rank 0."""
    saved: Restored | None = None
    """The state at the end of what was saved."""
    restored: Restored | None = None
    """The state of the beginning, of a run that was resumed."""
    parameter_formats: tuple[str, ...] = ()
    """Of the parameters after the last step, like `gradient_formats`."""
    base_rates: tuple[float, ...] = ()
    """The learning rates of all parameter groups without the schedule's factor."""

    def step(self, number: int) -> StepTrace:
        """The step of this number, from 1."""
        return next(step for step in self.steps if step.step == number)

    def continued_by(self, later: Trace) -> Trace:
        """One trace of a run and its resumption: what the later one did again counts, and how it ended."""
        first = later.steps[0].step if later.steps else math.inf
        steps = (*(step for step in self.steps if step.step < first), *later.steps)
        evaluations = {**self.evaluations, **later.evaluations}
        return dataclasses.replace(later, initial=self.initial, steps=steps, evaluations=evaluations, saved=self.saved)


class Signer:
    """Signatures of tensors: norm, sum, and sums under two fixed random signs, in float64.

    If two tensors differ by d, each signed sum differs by about the norm of d, whatever d is; so four numbers show that
    they differ, and by how much. Signs depend on the name and the number of elements alone.
    """

    def __init__(self, num_projections: int = 2) -> None:
        self.num_projections = num_projections
        self._signs: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> np.ndarray:
        """The signature (2 + num_projections,) of one tensor."""
        flat = tensor.detach().reshape(-1)
        signs = self._signs_of(name, flat)
        total = torch.zeros(2 + self.num_projections, dtype=torch.float64, device=flat.device)
        for start in range(0, flat.numel(), CHUNK):  # float64 copies of a large table would not fit beside it
            part = flat[start : start + CHUNK].to(torch.float64)
            total[0] += part @ part
            total[1] += part.sum()
            total[2:] += signs[:, start : start + CHUNK].to(torch.float64) @ part
        total[0] = total[0].sqrt()
        return total.cpu().numpy()

    def _signs_of(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        key = (name, flat.numel(), flat.device)
        if key not in self._signs:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
            draw = torch.Generator().manual_seed(seed)
            signs = torch.randint(0, 2, (self.num_projections, flat.numel()), generator=draw, dtype=torch.int8)
            self._signs[key] = (2 * signs - 1).to(flat.device)
        return self._signs[key]


def number_format(tensor: torch.Tensor) -> str:
    """The format of fewest digits that holds every value of a float64 or float32 tensor: bf16, fp16 or fp32; "" where it
    needs its own, or has zeros only.

    Sums fill all digits of their type, so a shorter one has been through a rounding.
    """
    flat = tensor.detach().reshape(-1)
    if flat.dtype not in (torch.float64, torch.float32) or not bool(flat.any()):
        return ""
    narrower = ((name, kind) for name, kind in FORMATS.items() if kind != flat.dtype)
    return next((name for name, kind in narrower if torch.equal(flat.to(kind).to(flat.dtype), flat)), "")


@dataclass(frozen=True)
class Divergence:
    """Where two runs part. step: from 1; 0 is before the first. parameter: the first that differs, in model order."""

    step: int
    quantity: str
    """`model`, `dtype`, `initial parameters`, `rows`, `count`, `loss`, `gradient`, `learning rate`, `parameters`,
    `final values`, `steps`, `restored parameters`, `restored state`, `evaluation`, `masks`, `averaging`, `own gradient`,
    `sent gradient` or `resume`."""
    difference: float
    parameter: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Largest relative differences of a whole run, and where it first left the other. NaN: not compared."""

    loss: float = math.nan
    grad_norm: float = math.nan
    parameters: float = math.nan
    """Of the final values, relative to each tensor's largest."""
    divergence: Divergence | None = field(default=None)

    @property
    def is_equal(self) -> bool:
        """Whether everything stayed within the bound."""
        return self.divergence is None

    @property
    def largest(self) -> float:
        """The largest of the differences."""
        return max((d for d in (self.loss, self.grad_norm, self.parameters) if not math.isnan(d)), default=math.nan)


def compare(reference: Trace, other: Trace, *, bound: float = BOUND) -> Comparison:
    """Compare a run with the one it should equal. bound: relative; 0 asks for the same bits and the same order of rows."""
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


def divergences(reference: Trace, other: Trace, bound: float) -> Iterator[Divergence]:
    """Everything that differs, in the order of cause and effect."""
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
        if not theirs.rows_agree or not same_rows(ours.rows, theirs.rows, in_order=bound == 0):
            yield Divergence(ours.step, "rows", math.inf)
        if ours.count != theirs.count:
            yield Divergence(ours.step, "count", _relative(ours.count, theirs.count))
        if (loss := _relative(ours.loss, theirs.loss, loss_floor)) > bound:
            yield Divergence(ours.step, "loss", loss)
        gradients = gradient_differences(ours, theirs)
        yield from _first_above(
            reference.names, np.maximum(gradients, theirs.gradient_spread), bound, ours.step, "gradient"
        )
        if (norm := _relative(ours.grad_norm, theirs.grad_norm, norm_floor)) > bound:
            yield Divergence(ours.step, "gradient", norm)
        if (rate := max(_update_difference(ours.updates, theirs.updates), _from_due(other, theirs))) > 1e-12:
            yield Divergence(ours.step, "learning rate", rate)
        parameters = np.maximum(parameter_differences(reference, other, number), theirs.parameter_spread)
        yield from _first_above(reference.names, parameters, bound, ours.step, "parameters")
        yield from _evaluations(reference, other, ours.step, bound)
    last = len(reference.steps)
    if last != len(other.steps):
        yield Divergence(1 + min(last, len(other.steps)), "steps", math.inf)
    final = final_differences(reference, other)
    yield from _first_above(tuple(final), np.array(list(final.values())), bound, last, "final values")


def restored_differences(
    saved: Restored | None, restored: Restored, names: tuple[str, ...], bound: float
) -> Iterator[Divergence]:
    """Where a restored training is not the one that was saved; steps count from the next one."""
    if saved is None:
        return
    norms = saved.parameters[:, 0]
    # what has no gradient but rounding differs in nothing else
    scale = np.maximum(norms, SMALL_GRADIENT * float(np.linalg.norm(norms)))
    apart = signature_differences(saved.parameters, restored.parameters, scale)
    yield from _first_above(names, apart, bound, saved.step + 1, "restored parameters")
    largest: dict[str, float] = {}
    for name, value in saved.state.items():
        kind = name.rpartition(": ")[2]
        largest[kind] = max(largest.get(kind, 0.0), float(value[0]))
    for name, value in saved.state.items():
        theirs = restored.state.get(name)
        least = SMALL_GRADIENT**2 * largest[name.rpartition(": ")[2]]
        scale = np.array([max(float(value[0]), least)])
        difference = math.inf if theirs is None else float(signature_differences(value[None], theirs[None], scale)[0])
        if not difference <= bound:
            yield Divergence(saved.step + 1, "restored state", difference, name)
            return


def _evaluations(reference: Trace, other: Trace, step: int, bound: float) -> Iterator[Divergence]:
    ours, theirs = reference.evaluations.get(step, {}), other.evaluations.get(step, {})
    for name in dict.fromkeys((*ours, *theirs)):
        apart = _relative(ours[name], theirs[name], 1e-3) if name in ours and name in theirs else math.inf
        if not apart <= bound:
            yield Divergence(step, "evaluation", apart, name)
            return


def _from_due(trace: Trace, step: StepTrace) -> float:
    """How far the learning rates are from those that the config asks for."""
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


def signature_differences(ours: np.ndarray, theirs: np.ndarray, scale: np.ndarray | None = None) -> np.ndarray:
    """About |a - b| / |a| for every parameter (parameters,), from signatures. scale: to divide by in place of |a|."""
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
    """Largest difference of each final tensor, relative to its largest value; {} where they were not kept."""
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
    """|a - b| one by one; 0 where both are the same infinity, or both NaN: an overflow is a value, as fp16 skips its step."""
    with np.errstate(invalid="ignore"):
        return np.where((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)), 0.0, np.abs(ours - theirs))


def _is_idle(reference: Trace) -> np.ndarray:
    """Parameters that have a gradient, and never one above rounding: a relative difference would compare noise."""
    finite = [s for s in reference.steps if math.isfinite(s.grad_norm)]
    shares = np.array([s.gradients[:, 0] / (s.grad_norm or 1.0) for s in finite])
    most = shares.max(axis=0) if len(shares) else np.zeros(len(reference.names))
    return np.asarray((most > 0) & (most < IDLE_GRADIENT))


def same_rows(ours: np.ndarray, theirs: np.ndarray, *, in_order: bool) -> bool:
    """Whether a step had the same rows; their order inside the step does not change a sum."""
    return np.array_equal(ours, theirs) if in_order else np.array_equal(np.sort(ours), np.sort(theirs))


def _update_difference(ours: tuple[tuple[float, ...], ...], theirs: tuple[tuple[float, ...], ...]) -> float:
    if [len(u) for u in ours] != [len(u) for u in theirs]:
        return math.inf
    return max(
        (_relative(a, b) for u, w in zip(ours, theirs, strict=True) for a, b in zip(u, w, strict=True)), default=0.0
    )


def _floor(values: list[float]) -> float:
    """Losses and norms near zero are compared relative to a thousandth of the largest."""
    return 1e-3 * max((abs(v) for v in values if math.isfinite(v)), default=0.0)


def _relative(ours: float, theirs: float, floor: float = 0.0) -> float:
    if ours == theirs or (math.isnan(ours) and math.isnan(theirs)):
        return 0.0
    return _ratio(abs(ours - theirs), max(abs(ours), floor))


def _ratio(apart: float, scale: float) -> float:
    if apart == 0:
        return 0.0
    return apart / scale if scale > 0 and math.isfinite(apart) and math.isfinite(scale) else math.inf
