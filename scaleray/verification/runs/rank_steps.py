"""Each rank's record of a step, and the joint trace of the step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scaleray.config.parallel import Degrees
from scaleray.verification.bounds import SMALL_GRADIENT
from scaleray.verification.repeatable.repeatable_workload import Draw
from scaleray.verification.traces.compare_traces import signature_differences
from scaleray.verification.traces.layer_settings import alike, widest
from scaleray.verification.traces.run_trace import Layer, Replicas, StepTrace


@dataclass(frozen=True)
class Replica:
    """A rank's own replica: signatures before the step and after the optimizer's update, and its optimizer's state
    after the update and at the end of the step. machine, weight, mass: one rank's values of `Replicas`."""

    before: np.ndarray
    updated: np.ndarray
    optimizer_updated: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    buffers_updated: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]
    machine: tuple[str, str]
    weight: float | None = None
    mass: np.ndarray | None = None


@dataclass(frozen=True)
class SeenStep:
    """One rank's record of a step. Gradients and parameters are signatures."""

    rows: np.ndarray
    """Digests of this rank's rows."""
    gradients: np.ndarray
    begins: np.ndarray
    """Signatures of the parameters before the step."""
    parameters: np.ndarray
    replica: Replica | None
    """None if all replicas are equal."""
    random_before: bytes
    """Digest of the random generators' states before the step."""
    draws_random_numbers: bool
    draws: tuple[Draw, ...]
    """Dropout masks that were drawn, if recorded."""
    num_pieces: int
    """Number of this rank's micro-batches."""
    changes_buffers: bool
    loss: float
    count: float
    is_own: bool
    """Whether loss and count cover only the samples of this rank's replica."""
    used_norm: float | None
    """Gradient norm that the step used, if any."""
    state_begins: dict[str, np.ndarray]
    """Signatures of this rank's optimizer before the step."""
    buffers_begin: dict[str, np.ndarray]
    formats: dict[str, str]
    layers: dict[str, Layer]
    inputs: np.ndarray | None
    """Digests of the distinct rows given to this rank's loss; None if unknown."""
    evaluates_in_training: bool


def trace_of(
    own: SeenStep,
    everyone: Sequence[SeenStep],
    *,
    step: int,
    degrees: Degrees,
    updates: tuple[tuple[float, ...], ...],
    gradient_formats: tuple[str, ...],
    due_factor: float | None,
) -> StepTrace:
    """Trace of a step on the rank that recorded `own`, combined from the records of all ranks, in rank order.

    degrees: of the ranks."""
    first = everyone[0]
    replicas = [everyone[ranks[0]] for ranks in degrees.replicas]  # their workers have the same rows and random numbers
    loss, count = own.loss, own.count
    if own.is_own:  # replicas train apart; gradients are those of rank 0's own then, too
        apart = replicas[:: degrees.shard]
        loss_sum, count = sum(seen.loss * seen.count for seen in apart), sum(seen.count for seen in apart)
        loss = loss_sum / count if count else math.nan
    grad_norm = float(np.linalg.norm(first.gradients[:, 0]))
    return StepTrace(
        step=step,
        loss=loss,
        count=count,
        grad_norm=grad_norm,
        used_norm=own.used_norm,
        updates=updates,
        rows=np.concatenate([seen.rows for seen in replicas]),
        gradients=first.gradients,
        parameters=first.parameters,
        gradient_spread=_spread([seen.gradients for seen in everyone], SMALL_GRADIENT * grad_norm),
        parameter_spread=_spread([seen.parameters for seen in everyone], 0.0),
        gradient_formats=gradient_formats,
        draws_random_numbers=any(seen.draws_random_numbers for seen in everyone),
        shares_random_state=len({seen.random_before for seen in replicas}) < len(replicas),
        changes_buffers=any(seen.changes_buffers for seen in everyone),
        rows_agree=all(
            np.array_equal(seen.rows, replicas[degrees.data_rank(rank)].rows) for rank, seen in enumerate(everyone)
        ),
        used_norms=tuple(seen.used_norm for seen in everyone),
        due_factor=due_factor,
        draws=tuple(seen.draws for seen in everyone),
        num_pieces=tuple(seen.num_pieces for seen in everyone),
        replicas=_replicas(everyone),
        begins=first.begins,
        begins_spread=_spread([seen.begins for seen in everyone], 0.0),
        state_begins={n: value for seen in reversed(everyone) for n, value in seen.state_begins.items()},
        buffers_begin={n: value for seen in reversed(everyone) for n, value in seen.buffers_begin.items()},
        formats=widest(seen.formats for seen in everyone),
        layers=alike(seen.layers for seen in everyone),
        inputs=_inputs(everyone),
        inputs_agree=all(_same_inputs([everyone[rank] for rank in ranks]) for ranks in degrees.replicas),
        evaluates_in_training=any(seen.evaluates_in_training for seen in everyone),
    )


def _inputs(everyone: Sequence[SeenStep]) -> np.ndarray | None:
    found = [seen.inputs for seen in everyone if seen.inputs is not None]
    return np.unique(np.concatenate(found)) if found else None


def _same_inputs(replica: Sequence[SeenStep]) -> bool:
    found = [seen.inputs for seen in replica if seen.inputs is not None and len(seen.inputs)]
    return all(np.array_equal(theirs, found[0]) for theirs in found[1:])


def _replicas(everyone: Sequence[SeenStep]) -> Replicas | None:
    found = [seen.replica for seen in everyone if seen.replica is not None]
    if not found:
        return None
    states = [replica.optimizer for replica in found]
    names = [name for name in states[0] if all(name in theirs for theirs in states)]
    spread = 0.0
    if names:
        spread = float(_spread([np.array([theirs[name] for name in names]) for theirs in states], 0.0).max())
    weights = [replica.weight for replica in found if replica.weight is not None]
    masses = [replica.mass for replica in found if replica.mass is not None]
    return Replicas(
        np.array([replica.before for replica in found]),
        np.array([replica.updated for replica in found]),
        np.array([seen.parameters for seen in everyone]),
        spread,
        _by_name([replica.optimizer_updated for replica in found]),
        _by_name(states),
        np.array(weights) if weights else None,
        np.array(masses) if masses else None,
        _by_name([seen.state_begins for seen in everyone]),
        _by_name([replica.buffers_updated for replica in found]),
        _by_name([replica.buffers for replica in found]),
        [replica.machine for replica in found],
    )


def _by_name(everyone: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Signatures of all ranks, (ranks, 4), by name, for names that all ranks have."""
    names = [name for name in everyone[0] if all(name in theirs for theirs in everyone)]
    return {name: np.array([theirs[name] for theirs in everyone]) for name in names}


def _spread(signatures: list[np.ndarray], floor: float) -> np.ndarray:
    """Largest relative difference of any rank from rank 0, (parameters,)."""
    first = signatures[0]
    if len(signatures) == 1:
        return np.zeros(len(first))
    norms = np.max([s[:, 0] for s in signatures], axis=0)
    scale = np.maximum(norms, floor if math.isfinite(floor) else 0.0)
    return np.max([signature_differences(first, theirs, scale) for theirs in signatures[1:]], axis=0)
