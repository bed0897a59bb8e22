"""Workloads of a few hundred parameters, and the ways a test runs them: here, as one rank of many, or in plain torch.

Used with the loop itself, without Ray and MLflow: `scaleray.training.loop` hands its records to a list.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.model_layout import FINAL_WEIGHTS, TRAINED_WEIGHTS
from scaleray.common.seeding import seed_everything, stream_seed
from scaleray.config import RunConfig, load_config
from scaleray.config.recipe.derive import derive
from scaleray.data import TRAIN, RankBatch, Split, load_sources
from scaleray.parallel import Replicated
from scaleray.records.run_record import (
    CheckpointRecord,
    EvaluationRecord,
    EventRecord,
    StepRecord,
    WorkerMessage,
    WorkerSummary,
)
from scaleray.strategies.contract.weight_shares import WeightShare
from scaleray.training import loop
from scaleray.training.health.worker_progress import Progress
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.model_setup import prepare
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.state.checkpointing import Checkpointing, Control
from scaleray.training.step.step import TrainStep

NUM_FEATURES, NUM_CLASSES = 6, 3
DEFAULTS: dict[str, Any] = {
    "workload.name": "small_runs:Classify",
    "batch.global_size": 8,
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 0.1,
    "stop.after": "2 epochs",
    "precision.dtype": "fp64",
    "tracking.every_steps": 1,
    "data.chunk_mib": 64 / 2**20,  # a step or two: rows of a step lie in one chunk, and in several
    "tracking.system_metrics": False,
    "data.timeout_s": 30.0,
    "scale.gpus_per_worker": 0,  # as a driver without any decides
}


def rows(num: int, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Features and the class that a fixed linear map of them gives, so that there is something to learn."""
    draw = np.random.default_rng(seed)
    features = draw.normal(size=(num, NUM_FEATURES)).astype(np.float32)
    towards = np.random.default_rng(99).normal(size=(NUM_FEATURES, NUM_CLASSES))
    return {"x": features, "y": (features @ towards).argmax(axis=1)}


class Classify:
    """A two-layer network on labelled rows; subclasses change the network. Counts samples."""

    def __init__(self, num_rows: int = 26, num_val: int = 0) -> None:
        self.num_rows, self.num_val = num_rows, num_val

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))

    def datasets(self) -> dict[str, Any]:
        splits = {TRAIN: rows(self.num_rows)}
        return {**splits, "val": rows(self.num_val, seed=1)} if self.num_val else splits

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])

    def tensor_plan(self, model: nn.Module, *, size: int, sequence_parallel: bool) -> Any:
        return {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {"accuracy": ((model(batch["x"]).argmax(dim=1) == batch["y"]).sum(), len(batch["y"]))}


class Tokens(Classify):
    """Sequences padded to one length: the loss counts tokens, of which every row has another number."""

    length, vocabulary = 7, 11

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(self.vocabulary, 5), nn.Linear(5, self.vocabulary))

    def datasets(self) -> dict[str, Any]:
        draw = np.random.default_rng(5)
        tokens = draw.integers(0, self.vocabulary, size=(self.num_rows, self.length + 1))
        real = np.arange(self.length) < draw.integers(1, self.length + 1, size=(self.num_rows, 1))
        return {TRAIN: {"tokens": tokens, "real": real}}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        tokens, real = batch["tokens"], batch["real"]
        losses = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (losses * real.flatten()).sum(), real.sum()

    def tensor_plan(self, model: nn.Module, *, size: int, sequence_parallel: bool) -> Any:
        return {"0": Replicated(), "1": ColwiseParallel(output_layouts=Replicate())}

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {}


class TiedAndFrozen(Tokens):
    """The head is the embedding itself, and the layer between them is frozen."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Embedding(self.vocabulary, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, self.vocabulary, bias=False)
        )
        model[3].weight = model[0].weight
        model[1].requires_grad_(False)
        return model

    def tensor_plan(self, model: nn.Module, *, size: int, sequence_parallel: bool) -> Any:
        by_vocabulary = {
            "0": RowwiseParallel(input_layouts=Replicate()),
            "3": ColwiseParallel(output_layouts=Replicate()),
        }
        return {**by_vocabulary, "1": Replicated()}


class WithBatchNorm(Classify):
    """Batch statistics in buffers."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))

    def tensor_plan(self, model: nn.Module, *, size: int, sequence_parallel: bool) -> Any:
        return {"0": ColwiseParallel(output_layouts=Replicate()), "1": Replicated(), "3": Replicated()}


