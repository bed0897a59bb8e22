"""Verdicts of `verify` that need no run: on decomposed gradients, differences beyond rounding, and failed runs."""

import math
from collections.abc import Mapping

import numpy as np
import torch

from scaleray.checkpoints.model_layout import FINAL_WEIGHTS
from scaleray.config import RunConfig
from scaleray.config.strategy_traits import traits_of
from scaleray.errors import CheckpointError, InitialisationError, text_of
from scaleray.records.certificate import Divergence, Mismatch
from scaleray.verification.causes.cause_classes import Cause, Finding
from scaleray.verification.repeatable.repeatable_workload import Quieted
from scaleray.verification.runs.compared_runs import Key, Variant, Watched, partition_of
from scaleray.verification.runs.trace_probe import TraceProbe
from scaleray.verification.traces.run_trace import Restored, Trace
from scaleray.verification.verdicts.guarantees import Guarantee, guarantee_of
from scaleray.verification.verdicts.own_precision import Excess, Rounding

Found = tuple[Divergence, Finding]


def mismatch_of(divergence: Divergence, finding: Finding) -> Mismatch:
    """Combine a divergence with its finding."""
    name = finding.parameter or divergence.parameter
    return Mismatch(divergence.step, divergence.quantity, name, divergence.difference, str(finding.cause), finding.why)


def own_gradients(variant: Variant, watched: Watched, config: RunConfig, bound: float) -> Found | None:
    """Divergence, if any, of a replica's own gradient from that of its rows, or of what compression sent from the
    gradient."""
    parts = watched.probes[0].parts
    assert parts is not None
    step = parts.step
    if parts.unsent is not None:
        widths = {"bf16": 2.0**-8, "fp16": 2.0**-11}
        allowed = max(bound, 4 * (1 + variant.world_size) * widths.get(config.compression.name, 0.0))
        if parts.unsent <= allowed:
            return None
        why = (
            f"the sent part and the remainder do not add up to the gradient: {parts.unsent:.2g} of it is missing or "
            "too much"
        )
        return Divergence(step, "sent gradient", parts.unsent), Finding(Cause.COMPRESSION, why)
    if watched.trace.step(step).replicas is None or step <= (promised(variant).exact_steps or (lambda config: 0))(
        config
    ):
        return None
    if parts.shares is None:
        why = "a replica's gradient is not the gradient of its own rows"
        return Divergence(step, "own gradient", math.inf), Finding(Cause.UNKNOWN, why)
    (shares, counts), shard = parts.shares, config.degrees().shard
    for rank, view in enumerate(shares):
        first = rank // shard * shard  # of those that hold a replica together
        own = np.zeros_like(view, dtype=bool)
        own[first : first + shard] = counts[first : first + shard] > 0
        due = own * counts.sum() / max(1.0, counts[own].sum())
        if not (apart := float(np.abs(view - due).max() / max(1.0, due.max()))) <= 1e-6:
            found = ", ".join(f"{share:.4g}" for share in view[own] / due[own])
            why = f"rank {rank}'s own rows have {found} times the right weight in its own gradient"
            return Divergence(step, "own gradient", apart), Finding(Cause.LOSS_NORMALISATION, why)
    return None


def rounding_of(variant: Variant) -> Rounding:
    assert variant.own is not None
    config, guarantee = variant.own.config, promised(variant)
    narrow = []
    if traits_of(variant.strategy).splits_parameters or config.degrees().whole > 1:
        narrow = [d for d in (config.fsdp.reduce_dtype, config.fsdp.parameter_dtype) if d in ("bf16", "fp16")]
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    epsilon = max(torch.finfo(types.get(d, torch.float32)).eps for d in (*narrow, "fp32"))
    return Rounding(epsilon, variant.world_size * variant.accumulation, guarantee.is_exact, bool(narrow))


def beyond_rounding(found: Excess, variant: Variant) -> Finding:
    assert variant.own is not None
    own, d = variant.own.config.precision.dtype, found.divergence
    if found.format:
        why = f"in {own} every value of the {d.quantity} of {d.parameter} fits into {found.format}, so it was rounded"
        return Finding(Cause.DTYPE, why, d.parameter)
    what = f"the {d.quantity}" + (f" of {d.parameter}" if d.parameter else "")
    why = (
        f"in {own} {what} differs by {d.difference:.2g} where rounding explains {found.allowed:.2g}, "
        "although it is equal in float64"
    )
    return Finding(Cause.DTYPE, why, d.parameter)


