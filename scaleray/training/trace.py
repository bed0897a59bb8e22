"""A probe that writes down what every step did, and a workload whose model is made repeatable on any number of workers."""

from __future__ import annotations

import hashlib
import math
import pickle
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from scaleray.data import RankBatch
from scaleray.reproducibility.equivalence import (
    SMALL_GRADIENT,
    Signer,
    StepTrace,
    Trace,
    number_format,
    signature_differences,
)
from scaleray.strategies.parallel import full
from scaleray.training.fine_tuning import adapt
from scaleray.training.job import TRAIN, TrainJob
from scaleray.training.micro_batches import as_user_batch, micro_batches, to_device
from scaleray.training.model_setup import Setup
from scaleray.training.place import Place
from scaleray.training.step import StepResult

NOTHING = "nothing"
LARGEST_KEPT_BYTES = 2**30  # larger models are compared by signature at the end, too
MIXTURE_PROJECTIONS = 16


class Quieted:
    """A workload whose model has lost what cannot be repeated on another number of workers.

    what: NOTHING leaves it; MODULES sets dropout to 0 and freezes BatchNorm's statistics; EVERYTHING puts the whole
    model into evaluation mode. found: what there was to quieten; loss_dtype: the type of the losses.
    """

    MODULES, EVERYTHING = "modules", "everything"

    def __init__(self, workload: Any, what: str) -> None:
        self._workload, self._what = workload, what
        self.found: list[str] = []
        self.loss_dtype = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def build_model(self) -> Any:
        model = self._workload.build_model()
        if isinstance(model, nn.Module) and self._what != NOTHING:
            self._quieten(model)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        result = self._workload.loss(model, batch)
        if isinstance(result, tuple) and isinstance(result[0], torch.Tensor):
            self.loss_dtype = str(result[0].dtype).removeprefix("torch.")
        return result

    def _quieten(self, model: nn.Module) -> None:
        found = set()
        for module in model.modules():
            # layers keep their rate as `p`, attention and recurrent networks as `dropout`
            for name in ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else ("dropout",):
                if isinstance(rate := getattr(module, name, None), float) and rate > 0:
                    setattr(module, name, 0.0)
                    found.add("dropout")
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                _freeze_statistics(module)
                found.add("BatchNorm")
        if self._what == self.EVERYTHING:
            for module in model.modules():
                _stay_in_evaluation(module)
            found = {"everything"}
        self.found = sorted(found, reverse=True)


def _freeze_statistics(module: Any) -> None:
    if module.running_mean is None:  # without statistics of its own it would use the batch's even in evaluation mode
        module.running_mean, module.running_var = torch.zeros(module.num_features), torch.ones(module.num_features)
    _stay_in_evaluation(module)


def _stay_in_evaluation(module: nn.Module) -> None:
    module.eval()
    module.train = lambda mode=True: module  # type: ignore[method-assign] # a loss may call model.train()