class WithDropout(Classify):
    """Half of the hidden units dropped."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(NUM_FEATURES, 64), nn.Dropout(0.5), nn.Linear(64, NUM_CLASSES))


@dataclass(frozen=True)
class Finished:
    """What a run left: its records in order, and the final weights (rank 0); beside an average, the trained ones."""

    messages: list[WorkerMessage]
    weights: dict[str, torch.Tensor]
    summary: WorkerSummary | None
    trained: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> list[StepRecord]:
        return [m for m in self.messages if isinstance(m, StepRecord)]

    @property
    def events(self) -> list[str]:
        return [m.text for m in self.messages if isinstance(m, EventRecord)]

    @property
    def checkpoints(self) -> list[CheckpointRecord]:
        return [m for m in self.messages if isinstance(m, CheckpointRecord)]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        return [step.grad_norm for step in self.steps if step.grad_norm is not None]

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        return [m for m in self.messages if isinstance(m, EvaluationRecord)]


def make_job(workload: Any, flags: Mapping[str, Any] | None = None, *, world_size: int = 1) -> tuple[TrainJob, dict]:
    """The job of a workload as `train` would make it, and its sources. flags: dotted keys over DEFAULTS."""
    config = load_config(flags={**DEFAULTS, "scale.workers": world_size, **(flags or {})}, environ={})
    return job_of(config, workload)


def job_of(config: RunConfig, workload: Any) -> tuple[TrainJob, dict]:
    """The job of a workload under a config that is ready."""
    sources = load_sources(workload, in_steps=config.is_in_steps)
    splits = {name: Split.of(name, source, workload) for name, source in sources.items()}
    recipe = derive(config, splits[TRAIN].size)
    return TrainJob(config, recipe, workload, splits, time.time()), sources


class Killed(KeyboardInterrupt):
    """What ends a run in the middle of a test, as a SIGKILL would: nothing in the loop expects it, and it is taken for
    nothing that the workload's own code has raised."""


class KillAt:
    """A probe that ends the run on every rank when the step after `step` begins."""

    def __init__(self, step: int, checkpointing: Checkpointing | None) -> None:
        self.step, self.checkpointing = step, checkpointing

    def on_batch(self, batch: Any) -> None:
        if batch.step == self.step:
            if self.checkpointing is not None:
                self.checkpointing.saver.wait()  # which steps are safe must not depend on the machine's speed
            raise Killed

    def on_setup(self, setup: Any) -> None: ...

    def on_gradients(self, correction: float) -> None: ...

    def on_step(self, result: Any, learning_rate: float) -> None: ...