def without_statistics(variant: Variant) -> str:
    """Reason why a variant cannot train BatchNorm; "" if it can."""
    variant = variant.on_rows_with_statistics()
    for job in (variant.job, variant.later):
        if job is None:
            continue
        plan, partition = job.train_plan(), partition_of(job)
        if min(partition.smallest(plan.num_rows(step)) for step in range(plan.steps_per_epoch)) < 2:
            return "BatchNorm cannot compute statistics over a micro-batch of a single row"
    return ""


def promised(variant: Variant) -> Guarantee:
    return guarantee_of(variant.strategy, variant.job.config, variant.world_size)


def failure(exc: Exception, variant: Variant, probes: list[TraceProbe]) -> Mismatch:
    cause = Cause.INITIAL_PARAMETERS if isinstance(exc, InitialisationError) else Cause.FAILED
    step, is_resumed = 0, len(probes) > 1 and not probes[-1].has_begun
    if isinstance(exc, CheckpointError) or (is_resumed and variant.resumes_after is not None):
        cause, step = Cause.RESUME, (variant.resumes_after or 0) + 1
    return Mismatch(step, "run", None, math.inf, cause, " ".join(text_of(exc).split()))


def lost(exc: Exception) -> Mismatch:
    """Mismatch of a variant whose group was lost because a process hung or ended."""
    return Mismatch(0, "run", None, math.inf, Cause.FAILED, " ".join(text_of(exc).split()))


def unkept(broken: Divergence, config: RunConfig) -> Finding:
    cause = Cause.AVERAGING if config.compression.name == "none" else Cause.COMPRESSION
    return Finding(cause, f"the {broken.quantity} should still be equal, in a step that equals that of one process")


def judged(trace: Trace, key: Key) -> str:
    """Parts that were removed for a comparison, with reasons."""
    if key.quiet == Quieted.EVERYTHING:
        return "in evaluation mode: training draws random numbers, which differ between ranks by design"
    words = {
        "dropout": "dropout off: masks differ between ranks by design; the draws themselves were checked",
        "BatchNorm": "BatchNorm frozen: its statistics are those of each micro-batch by design",
        "SyncBatchNorm": "BatchNorm frozen: its statistics are those of all workers by design",
    }
    if key.partition is not None:
        words["BatchNorm"] = (
            "BatchNorm: one process used the statistics of each worker's micro-batches, and kept those of rank 0"
        )
    return "; ".join(words[name] for name in trace.quieted)


def handed_on_wrongly(trace: Trace, guarantee: Guarantee, config: RunConfig, bound: float) -> Found | None:
    """First tensor of the final weights that is not the replicas' mean, if known."""
    last = trace.steps[-1].step if trace.steps else 0
    mean = guarantee.mean(trace, config, last) if last else None
    for position, name in enumerate(trace.names if mean is not None else ()):
        found = trace.exported.get(f"{FINAL_WEIGHTS}: {name}")
        if found is None or mean is None:
            continue  # adapters are added to their layers
        apart = float(np.abs(found[1:] - mean[position]).max() / max(float(found[0]), 1e-12))
        if not apart <= bound:
            why = f"{name} in the final weights is not the mean of the replicas"
            return Divergence(last, "final weights", apart, name), Finding(Cause.WEIGHTS, why, name)
    return None


def with_norms_of(restored: Restored, saved: Restored, mean: np.ndarray | None) -> Restored:
    """The mean state that replicas saved, with the norms of the restored state, since a mean of norms is meaningless.
    mean: signatures (parameters, 3) of the parameters' mean; None if it includes messages in flight, which only sender
    and receiver know."""
    parameters = restored.parameters if mean is None else np.column_stack([restored.parameters[:, 0], mean])

    def with_norms(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {n: np.array([theirs[n][0], *value[1:]]) if n in theirs else value for n, value in ours.items()}

    return Restored(
        saved.step, parameters, with_norms(saved.state, restored.state), with_norms(saved.buffers, restored.buffers)
    )


def mean_of(everyone: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Mean of all replicas' tensors by name; the first replica's for integer tensors."""
    held = {name: [theirs[name] for theirs in everyone if name in theirs] for own in everyone for name in own}
    return {
        name: torch.stack(values).mean(dim=0) if values[0].is_floating_point() or values[0].is_complex() else values[0]
        for name, values in held.items()
    }