class TraceProbe:
    """Records a Trace of a run. Every rank has one; they exchange what they saw after each step.

    take_apart_at: a step (from 1) whose gradient is decomposed into those of every rank's micro-batches, see `shares`;
    the job's workload then builds the model that is taken for that.
    """

    def __init__(self, place: Place, job: TrainJob, *, take_apart_at: int | None = None) -> None:
        self.place, self.job, self.take_apart_at = place, job, take_apart_at
        self.shares: tuple[np.ndarray, np.ndarray] | None = None
        """Weights of micro-batches in the gradient, as `causes.from_shares` takes them; None where it could not be done."""
        self.has_begun = False
        """The model is set up: what fails now, fails in training."""
        self._sign = Signer()
        self._steps: list[StepTrace] = []
        self._final: dict[str, np.ndarray] = {}

    def on_setup(self, setup: Setup) -> None:
        self._setup = setup
        self._parameters = dict(setup.parallel.module.named_parameters())
        self._names = setup.parallel.parameter_names or tuple(self._parameters)
        self._has_parts = bool(setup.parallel.parameter_names)
        self.has_begun = not self._has_parts  # a pipeline may still refuse the model with the first rows
        dtypes = self._whole({n: str(p.dtype).removeprefix("torch.") for n, p in self._parameters.items()})
        self._dtypes = tuple(dtypes[name] for name in self._names)
        self._initial = self._signatures()
        self._updates: list[tuple[float, ...]] = []
        setup.optimizer.register_step_post_hook(
            lambda optimizer, args, kwargs: self._updates.append(tuple(float(g["lr"]) for g in optimizer.param_groups))
        )

    def on_batch(self, batch: RankBatch) -> None:
        self.has_begun = True
        self._step, self._rows = batch.step + 1, _row_digests(batch)
        self._updates.clear()
        self._random_before, self._buffers_before = _random_state(self.place.device), self._buffer_digest()
        self._pieces = self._take_apart(batch) if self._step == self.take_apart_at else None

    def on_gradients(self, correction: float) -> None:
        whole = {n: None if p.grad is None else full(p.grad) for n, p in self._parameters.items()}
        formats = self._whole({n: "" if g is None else number_format(g) for n, g in whole.items()})
        self._formats = tuple(formats[name] for name in self._names)
        empty = np.zeros(2 + self._sign.num_projections)
        self._gradients = self._in_order(
            {n: empty if g is None else self._sign(n, g) * correction for n, g in whole.items()}
        )
        if self._pieces is not None:
            signer = Signer(MIXTURE_PROJECTIONS)
            target = {n: np.zeros(MIXTURE_PROJECTIONS) if g is None else signer(n, g)[2:] for n, g in whole.items()}
            self._target = self._in_order(target).reshape(-1) * correction

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        mine = {
            "rows": self._rows,
            "gradients": self._gradients,
            "parameters": self._signatures(),
            "random_before": self._random_before,
            "draws": self._random_before != _random_state(self.place.device),
            "changes": self._buffers_before != self._buffer_digest(),
            "loss": (result.loss * result.count, result.count),
        }
        everyone = self._gather(mine)
        first = everyone[0]
        replicas = everyone[:: self._replica_size]  # their workers have the same rows and random numbers
        loss, count = result.loss, result.count
        if result.is_own:  # of replicas that train apart; gradients are rank 0's own then, too
            loss_sum, count = (sum(theirs["loss"][part] for theirs in everyone) for part in (0, 1))
            loss = loss_sum / count if count else math.nan
        grad_norm = float(np.linalg.norm(first["gradients"][:, 0]))
        floor = SMALL_GRADIENT * grad_norm
        self._steps.append(
            StepTrace(
                step=self._step,
                loss=loss,
                count=count,
                grad_norm=grad_norm,
                used_norm=result.grad_norm,
                updates=tuple(self._updates),
                rows=np.concatenate([theirs["rows"] for theirs in replicas]),
                gradients=first["gradients"],
                parameters=first["parameters"],
                gradient_spread=_spread([theirs["gradients"] for theirs in everyone], floor),
                parameter_spread=_spread([theirs["parameters"] for theirs in everyone], 0.0),
                gradient_formats=self._formats,
                draws_random_numbers=any(theirs["draws"] for theirs in everyone),
                shares_random_state=len({theirs["random_before"] for theirs in replicas}) < len(replicas),
                changes_buffers=any(theirs["changes"] for theirs in everyone),
            )
        )
        if self._pieces is not None:
            self.shares = self._solve(self._gather((*self._pieces, self._target))[:: self._replica_size])
        if self._step == self.job.recipe.total_steps:
            self._keep_final()

    def trace(self, *, loss_dtype: str = "", quieted: tuple[str, ...] = ()) -> Trace:
        """What was recorded."""
        clip_norm = self.job.config.optimizer.clip_norm
        return Trace(
            self._names, self._dtypes, self._initial, tuple(self._steps), self._final, clip_norm, loss_dtype, quieted
        )  # fmt: skip

    @property
    def _replica_size(self) -> int:
        return self.job.config.model_parallel_size if self.place.world_size > 1 else 1

    def _signatures(self) -> np.ndarray:
        return self._in_order({name: self._sign(name, full(p.detach())) for name, p in self._parameters.items()})

    def _in_order(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """One row for each parameter of the whole model; this rank's own where it has one, else that of the rank that has."""
        whole = {**self._whole(rows), **rows}
        return np.array([whole[name] for name in self._names])

    def _whole(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Values by name, with those of the other ranks of this replica where ranks have parts. Collective then."""
        if not self._has_parts:
            return mine
        everyone, size = self._gather(mine), self._replica_size
        first = self.place.rank // size * size
        return {name: value for theirs in reversed(everyone[first : first + size]) for name, value in theirs.items()}

    def _keep_final(self) -> None:
        tensors = {**self._parameters, **dict(self._setup.parallel.module.named_buffers())}
        if (
            sum(self._whole({n: t.numel() * t.element_size() for n, t in tensors.items()}).values())
            > LARGEST_KEPT_BYTES
        ):
            return
        whole = self._whole({name: full(t.detach()).cpu() for name, t in tensors.items()})
        if self.place.rank == 0:
            # numpy has no bf16; a copy, since a parameter goes on living
            self._final = {n: (t.float() if t.dtype == torch.bfloat16 else t).numpy().copy() for n, t in whole.items()}

    def _gather(self, mine: Any) -> list[Any]:
        if self.place.world_size == 1:
            return [mine]
        everyone: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(everyone, mine)
        return everyone

    def _buffer_digest(self) -> bytes:
        digest = hashlib.sha256()
        for buffer in self._setup.parallel.module.buffers():
            local = buffer.to_local() if isinstance(buffer, DTensor) else buffer
            digest.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.digest()

    def _take_apart(self, batch: RankBatch) -> tuple[np.ndarray, list[float]]:
        """Signatures (micro-batches, values) of each micro-batch's own gradient, without any strategy, and its count."""
        signer, model = Signer(MIXTURE_PROJECTIONS), self._plain_model()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gives_tuples = self.job.splits[TRAIN].gives_tuples
        gradients, counts = [], []
        for arrays, weight in micro_batches(batch, self.job.recipe.micro_batch_size):
            columns = to_device(arrays, self.place.device, self._setup.precision.input_dtype)
            with self._setup.precision.autocast():
                loss, count = self.job.workload.loss(model, as_user_batch(columns, gives_tuples))
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            by_name = dict(zip(trained, found, strict=True))
            pieces = [
                np.zeros(MIXTURE_PROJECTIONS) if (g := by_name.get(name)) is None else signer(name, g)[2:]
                for name in self._names
            ]
            gradients.append(np.concatenate(pieces) * bool(weight))
            counts.append(float(count) * bool(weight))
        return np.array(gradients), counts

    def _plain_model(self) -> nn.Module:
        """A model of its own with the values of now, which no strategy has touched. Collective for sharded parameters."""
        with self.place.device:
            model: nn.Module = self.job.workload.build_model()
        adapt(model, self.job.config.fine_tuning)
        if self.job.config.precision.dtype == "fp64":
            model.double()
        values = {**self._parameters, **dict(self._setup.parallel.module.named_buffers())}
        values = self._whole({name: full(tensor.detach()) for name, tensor in values.items()})
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                tensor.copy_(values[name])
        return model

    def _solve(
        self, everyone: list[tuple[np.ndarray, list[float], np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Each rank's gradient as a mixture of all micro-batches' gradients; None where it is no such mixture."""
        most = max(len(counts) for _, counts, _ in everyone)
        counts = np.array([[*counts, *[0.0] * (most - len(counts))] for _, counts, _ in everyone])
        columns = np.concatenate([gradients for gradients, _, _ in everyone]).T
        there = np.concatenate([np.array(c) > 0 for _, c, _ in everyone])
        shares = np.zeros((len(everyone), *counts.shape))
        positions = [(rank, piece) for rank, (_, c, _) in enumerate(everyone) for piece in range(len(c))]
        kept = [position for position, is_there in zip(positions, there, strict=True) if is_there]
        for view, (_, _, target) in enumerate(everyone):
            weights, *_ = np.linalg.lstsq(columns[:, there] / counts.sum(), target, rcond=None)
            rest = columns[:, there] @ weights / counts.sum() - target
            if not np.linalg.norm(rest) <= 1e-6 * np.linalg.norm(target):
                return None
            for (rank, piece), weight in zip(kept, weights, strict=True):
                shares[view, rank, piece] = weight
        return shares, counts


def _row_digests(batch: RankBatch) -> np.ndarray:
    names = sorted(batch.columns)
    digests = [
        hashlib.blake2b(b"".join(batch.columns[n][row].tobytes() for n in names), digest_size=8).digest()
        for row in range(batch.num_rows)
    ]
    return np.frombuffer(b"".join(digests), dtype=np.uint64)


def _random_state(device: torch.device) -> bytes:
    """A digest of the generators that a model may draw from."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if device.type == "cuda":
        digest.update(torch.cuda.get_rng_state(device).numpy().tobytes())
    digest.update(pickle.dumps((np.random.get_state(), random.getstate())))
    return digest.digest()


def _spread(signatures: list[np.ndarray], floor: float) -> np.ndarray:
    """Largest relative difference between rank 0 and another, (parameters,)."""
    first = signatures[0]
    if len(signatures) == 1:
        return np.zeros(len(first))
    norms = np.max([s[:, 0] for s in signatures], axis=0)
    scale = np.maximum(norms, floor if math.isfinite(floor) else 0.0)
    return np.max([signature_differences(first, theirs, scale) for theirs in signatures[1:]], axis=0)