def train(
    place: RankContext,
    workload: Any,
    flags: Mapping[str, Any] | None = None,
    *,
    folder: Any = None,
    kill_at: int | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Finished:
    """Run the loop as the worker at `place`; every rank of a pool calls it.

    folder: of the run, for its checkpoints; None is none. kill_at: end the run when so many steps are complete.
    """
    job, sources = make_job(workload, flags, world_size=place.world_size)
    return train_job(
        place, job.on(place.world_size), sources, folder=folder, kill_at=kill_at, facts=facts, progress=progress
    )


def train_job(
    place: RankContext,
    job: TrainJob,
    sources: Mapping[str, Any],
    *,
    folder: Any = None,
    kill_at: int | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    control: Control | None = None,
) -> Finished:
    """Run the loop on a job that is ready. control: what reaches it from outside, where it has a folder."""
    messages: list[WorkerMessage] = []

    checkpointing = None
    if folder is not None:
        catalog = Catalog.of_run(str(folder), job.config.checkpoint.copy_path)
        checkpointing = Checkpointing(job, place, catalog, emit=messages.append, facts=facts, control=control)
    weights: dict[str, dict[str, torch.Tensor]] = {FINAL_WEIGHTS: {}, TRAINED_WEIGHTS: {}}

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        summary = loop.run(
            job,
            place,
            sources=sources,
            emit=messages.append,
            save_weights=lambda share, name: weights[name].update(brought_together(share, place)),
            checkpointing=checkpointing,
            probe=KillAt(kill_at, checkpointing) if kill_at is not None else None,
            progress=progress,
        )
    except Killed:
        summary = None
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    return Finished(messages, weights[FINAL_WEIGHTS], summary, weights[TRAINED_WEIGHTS])


def brought_together(share: WeightShare, place: RankContext) -> dict[str, torch.Tensor]:
    """All ranks' final weights on rank 0, in the model's order; nothing elsewhere."""
    if not share.layout:
        return share.tensors
    everyone: list[Any] = [None] * place.world_size
    dist.gather_object(share.tensors, everyone if place.rank == 0 else None, group=place.group)
    found = {name: value for theirs in everyone if theirs for name, value in theirs.items()}
    return {name: found[name] for name in share.layout} if place.rank == 0 else {}


def train_alone(workload: Any, flags: Mapping[str, Any] | None = None, **options: Any) -> Finished:
    """One worker in this process, its global generators left as they were."""
    with same_generators():
        return train(RankContext(), workload, flags, **options)


class same_generators:
    """Context that puts the global random generators back."""

    def __enter__(self) -> None:
        self._torch, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def __exit__(self, *exc: object) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


class Stepper:
    """Steps of one rank, without the loop, so that a test can look between them. `stepper(1)` takes the first."""

    def __init__(self, place: RankContext, workload: Any, flags: Mapping[str, Any]) -> None:
        self.job, self.sources = make_job(workload, flags, world_size=place.world_size)
        self.place = place = replace(place, degrees=self.job.degrees)
        self.setup = prepare(self.job.workload, self.job.config, self.job.recipe, place)
        self.parallel = self.setup.parallel
        self.step = TrainStep(
            self.job.workload, self.setup, self.job.config, self.job.recipe, place, gives_tuples=False
        )
        self.plan = self.job.train_plan()

    def __call__(self, number: int, *, want_norm: bool = True) -> StepRecord:
        """Take step `number`, from 1; ranks synchronise if the strategy says so."""
        shares = self.job.recipe.worker_shares
        rank, size = self.place.data_rank, self.place.data_parallel_size
        rows = self.sources[TRAIN].read(self.plan.rank_indices(number - 1, rank, size, shares))
        batch = RankBatch(number - 1, rows, len(next(iter(rows.values()))))
        synchronises = self.parallel.synchronises(number)
        return self.step(batch, num_rows=self.plan.num_rows(number - 1), want_norm=want_norm, synchronises=synchronises)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of this rank's parameters."""
        return {name: value.detach().clone() for name, value in self.parallel.module.named_parameters()}


@dataclass(frozen=True)
class PlainRun:
    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def train_in_plain_torch(workload: Any, flags: Mapping[str, Any] | None = None) -> PlainRun:
    """The oracle: the same global batches through nothing but torch, one whole batch a step."""
    job, sources = make_job(workload, flags)
    config, plan = job.config, job.train_plan()
    dtype = torch.float64 if config.precision.dtype == "fp64" else torch.float32
    losses, norms = [], []
    with same_generators():
        seed_everything(stream_seed(config.seed, "model"))
        model = workload.build_model().to(dtype)
        seed_everything(stream_seed(config.seed, "dropout", 0))
        optimizer = plain_optimizer(config, [p for p in model.parameters() if p.requires_grad])
        for step in range(job.recipe.total_steps):
            batch = {
                name: torch.from_numpy(values)
                for name, values in sources[TRAIN].read(plan.global_indices(step)).items()
            }
            batch = {n: v.to(dtype) if v.is_floating_point() else v for n, v in batch.items()}
            optimizer.zero_grad()
            total, count = workload.loss(model, batch)
            loss = total / count
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm or float("inf"))
            optimizer.step()
            losses.append(loss.item())
            norms.append(norm.item())
    return PlainRun(losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()})


def plain_optimizer(config: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own optimizer with the config's values, no rule applied. Fused, as ours: other kernels round differently."""
    o = config.optimizer
    if o.name == "sgd":
        return torch.optim.SGD(
            parameters, o.learning_rate, o.momentum, weight_decay=o.weight_decay, nesterov=o.nesterov, fused=True
        )
    return torch.optim.AdamW(parameters, o.learning_rate, o.betas, o.epsilon, o.weight_decay, fused=True)


def largest_difference(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """Largest difference between two state dicts, relative to the largest value of each tensor, or to 1e-9 where that
    is smaller: biases of keys in an attention have no gradient but rounding."""
    assert left.keys() == right.keys()
    return max(
        ((left[n].double() - right[n].double()).abs().max() / left[n].double().abs().max().clamp_min(1e-9)).item()
        for n in left
    )


def relative_differences(left: list[float], right: list[float]) -> Iterator[float]:
    """|a - b| / |a|, one by one."""
    return (abs(a - b) / max(abs(a), 1e-12) for a, b in zip(left, right, strict=True))


def with_strategy(job: TrainJob, name: str) -> TrainJob:
    """The same job under another strategy of the table, even one that the config does not know."""
    return dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, strategy=name))
