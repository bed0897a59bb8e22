"""Steps that turn a model into a training set-up, in order. The reason for the order is stated next to each line."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.modules.dropout import _DropoutNd

from scaleray.common.equal_models import (
    Digests,
    check_equal_digests,
    check_equal_parameters,
    check_equal_structure,
    fingerprint_of,
)
from scaleray.common.seeding import seed_everything, stream_seed, use_deterministic_algorithms
from scaleray.config import RunConfig
from scaleray.config.averaging_pruning_fine_tuning import AveragingSettings
from scaleray.config.parallel import Degrees
from scaleray.config.recipe.values import Recipe
from scaleray.config.strategy_traits import traits_of
from scaleray.errors import ConfigError, WorkloadError
from scaleray.parallel.context import Context, sequences_shared
from scaleray.profiling.collectives import ALL_TO_ALL, SEND
from scaleray.records.phases import Enter
from scaleray.strategies import STRATEGIES, Parallel
from scaleray.strategies.ddp import looking_for_unused
from scaleray.strategies.sharding.paged_build import PagedBuild
from scaleray.strategies.traffic.ledger import Ledger
from scaleray.training.setup import activation_checkpointing, fine_tuning, float8, optimizers, precision, pruning
from scaleray.training.setup.averaging import Averaging, averaging_of
from scaleray.training.setup.compilation import Compilation, compiled
from scaleray.training.setup.own_optimizer import InUse
from scaleray.training.setup.own_schedule import take_step
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.several_optimizers import config_for
from scaleray.training.setup.weighted_losses import check_batch_loss, losses_of
from scaleray.workload import built_model


class RateScale:
    """Factor on every rate of an optimizer, in addition to its schedule. It is applied to the optimizer's groups only
    during steps, so it does not affect the schedule.

    factor: that of the next step. due: requested factors with their first steps. code: number computed from all
    requests of this process."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.due: list[tuple[int, float]] = []
        self.code = 0

    def change(self, factor: float, *, first_step: int) -> None:
        """Multiply all rates by `factor` from step `first_step` on."""
        self.due.append((first_step, factor))
        self.code = zlib.crc32(repr((self.code, first_step, factor)).encode()) % 2**20 + 1

    def signals(self) -> tuple[float, float]:
        """Numbers whose sums over the workers show whether all workers made the same requests; zeros if none did."""
        return float(self.code), float(self.code * self.code)

    def begin_step(self, number: int) -> None:
        """Apply the factors due in step `number`."""
        for first_step, factor in self.due:
            self.factor *= factor if first_step <= number else 1.0
        self.due = [one for one in self.due if one[0] > number]

    @contextlib.contextmanager
    def in_use(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Context in which the rates of the step are set in the optimizer's groups."""
        if self.factor == 1.0:
            yield
            return
        groups = [group for group in optimizer.param_groups if "lr" in group]
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * self.factor
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {"factor": self.factor, "due": [list(one) for one in self.due]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.factor, self.due = state["factor"], [(int(step), factor) for step, factor in state["due"]]


_meshes: dict[tuple[Any, ...], DeviceMesh] | None = None


@contextlib.contextmanager
def meshes_kept() -> Iterator[Callable[[], None]]:
    """Context in which trainings with the same degrees share a mesh, including its process groups and DTensor's plans
    for it. Yields a function that discards the mesh, so that the next training makes a new one."""
    global _meshes
    before, _meshes = _meshes, {}
    try:
        yield _meshes.clear
    finally:
        _meshes = before


def _kept(make: Callable[..., DeviceMesh], *args: Any) -> DeviceMesh:
    """The mesh made by `make`, or the one made earlier for the same arguments if meshes are shared."""
    if _meshes is None:
        return make(*args)
    if (make, args) not in _meshes:
        _meshes[make, args] = make(*args)
    return _meshes[make, args]


def build_mesh(degrees: Degrees, strategy: str, device_type: str) -> DeviceMesh:
    """The mesh of all workers. Collective. Axes from the outside in: `pp` for pipeline; `dp` for workers with samples
    or tokens of their own, or `replicate` and `shard` if both are above 1, with `dp` spanning the two; `tp` for tensor.
    The workers of a context are neighbours along `shard` or `dp`, and the state is sharded over them, too. Replicas
    that train separately on several workers each have `replicate` and the axes of one replica."""
    # DTensor keeps the results of its planning by the layout of a mesh, process groups included: in a process that has
    # left its group and joined another, as between two sizes of `verify`, they would name groups that are gone, and
    # hold their threads, which poll
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    shard = degrees.shard * degrees.context
    both = shard > 1 if strategy == "fsdp" else degrees.shard > 1 or strategy == "tensor"
    data = {"replicate": degrees.replicate, "shard": shard} if degrees.replicate > 1 and both else {}
    is_apart = traits_of(strategy).trains_apart and degrees.whole > 1
    if is_apart:
        data = {"replicate": degrees.replicate, "dp": degrees.shard}
    axes = {
        **({"pp": degrees.pipeline} if strategy == "pipeline" or degrees.pipeline > 1 else {}),
        **(data or {"dp": degrees.replicate * shard}),
        **({"tp": degrees.tensor} if strategy == "tensor" or degrees.tensor > 1 else {}),
    }
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if data and len(axes) > 2 and not is_apart:
        mesh["replicate", "shard"]._flatten("dp")
    return mesh


def _context_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """Mesh whose axis `context` spans the workers that share their sequences. Collective."""
    sizes = degrees.workers // (degrees.context * degrees.tensor), degrees.context, degrees.tensor
    return init_device_mesh(device_type, sizes, mesh_dim_names=("others", "context", "tensor"))


def _with_exchanges(parallel: Parallel, shared: Context, *, sees_all: bool) -> Parallel:
    """The strategy, extended by passes that exchange tokens of sequences, with that traffic counted. sees_all: the
    strategy already counts it."""
    if sees_all:
        return parallel
    sent = Ledger()
    entry = sent.entry("context", shared.size, ALL_TO_ALL if shared.exchange == "heads" else SEND)
    shared.run = entry.run

    def tell_phases(enter: Enter) -> None:
        parallel.tell_phases(enter)
        sent.tell_phases(enter)

    return dataclasses.replace(
        parallel,
        forward_is_collective=True,
        bytes_sent=lambda: parallel.bytes_sent() + sent.num_bytes,
        collectives=lambda: [*parallel.collectives(), *sent.rows()],
        tell_phases=tell_phases,
    )


@dataclass(frozen=True)
class Setup:
    """Everything the loop needs to take steps."""

    parallel: Parallel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    precision: precision.Precision
    parameters: list[nn.Parameter]
    """Trained parameters of this rank, which hold the gradients after a backward pass. Listed before the first pass,
    because FSDP hides the parameters of a unit while it is gathered, as the last unit is after an evaluation."""
    num_parameters: int
    initial_hash: str
    pruning: pruning.Pruning | None = None
    compilation: Compilation | None = None
    averaging: Averaging = field(default_factory=lambda: Averaging(nn.Module(), AveragingSettings()))
    rate_scale: RateScale = field(default_factory=RateScale)
    """Factor that callbacks apply to the learning rate."""
    in_use: InUse = field(default_factory=InUse)
    """Values used by the workload's own optimizer or schedule in place of derived ones."""
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Callbacks that undo, in reverse order, the changes made to the user's model and to torch before the strategy."""

    def after_step(self, number: int) -> None:
        """Prepare the step after `number` by updating the learning rate and the average of the weights."""
        take_step(self.schedule, number)
        self.averaging.after_step(number)

    def close(self) -> None:
        """Restore the user's model to the form that `build_model` gave it, with trained weights. Collective."""
        self.parallel.close()
        self.undo.close()

    def let_go(self) -> None:
        """End a set-up whose model is no longer needed. Like `close` but without communication, so that this rank waits
        for no other. For an unsharded model the two are the same."""
        (self.parallel.let_go or self.parallel.close)()
        self.undo.close()


def prepare(
    workload: Any,
    config: RunConfig,
    recipe: Recipe,
    place: RankContext,
    *,
    is_resumed: bool = False,
    varied: Collection[str] = (),
) -> Setup:
    """Build the model and everything around it. Collective: every worker calls it.

    is_resumed: a checkpoint will be loaded into the model, so `workload.weights` is no longer needed. varied: keys of
    the config in which this training differs from the others of a sweep."""
    config = config_for(losses_of(workload), config, recipe.strategy)
    check_batch_loss(workload, config, recipe.strategy)
    with contextlib.ExitStack() as undo:
        if config.deterministic:
            use_deterministic_algorithms()
        elif place.device.type == "cuda":
            torch.backends.cudnn.benchmark = True  # steps have few shapes, of which the fastest convolution pays off
        # the same seed on every rank, so that every rank draws the same initial parameters
        seed_everything(stream_seed(config.seed, "model"))
        model = _spread_model(workload, config, recipe, place, undo)
        parallel, arithmetic = model.parallel, model.precision
        if config.workload.weights is not None and not is_resumed:
            # after the strategy, so that each rank reads its own shards only; nobody writes there meanwhile
            fine_tuning.load(parallel.module, workload, config.workload.weights, is_part=bool(parallel.parameter_names))
        if place.group is not None and _differs_between_ranks(parallel):
            # after the strategy, which knows what each rank has
            arithmetic = precision.share_loss_scale(arithmetic, parallel.module, place.group)
        if (digests := model.digests) is None or (config.workload.weights is not None and not is_resumed):
            # after the strategy, which may broadcast: what matters is what the first step starts from
            is_partitioned = parallel.is_partitioned and parallel.run_micro_batches is not None
            digests = check_equal_parameters(parallel.module, place.group, is_partitioned=is_partitioned)
        # the optimizer last: a strategy may have replaced parameters
        module, owns = parallel.module, parallel.owns
        optimizer, in_use = optimizers.build(workload, module, config, recipe, owns=owns, varied=varied)
        parallel.use_optimizer(optimizer)
        schedule, in_use = optimizers.build_schedule(workload, optimizer, config, recipe, in_use, varied=varied)
        # masks lie over ranks as the strategy has laid out the parameters, and clear the optimizer's state
        masks = pruning.build(parallel.module, optimizer, config.pruning, place.group)
        if masks is not None and masks.is_due(0) and not is_resumed:
            masks.prune(0)
        # from here on ranks must differ, or dropout would use the same mask on every rank; ranks of one replica must
        # not, as they may each compute a part of the same activations
        seed_everything(stream_seed(config.seed, "dropout", place.data_rank))
        return Setup(
            parallel=parallel,
            optimizer=optimizer,
            schedule=schedule,
            precision=arithmetic,
            parameters=[p for p in parallel.module.parameters() if p.requires_grad],
            num_parameters=model.num_parameters,
            initial_hash=fingerprint_of(digests),
            pruning=masks,
            averaging=averaging_of(parallel.module, optimizer, config, recipe.strategy),
            compilation=model.compilation,
            in_use=in_use,
            undo=undo.pop_all(),
        )


@dataclass(frozen=True)
class _SpreadModel:
    """Model that a strategy has spread over the workers, and facts collected beforehand."""

    parallel: Parallel
    precision: precision.Precision
    compilation: Compilation | None
    num_parameters: int
    digests: Digests | None
    """Digests of the values that all ranks have drawn alike; None if each rank still has the whole model."""


def _spread_model(
    workload: Any, config: RunConfig, recipe: Recipe, place: RankContext, undo: contextlib.ExitStack
) -> _SpreadModel:
    """Build the model, make the changes that require the whole model, and spread it over the workers. Collective."""
    with _building(config, recipe, place) as pages:
        model = _built(workload, place.device)
        check_model(model)
        # adapters and freezing before the strategy, which lays out parameters by whether they are trained
        fine_tuning.adapt(model, config.fine_tuning)
        # device before optimizer, which holds references to the parameters
        model.to(place.device)
        if place.group is not None:
            _refuse_renormalised(model)
        # dtype before the strategy: DDP sizes its buckets by the parameters it is given
        keeps_casts = config.activations.checkpointing == "none"
        arithmetic = precision.prepare(model, place.device, config.precision, keeps_casts=keeps_casts)
        # before what wraps forward passes, and before the strategy, which may replace the parameters that layers hold
        notes = float8.convert(model, place.device, config.precision, workload, undo)
        num_parameters = sum(p.numel() for p in model.parameters())
        # before the strategy, whose collectives would wait for ever for ranks that built another model
        check_equal_structure(model, place.group)
        # checkpointing before compiling: the compiler then sees what is computed again, and plans memory with it
        undo.callback(activation_checkpointing.apply(model, config.activations, workload))
        # compiling before the strategy: hooks that communicate stay outside the graphs, or would break them
        # without a word
        compilation = undo.enter_context(compiled(model, config, workload))
        # before each rank cuts its part out of its own model: afterwards nobody could tell
        digests = _check_equal_before_sharding(model, pages, config, recipe, place)
        mesh = _kept(build_mesh, place.mesh, recipe.strategy, place.device.type) if place.group else None
        shared = None
        if place.mesh.context > 1:
            group = _kept(_context_mesh, place.mesh, place.device.type).get_group("context")
            shared = Context.over(group, config.context.exchange)
            undo.enter_context(sequences_shared(model, shared))
        parallel = STRATEGIES[recipe.strategy](model, mesh, _with_fixed_buckets(config), workload)
        parallel.notes.extend(notes)
        if shared is not None:
            if any(isinstance(part, _DropoutNd) and part.p for part in model.modules()):
                parallel.notes.append("context: dropout draws the same mask for each worker's part of a sequence")
            parallel = _with_exchanges(parallel, shared, sees_all=recipe.strategy == "tensor")
    if config.memory.on_out_of_memory == "halve" and parallel.abandon is None:
        raise ConfigError(
            "memory.on_out_of_memory",
            "halve",
            f"under {recipe.strategy} ranks communicate within a pass, so no rank can abandon it alone",
            "use --memory.find-micro-size, or a smaller batch.micro_size",
        )
    return _SpreadModel(parallel, arithmetic, compilation, num_parameters, digests)


def _refuse_renormalised(model: nn.Module) -> None:
    """Raise WorkloadError for an embedding that is changed by its own forward pass, since workers would change
    different rows."""
    for name, part in model.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise WorkloadError(
                f"{name or 'the model'}.max_norm",
                part.max_norm,
                "its forward pass changes the rows that it looks up, on one worker only",
                "limit the norm of the looked-up rows in forward(), or train on one worker",
            )


def _built(workload: Any, device: torch.device) -> Any:
    """Build the user's model directly on its device if possible, without a copy of a large model on the CPU.

    Code that draws from a CPU generator or loads weights to the CPU fails this way and is run again on the CPU."""
    build = partial(built_model, workload)
    if device.type == "cpu":
        return build()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        with device:
            return build()
    except Exception:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
    return build()


def _building(
    config: RunConfig, recipe: Recipe, place: RankContext
) -> contextlib.AbstractContextManager[PagedBuild | None]:
    """Context in which the model is built and sharded."""
    is_fsdp = recipe.strategy not in ("tensor", "pipeline") and recipe.degrees.shard == recipe.degrees.whole > 1
    if not is_fsdp or config.fsdp.build_gib is None or place.group is None:
        return contextlib.nullcontext()
    return PagedBuild(place.group, bound_bytes=config.fsdp.build_gib * 2**30)


def _check_equal_before_sharding(
    model: nn.Module, pages: PagedBuild | None, config: RunConfig, recipe: Recipe, place: RankContext
) -> Digests | None:
    """Check that all ranks drew the same parameters, before each keeps only its own part. Collective."""
    is_sharded = recipe.strategy != "tensor" and recipe.degrees.shard > 1
    if not is_sharded or place.group is None:
        return None
    if pages is None:
        return check_equal_parameters(model, place.group)
    digests = pages.digests(model)
    check_equal_digests(digests, model, place.group)
    pages.finish(model)
    return digests


def _with_fixed_buckets(config: RunConfig) -> RunConfig:
    """The config with a fixed layout of DDP's buckets, if results must be bit-identical."""
    if not config.deterministic:
        return config
    # DDP lays its buckets out again after the first step, and so the order of its sums: a resumed run would start
    # with the first layout again. It does not do so while it looks for unused parameters.
    return looking_for_unused(config)


def _differs_between_ranks(parallel: Parallel) -> bool:
    """Whether one rank can have an overflow that the others do not have, in a synchronised step."""
    is_sharded = any(isinstance(p, DTensor) for p in parallel.module.parameters())
    return not parallel.replicas_differ and (is_sharded or parallel.is_partitioned)


def check_model(model: Any) -> None:
    """Raise WorkloadError if a model is not a module, has lazy parameters, or has no parameter that needs a
    gradient."""
    if not isinstance(model, nn.Module):
        raise WorkloadError("build_model()", type(model).__name__, "it must return a torch.nn.Module")
    lazy = [name for name, parameter in model.named_parameters() if nn.parameter.is_lazy(parameter)]
    if lazy:
        raise WorkloadError.problem(
            "the model",
            f"has lazy parameters ({lazy[0]}): their shapes must be known before the first batch",
            "run one dummy batch through it in build_model()",
        )
    if not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise WorkloadError.problem(
            "the model",
            f"has no trainable parameters ({count} frozen): at least one must need a gradient",
            "check requires_grad",
        )
