"""A probe that records the trace of a run."""

import dataclasses
import hashlib
import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from scaleray.common.equal_models import dense_buffers
from scaleray.data import RankBatch
from scaleray.records.run_record import EvaluationRecord, StepRecord, WorkerMessage
from scaleray.strategies.contract.parallel import full
from scaleray.strategies.contract.weight_shares import WeightShare
from scaleray.strategies.local_sgd import machine
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.optimizers import Schedule
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.several_optimizers import SeveralOptimizers
from scaleray.training.state.items import PROGRESS
from scaleray.training.step.micro_batches import cuts_of
from scaleray.verification.causes.cause_classes import AVERAGE_OF
from scaleray.verification.causes.gradient_parts import GradientParts
from scaleray.verification.repeatable.repeatable_workload import Masks, Quieted
from scaleray.verification.runs.compared_job import DueRates
from scaleray.verification.runs.rank_steps import Replica, SeenStep, trace_of
from scaleray.verification.traces.layer_settings import Given, formats_of, layers_of
from scaleray.verification.traces.run_trace import Restored, StepTrace, Trace
from scaleray.verification.traces.signatures import Signer, number_format

LARGEST_KEPT_BYTES = 2**30  # larger models are compared by signature at the end, too


class TraceProbe:
    """Probe that records a run's Trace. Every rank has one, and they exchange records after each step. take_apart_at:
    step (from 1) whose gradient is decomposed into those of every rank's micro-batches, see `parts`, for which the
    job's workload builds another model. masks: records the model's draws. due: the right learning rates. keeps: steps
    after which rank 0 stores each replica's own values, see `values`. last: number of the last step, if a resume
    changes the size of a step. stands_still: whether to keep parameters unchanged."""

    def __init__(
        self,
        place: RankContext,
        job: TrainJob,
        *,
        take_apart_at: int | None = None,
        masks: Masks | None = None,
        due: DueRates | None = None,
        keeps: tuple[int, ...] = (),
        last: int | None = None,
        stands_still: bool = False,
    ) -> None:
        self.place = dataclasses.replace(place, degrees=job.degrees)
        self.job, self.take_apart_at, self.masks, self.due = job, take_apart_at, masks, due
        self.keeps, self.stands_still = keeps, stands_still
        self.last = job.recipe.total_steps if last is None else last
        self.parts: GradientParts | None = None
        self.values: dict[int, list[dict[str, torch.Tensor]]] = {}
        """Parameters and buffers of every rank after the steps of `keeps`; on rank 0."""
        self.has_begun = False
        """Whether the model is set up, so that later errors are errors of training."""
        self._sign = Signer()
        self._steps: list[StepTrace] = []
        self._final: dict[str, np.ndarray] = {}
        self._evaluations: dict[int, Mapping[str, float]] = {}
        self._saved: Restored | None = None
        self._restored: Restored | None = None
        self.restored_items: Mapping[str, str] = {}
        """Digests of the state's items right after a checkpoint was loaded."""
        self._parameter_formats: tuple[str, ...] = ()
        self._exported: dict[str, np.ndarray] = {}
        self._owned: frozenset[str] = frozenset()

    def on_message(self, message: WorkerMessage) -> None:
        """Record the evaluations among the run's messages."""
        if isinstance(message, EvaluationRecord):
            self._evaluations[message.step] = dict(message.metrics)

    def on_setup(self, setup: Setup) -> None:
        self._setup = setup
        self._parameters = dict(setup.parallel.module.named_parameters())
        self._names = setup.parallel.parameter_names or tuple(self._parameters)
        self._has_parts = bool(setup.parallel.parameter_names)
        self.has_begun = not self._has_parts  # a pipeline may still refuse the model with the first rows
        dtypes = self._whole({n: str(p.dtype).removeprefix("torch.") for n, p in self._parameters.items()})
        self._dtypes = tuple(dtypes[name] for name in self._names)
        if self.stands_still:
            _stand_still(setup)
        self._num_trained = sum(p.numel() for p in self._parameters.values() if p.requires_grad)
        self._state_updated: dict[str, np.ndarray] = {}
        self._buffers_updated: dict[str, np.ndarray] = {}
        self._initial = self._updated = self._signatures()
        if self.due is not None and self.due.first:
            self._restored = dataclasses.replace(self._state_at(self.due.first), items=self.restored_items)
        ids = {id(p) for group in setup.optimizer.param_groups for p in group["params"]}
        held = self.place.gathered({name for name, p in self._parameters.items() if id(p) in ids})
        self._owned = frozenset(set().union(*held) - set.intersection(*held))
        # of a workload's own, and of one that follows evaluations, nothing is known
        self._is_due_known = isinstance(setup.schedule, Schedule) and not setup.schedule.plateaus
        self._base_rates = self._due_rates()
        if self.take_apart_at is not None:
            self.parts = GradientParts(
                self.job,
                self.place,
                setup,
                self._names,
                self.take_apart_at,
                whole=self._whole,
                gather=self.place.gathered,
            )
        self._updates: list[tuple[float, ...]] = []
        setup.optimizer.register_step_post_hook(self._after_update)

    def on_batch(self, batch: RankBatch) -> None:
        self.has_begun = True
        self._step, self._rows = batch.step + 1, _row_digests(batch)
        self._num_pieces = sum(1 for _ in cuts_of(batch, self.job.recipe.micro_batch_size))
        self._updates.clear()
        self._gradients: np.ndarray | None = None
        if isinstance(self.job.workload, Quieted):
            self.job.workload.begin_step(batch.num_rows)
        if self.masks is not None:
            self.masks.begin()
        self._begins, self._state_begins = self._signatures(), self._optimizer_state(here=True)
        self._buffers_begin, self._kept_formats = self._own_buffers(), self._formats_kept()
        self._random_before, self._buffers_before = _random_state(self.place.device), self._buffer_digest()
        if self.parts is not None:
            self.parts.begin(self._step, batch)
            if isinstance(self.job.workload, Quieted):
                self.job.workload.begin_step(batch.num_rows)  # what was taken apart are not the step's own rows

    def on_gradients(self, correction: float) -> None:
        self._layers = layers_of(self._setup.parallel.module)
        whole = {n: None if p.grad is None else full(p.grad) for n, p in self._parameters.items()}
        formats = self._whole({n: "" if g is None else number_format(g) for n, g in whole.items()})
        self._formats = tuple(formats[name] for name in self._names)
        empty = np.zeros(2 + self._sign.num_projections)
        found = self._in_order({n: empty if g is None else self._sign(n, g) * correction for n, g in whole.items()})
        # several losses come one after the other
        self._gradients = found if self._gradients is None else self._gradients + found
        if self.parts is not None:
            self.parts.see(whole, correction)

    def on_step(self, result: StepRecord, learning_rate: float) -> None:
        after, random_before = self._signatures(), self._random_before
        assert self._gradients is not None
        replica = self._replica() if self._setup.parallel.replicas_differ else None
        given = self.job.workload.given if isinstance(self.job.workload, Quieted) else Given()
        mine = SeenStep(
            rows=self._rows,
            gradients=self._gradients,
            begins=self._begins,
            parameters=after,
            replica=replica,
            random_before=random_before,
            draws_random_numbers=self.masks.end() if self.masks else random_before != _random_state(self.place.device),
            draws=tuple(self.masks.draws) if self.masks else (),
            num_pieces=self._num_pieces,
            changes_buffers=self._buffers_before != self._buffer_digest(),
            loss=result.loss,
            count=result.count,
            is_own=result.is_own,
            used_norm=result.grad_norm,
            state_begins=self._state_begins,
            buffers_begin=self._buffers_begin,
            formats=self._kept_formats | given.formats,
            layers=self._layers,
            inputs=given.rows,
            evaluates_in_training=given.evaluates_in_training,
        )
        seen = trace_of(
            mine,
            self.place.gathered(mine),
            step=self._step,
            degrees=self.place.mesh,
            updates=tuple(self._updates),
            gradient_formats=self._formats,
            due_factor=self._due_factor(),
        )
        self._steps.append(seen)
        self._updated = after
        if isinstance(self.job.workload, Quieted):
            self.job.workload.end_step()
        if self.parts is not None:
            self.parts.end()
        if self._step in self.keeps:
            self._keep_values()
        if self._step == self.last:
            self._keep_final()

    def on_saved(self, step: int, items: Mapping[str, str]) -> None:
        """Record the state stored in a checkpoint, with digests of its items. Collective."""
        self._saved = dataclasses.replace(self._state_at(step), items=items)

    def on_restated(self, progress: str) -> None:
        """Replace the digest of the saved progress, to which an evaluation after the checkpoint was added."""
        if self._saved is not None:
            self._saved = dataclasses.replace(self._saved, items={**self._saved.items, PROGRESS: progress})

    @property
    def has_saved(self) -> bool:
        """Whether a checkpoint was saved."""
        return self._saved is not None

    def take_weights(self, share: WeightShare, name: str) -> None:
        """Record this rank's part of the weights that a run exports at its end."""
        for tensor, value in share.tensors.items():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:  # a sparse buffer is no weight
                self._exported[f"{name}: {tensor}"] = self._sign(tensor, value.double())

    def gather_weights(self) -> None:
        """Combine these weights of all ranks. Collective."""
        everyone = self.place.gathered(self._exported)
        self._exported = {name: value for theirs in reversed(everyone) for name, value in theirs.items()}

    def trace(self, *, loss_dtype: str = "", quieted: tuple[str, ...] = ()) -> Trace:
        """The recorded trace."""
        clip_norm = self.job.config.optimizer.clip_norm
        return Trace(
            self._names,
            self._dtypes,
            self._initial,
            tuple(self._steps),
            self._final,
            clip_norm,
            loss_dtype,
            quieted,
            evaluations=self._evaluations,
            saved=self._saved,
            restored=self._restored,
            parameter_formats=self._parameter_formats,
            base_rates=self._base_rates,
            owned=self._owned,
            exported=self._exported,
        )

    def let_go(self) -> None:
        """Release references to the ended training. Its optimizer refers to this probe, and such a cycle would hold the
        model's memory until Python collects it."""
        for name in ("_setup", "_parameters", "_sign"):
            vars(self).pop(name, None)
        if self.parts is not None:
            self.parts.let_go()

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
        if isinstance(self._setup.optimizer, SeveralOptimizers) and self._updates:
            rates = self._updates.pop() + rates  # of all together, each of which steps once
        self._updates.append(rates)
        if self._setup.parallel.replicas_differ:
            self._updated, self._state_updated = self._signatures(), self._optimizer_state(here=True)
            self._buffers_updated = self._own_buffers()

    def _replica(self) -> Replica:
        """This rank's replica at the end of a step. Collective if messages may be in flight."""
        state, buffers = self._optimizer_state(here=True), self._own_buffers()
        found = Replica(
            self._begins, self._updated, self._state_updated, state, self._buffers_updated, buffers, machine()
        )
        gossip = self.job.config.gossip
        if self.job.config.strategy.name != "gossip" or not gossip.is_asynchronous:
            return found
        letters = self._setup.parallel.state()
        weight = float(letters.pop("weight"))
        mass = weight * self._signatures()
        trained = [(n, p) for n, p in self._parameters.items() if p.requires_grad]
        positions = [self._names.index(name) for name, _ in trained]
        for letter in letters.values():
            parts = letter[:-1].split([p.numel() for _, p in trained] + [letter.numel() - 1 - self._num_trained])
            for position, (name, parameter), part in zip(positions, trained, parts, strict=False):
                mass[position] += float(letter[-1]) * self._sign(name, part.view_as(parameter))
        return dataclasses.replace(found, weight=weight, mass=mass)

    def _due_factor(self) -> float | None:
        """Factor of the step's learning rate according to the config; None if the config does not determine it."""
        is_scaled = self._setup.rate_scale.factor != 1.0
        return self.due.factor(self._step) if self.due is not None and self._is_due_known and not is_scaled else None

    def _due_rates(self) -> tuple[float, ...]:
        """Learning rates without the schedule's factor: the recipe's, unless the workload has chosen its own."""
        groups, workload = self._setup.optimizer.param_groups, self.job.workload
        if callable(getattr(workload, "optimizer", None)):
            return tuple(float(group.get("initial_lr", group["lr"])) for group in groups)
        rate = self.job.recipe.learning_rate
        assert rate is not None  # the configured optimizer has one
        return (rate,) * len(groups)

    def _optimizer_state(self, *, here: bool = False) -> dict[str, np.ndarray]:
        """Signatures of the optimizer's tensors by name, from any rank that has them, or only this rank's if `here`.
        Collective unless `here`; always collective for sharded tensors."""
        mine = {n: self._sign(n.rpartition(": ")[0], full(t.detach())) for n, t in self._optimizer_tensors().items()}
        if here or self.place.world_size == 1:
            return mine
        return {name: value for theirs in reversed(self.place.gathered(mine)) for name, value in theirs.items()}

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        names = {id(p): name for name, p in self._parameters.items()}
        return {
            f"{names.get(id(p), 'unnamed')}: {key}": value
            for p, entries in self._setup.optimizer.state.items()
            for key, value in sorted(entries.items())
            if isinstance(value, torch.Tensor)
        }

    def _formats_kept(self) -> dict[str, str]:
        """Number formats of this rank's part of parameters, buffers and the optimizer's tensors, by name."""
        kept = {**self._optimizer_tensors(), **dict(self._setup.parallel.module.named_buffers()), **self._parameters}
        local = {n: t.to_local() if isinstance(t, DTensor) else t.detach() for n, t in kept.items() if not t.is_sparse}
        # one that was never updated still fits into the type in which it was drawn
        return {n: "" if f == "fp32" and n in self._parameters else f for n, f in formats_of(local).items()}

    def _own_buffers(self) -> dict[str, np.ndarray]:
        buffers = self._setup.parallel.module.named_buffers()
        return {n: self._sign(n, full(b.detach()).to_dense()) for n, b in buffers if b.is_floating_point()}

    def _state_at(self, step: int) -> Restored:
        """The state after a step, or its mean if replicas train separately, as in a checkpoint. Collective."""
        parameters, apart = self._signatures(), self._setup.parallel.replicas_differ
        state, buffers = self._optimizer_state(here=apart), self._buffer_signatures()
        if apart:
            parameters = np.mean(self.place.gathered(parameters), axis=0)
            state, buffers = (_mean_by_name(self.place.gathered(mine)) for mine in (state, buffers))
        return Restored(step, parameters, state, buffers)

    def _buffer_signatures(self) -> dict[str, np.ndarray]:
        averaging = self._setup.averaging
        averages = {f"{AVERAGE_OF}{name}": value for name, value in averaging.averages.items()}
        if averages:
            averages[f"{AVERAGE_OF}the weights, by its count of steps,"] = torch.tensor([averaging.num_updates])
        tensors = {**dict(self._setup.parallel.module.named_buffers()), **averages}
        return self._whole({n: self._sign(n, full(t.detach()).to_dense().double()) for n, t in tensors.items()})

    def _keep_values(self) -> None:
        tensors = {**self._parameters, **dict(self._setup.parallel.module.named_buffers())}
        if sum(t.numel() * t.element_size() for t in tensors.values()) > LARGEST_KEPT_BYTES // self.place.world_size:
            return
        everyone = self.place.gathered({name: full(t.detach()).cpu().clone() for name, t in tensors.items()})
        if self.place.rank == 0:
            self.values[self._step] = everyone

    def _signatures(self) -> np.ndarray:
        return self._in_order({name: self._sign(name, full(p.detach())) for name, p in self._parameters.items()})

    def _in_order(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """One row for each parameter of the whole model, from this rank or from one that has the parameter."""
        whole = {**self._whole(rows), **rows}
        return np.array([whole[name] for name in self._names])

    def _whole(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Values by name, with those of this replica's other ranks if each has only a part; collective in that case."""
        if not self._has_parts:
            return mine
        everyone = self.place.gathered(mine)
        ours = [everyone[rank] for rank in self.place.mesh.replica(self.place.data_rank)]
        return {name: value for theirs in reversed(ours) for name, value in theirs.items()}

    def _keep_final(self) -> None:
        tensors = {**self._parameters, **dict(self._setup.parallel.module.named_buffers())}
        if (
            sum(self._whole({n: t.numel() * t.element_size() for n, t in tensors.items()}).values())
            > LARGEST_KEPT_BYTES
        ):
            return
        whole = self._whole({name: full(t.detach()).cpu().to_dense() for name, t in tensors.items()})
        formats = self._whole({n: number_format(full(p.detach())) for n, p in self._parameters.items()})
        self._parameter_formats = tuple(formats[name] for name in self._names)
        if self.place.rank == 0:
            # numpy has no bf16; copied, since the parameter still changes
            self._final = {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy().copy() for n, t in whole.items()}

    def _buffer_digest(self) -> bytes:
        digest = hashlib.sha256()
        for buffer in dense_buffers(self._setup.parallel.module):
            local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
            digest.update(local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.digest()


def _mean_by_name(everyone: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Mean of the ranks' signatures by name, for names that all ranks have."""
    shared = [name for name in everyone[0] if all(name in theirs for theirs in everyone)]
    return {name: np.mean([theirs[name] for theirs in everyone], axis=0) for name in shared}


def _stand_still(setup: Setup) -> None:
    """Disable updates, so that every step starts from the same parameters."""

    def stop(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0

    if not isinstance(setup.schedule, Schedule):  # it sets the rates by rules of its own
        setup.optimizer.register_step_pre_hook(stop)
        return
    for group in setup.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = 0.0
    setup.schedule.base_lrs = [0.0] * len(setup.schedule.base_lrs)


def _row_digests(batch: RankBatch) -> np.ndarray:
    names = sorted(batch.columns)
    digests = [
        hashlib.blake2b(b"".join(batch.columns[n][row].tobytes() for n in names), digest_size=8).digest()
        for row in range(batch.num_rows)
    ]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _random_state(device: torch.device) -> bytes:
    """Digest of the states of all generators from which a model may draw."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        digest.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    digest.update(pickle.dumps((np.random.get_state(), random.getstate())))
    return digest.digest()
