"""Trace of a run, which records it step by step for comparison with another run.

A trace has the losses, norms, learning rates and rows of every step, and a signature of every parameter instead of its
values, so that large models need little memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Layer = tuple[bool, tuple[tuple[str, float], ...]]
"""Whether a module is in training mode, and settings such as its dropout rate."""


@dataclass(frozen=True)
class StepTrace:
    """Record of one optimizer step. Arrays over parameters are in the order of `Trace.names`."""

    step: int
    """Number of the step, from 1."""
    loss: float
    count: float
    grad_norm: float
    """Global norm before clipping, computed from the full gradients."""
    used_norm: float | None
    """Norm that the step itself recorded and used for clipping."""
    updates: tuple[tuple[float, ...], ...]
    """Learning rates of all parameter groups, once for every update of the optimizer."""
    rows: np.ndarray
    """Digest of every row of the global batch, in order, uint64 (num_rows,)."""
    gradients: np.ndarray
    """Signatures (parameters, 4) of the gradient of the update, synchronised and not yet clipped."""
    parameters: np.ndarray
    """Signatures (parameters, 4) of the parameters after the step."""
    gradient_spread: np.ndarray
    """Largest relative difference between two ranks' gradients, (parameters,)."""
    parameter_spread: np.ndarray
    gradient_formats: tuple[str, ...]
    """Number format with the fewest digits that holds every value of the gradient, by parameter; "" if it needs its own
    type or is zero."""
    draws_random_numbers: bool
    shares_random_state: bool
    """Whether two ranks began the step with the same state of the random generator."""
    changes_buffers: bool
    rows_agree: bool = True
    """Whether workers of the same replica had the same rows."""
    used_norms: tuple[float | None, ...] = ()
    """Value of `used_norm` on every rank."""
    due_factor: float | None = None
    """Factor of the schedule in this step, computed from the config alone."""
    draws: tuple[tuple[tuple[str, bytes], ...], ...] = ()
    """Layers that drew dropout masks, with the generator's state before the draw, by rank."""
    num_pieces: tuple[int, ...] = ()
    """Number of micro-batches with rows, by rank."""
    replicas: Replicas | None = None
    """Values of each replica if replicas may differ, else None."""
    begins: np.ndarray | None = None
    """Signatures (parameters, 4) of the parameters before the step, after the previous step's callbacks and
    evaluations."""
    begins_spread: np.ndarray | None = None
    """Largest relative difference between two ranks' parameters before the step, (parameters,)."""
    state_begins: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Signatures of the optimizer's tensors before the step, by name."""
    buffers_begin: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Signatures of rank 0's floating-point buffers before the step, by name."""
    formats: Mapping[str, str] = field(default_factory=dict)
    """Number formats of the training's state and rows before the step, like `gradient_formats`."""
    layers: Mapping[str, Layer | None] = field(default_factory=dict)
    """Modules by name as used in the step; None if ranks differ."""
    inputs: np.ndarray | None = None
    """Digests of the distinct rows given to the loss, uint64; None if unknown."""
    inputs_agree: bool = True
    """Whether workers of the same replica gave the loss the same rows."""
    evaluates_in_training: bool = False
    """Whether an evaluation after an earlier step found the model in training mode."""


@dataclass(frozen=True)
class Replicas:
    """Record of one step of replicas that train separately. Signatures are (ranks, parameters, 4)."""

    before: np.ndarray
    """Signatures of the parameters before the optimizer's update."""
    updated: np.ndarray
    """Signatures of the parameters after the optimizer's update, before ranks communicate."""
    after: np.ndarray
    """Signatures of the parameters at the end of the step."""
    state_spread: float
    """Largest relative difference between two ranks' optimizer state at the end of the step."""
    state_updated: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Signatures (ranks, 4) of the optimizer's state after its update, before ranks communicate, by name."""
    state_after: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The same at the end of the step."""
    weights: np.ndarray | None = None
    """Weight of each replica in the mean, (ranks,), if messages in flight carry some weight, else None."""
    masses: np.ndarray | None = None
    """Signatures of each replica times its weight, including messages in flight to it, at the end of the step."""
    state_before: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Signatures (ranks, 4) of the optimizer's state before the step, by name."""
    buffers_updated: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Signatures (ranks, 4) of floating-point buffers before ranks communicate, by name."""
    buffers_after: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The same at the end of the step."""
    machines: Sequence[tuple[str, str]] = ()
    """Machine of each rank."""


@dataclass(frozen=True)
class Restored:
    """State of a training when it was saved at `step`, or right after it was loaded. parameters: signatures
    (parameters, 4); state: signatures of the optimizer's tensors, by name; buffers: signatures of the model's buffers
    and of its parameters' averages. For replicas that train separately, these are means with unknown norms."""

    step: int
    parameters: np.ndarray
    state: Mapping[str, np.ndarray]
    buffers: Mapping[str, np.ndarray] = field(default_factory=dict)
    items: Mapping[str, str] = field(default_factory=dict)
    """Digests of this rank's whole state, by item of a checkpoint."""


@dataclass(frozen=True)
class Trace:
    """Record of a run, for comparison."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    initial: np.ndarray
    """Signatures (parameters, 4) of the parameters before the first step."""
    steps: tuple[StepTrace, ...]
    final: Mapping[str, np.ndarray]
    """Full parameters and buffers after the last step; empty if the model is too large."""
    clip_norm: float | None = None
    loss_dtype: str = ""
    quieted: tuple[str, ...] = ()
    """Parts of the model that were disabled: `dropout`, `BatchNorm`, or `everything` for evaluation mode."""
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics, by the number of preceding steps; on rank 0."""
    saved: Restored | None = None
    """State after the step at which the run was saved; None if it was not saved."""
    restored: Restored | None = None
    """State at the beginning of a resumed run; None for others."""
    parameter_formats: tuple[str, ...] = ()
    """Number formats of the parameters after the last step, like `gradient_formats`."""
    base_rates: tuple[float, ...] = ()
    """Learning rates of all parameter groups without the schedule's factor."""
    owned: frozenset[str] = frozenset()
    """Parameters that the optimizers of some ranks, but not all, update."""
    exported: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Signatures of the exported final weights, by the names of the weights and the tensor; on rank 0."""

    def step(self, number: int) -> StepTrace:
        """The step with this number, counted from 1."""
        return next(step for step in self.steps if step.step == number)

    def between(self, first: int, last: int) -> Trace:
        """The part of the trace after step `first` up to step `last`."""
        steps = tuple(step for step in self.steps if first < step.step <= last)
        evaluations = {step: found for step, found in self.evaluations.items() if first < step <= last}
        return dataclasses.replace(self, steps=steps, evaluations=evaluations)

    def continued_by(self, later: Trace) -> Trace:
        """Joint trace of a run and its resumption; the later trace counts for repeated steps and for the end."""
        first = later.steps[0].step if later.steps else math.inf
        steps = (*(step for step in self.steps if step.step < first), *later.steps)
        evaluations = {**self.evaluations, **later.evaluations}
        return dataclasses.replace(later, initial=self.initial, steps=steps, evaluations=evaluations, saved=self.saved)
