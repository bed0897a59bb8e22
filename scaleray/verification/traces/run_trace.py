"""Trace of a run: its record, step by step, for comparison with another run.

A trace has the losses, norms, learning rates and rows of every step, and for every parameter a signature instead of its
values, so that large models need little memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Layer = tuple[bool, tuple[tuple[str, float], ...]]
"""Whether a module is in training mode, and settings such as its rate of dropout."""


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
    """Norm that the step itself used for clipping and recorded."""
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
    """Number format of fewest digits that holds every value of the gradient, by parameter;
    "" for a wide one or for zeros."""
    draws_random_numbers: bool
    shares_random_state: bool
    """Whether two ranks began the step with the same state of the random generator."""
    changes_buffers: bool
    rows_agree: bool = True
    """Whether the workers of one replica had the same rows."""
    used_norms: tuple[float | None, ...] = ()
    """Value of `used_norm` on every rank."""
    due_factor: float | None = None
    """Factor of the schedule in this step, computed from the config alone."""
    draws: tuple[tuple[tuple[str, bytes], ...], ...] = ()
    """Layers that drew dropout masks, by rank, each with the generator's state before the draw."""
    num_pieces: tuple[int, ...] = ()
    """Number of micro-batches with rows, by rank."""
    replicas: Replicas | None = None
    """Values of each replica if replicas differ; else None."""
    begins: np.ndarray | None = None
    """Signatures (parameters, 4) of the parameters before the step: after callbacks and evaluations of the last one."""
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
    """Digests of the rows given to the loss, uint64, each once; None if unknown."""
    inputs_agree: bool = True
    """Whether the workers of one replica gave the loss the same rows."""
    evaluates_in_training: bool = False
    """Whether an evaluation after an earlier step found the model in training mode."""


@dataclass(frozen=True)
class Replicas:
    """Record of one step of replicas that train apart. Signatures are (ranks, parameters, 4)."""

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
    """Weight of each replica in the mean, (ranks,), if messages under way carry some of it; else None."""
    masses: np.ndarray | None = None
    """Signatures of each replica times its weight, including messages under way to it, at the end of the step."""
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
    """State of a training right after it was loaded from a checkpoint of `step`, or when it was saved. parameters:
    signatures (parameters, 4); state: signatures of the optimizer's tensors, by name; buffers: those of the model and
    of its parameters' averages. For replicas that train apart they are means, whose norms are unknown."""

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
    """Parameters and buffers after the last step, in full; empty for too large a model."""
    clip_norm: float | None = None
    loss_dtype: str = ""
    quieted: tuple[str, ...] = ()
    """Parts that were switched off in the model: `dropout`, `BatchNorm`, `everything` for evaluation mode."""
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics by the number of steps before them; on rank 0."""
    saved: Restored | None = None
    """State after the step at which the run was saved; None if it was not saved."""
    restored: Restored | None = None
    """State at the beginning of a resumed run; None for others."""
    parameter_formats: tuple[str, ...] = ()
    """Number formats of the parameters after the last step, like `gradient_formats`."""
    base_rates: tuple[float, ...] = ()
    """Learning rates of all parameter groups without the schedule's factor."""
    owned: frozenset[str] = frozenset()
    """Parameters that the optimizers of some but not all ranks update."""
    exported: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Signatures of the exported final weights, by their name and that of the tensor; on rank 0."""

    def step(self, number: int) -> StepTrace:
        """The step with this number, from 1."""
        return next(step for step in self.steps if step.step == number)

    def between(self, first: int, last: int) -> Trace:
        """The part of the trace after step `first` up to step `last`."""
        steps = tuple(step for step in self.steps if first < step.step <= last)
        evaluations = {step: found for step, found in self.evaluations.items() if first < step <= last}
        return dataclasses.replace(self, steps=steps, evaluations=evaluations)

    def continued_by(self, later: Trace) -> Trace:
        """Joint trace of a run and its resumption: the later trace counts for repeated steps and for the end."""
        first = later.steps[0].step if later.steps else math.inf
        steps = (*(step for step in self.steps if step.step < first), *later.steps)
        evaluations = {**self.evaluations, **later.evaluations}
        return dataclasses.replace(later, initial=self.initial, steps=steps, evaluations=evaluations, saved=self.saved)
