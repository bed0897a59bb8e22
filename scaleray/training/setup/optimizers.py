"""The configured optimizer with the derived learning rate, and its learning-rate schedule."""

import math
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from scaleray.config import RunConfig
from scaleray.config.optimizer_schedule import missing_rate
from scaleray.config.recipe.lr_rules import learning_rate_factor
from scaleray.config.recipe.values import Recipe
from scaleray.config.strategy_traits import traits_of
from scaleray.errors import ConfigError
from scaleray.training.setup import own_schedule
from scaleray.training.setup.large_batch_optimizers import Lamb, Lars
from scaleray.training.setup.own_optimizer import InUse, OptimizerValues, WithoutRate, acts_on_elements, build_own
from scaleray.training.setup.plateaus import ConfiguredPlateau, set_rate
from scaleray.training.setup.several_optimizers import check_losses
from scaleray.workload import brings_optimizer, brings_schedule


def build(
    workload: Any,
    model: nn.Module,
    config: RunConfig,
    recipe: Recipe,
    *,
    owns: Callable[[nn.Parameter], bool] = lambda p: True,
    varied: Collection[str] = (),
) -> tuple[torch.optim.Optimizer, InUse]:
    """Build the workload's own optimizer, or the configured one over all parameters that need a gradient, and return it
    with the config's settings in use. It retains only the parameters that this rank owns. varied: keys in which the
    trials of a sweep differ."""
    optimizer, in_use = _build(workload, model, config, recipe, varied)
    check_losses(workload, optimizer)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if owns(p)]
    return optimizer, in_use


def _build(
    workload: Any, model: nn.Module, config: RunConfig, recipe: Recipe, varied: Collection[str]
) -> tuple[torch.optim.Optimizer, InUse]:
    settings = config.optimizer
    make = OptimizerValues if recipe.learning_rate is not None else WithoutRate
    values = make(
        name=settings.name,
        learning_rate=math.nan if recipe.learning_rate is None else recipe.learning_rate,
        betas=recipe.betas,
        epsilon=recipe.epsilon,
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        total_steps=own_schedule.whole_steps(config, recipe),
        steps_per_epoch=recipe.steps_per_epoch,
        clip_norm=settings.clip_norm,
    )
    own, in_use = None, InUse()
    if brings_optimizer(workload):
        own, in_use = build_own(lambda values: workload.optimizer(model, values), values, config, varied)
        splits = traits_of(recipe.strategy).splits_parameters or recipe.degrees.whole > 1
        if own is not None and splits and not acts_on_elements(own):
            in_use.warnings.append(
                f"the workload's own optimizer() ({type(own).__name__}) needs whole matrices, but under "
                f"{recipe.strategy} each worker has a part of them: updates differ from those of one process by "
                "rounding, or by more if it treats a part as the whole; scaleray verify measures the difference"
            )
    if own is None and recipe.learning_rate is None:
        raise missing_rate("the workload has no optimizer() of its own")
    optimizer = own or _configured(model, values, config)
    if has_sparse_gradients(model):
        optimizer.register_step_post_hook(_keep_dense)
    return optimizer, in_use


def _keep_dense(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Convert to dense tensors any state that torch took from a sparse gradient, such as momentum: checkpoints and
    averaging need dense tensors, and a sparse one grows with every step."""
    for state in optimizer.state.values():
        state.update({n: v.to_dense() for n, v in state.items() if isinstance(v, torch.Tensor) and v.is_sparse})


def _configured(model: nn.Module, values: OptimizerValues, config: RunConfig) -> torch.optim.Optimizer:
    settings = config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    _refuse_sparse_gradients(model, config)
    if settings.name in ("lars", "lamb"):
        return _layer_wise(trained, values, config)
    if settings.name == "sgd":
        return torch.optim.SGD(
            trained,
            lr=values.learning_rate,
            momentum=values.momentum,
            nesterov=values.nesterov,
            weight_decay=values.weight_decay,
            **_kernels(trained, config, is_sparse=has_sparse_gradients(model)),
        )
    return torch.optim.AdamW(
        trained,
        lr=values.learning_rate,
        betas=values.betas,
        eps=values.epsilon,
        weight_decay=values.weight_decay,
        **_kernels(trained, config, is_sparse=has_sparse_gradients(model)),
    )


def has_sparse_gradients(model: nn.Module) -> bool:
    """Whether a layer gives its weights sparse gradients, as nn.Embedding(sparse=True) does."""
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def _refuse_sparse_gradients(model: nn.Module, config: RunConfig) -> None:
    """Raise ConfigError if the configured optimizer cannot use a layer's sparse gradients; only SGD without decay
    can."""
    settings = config.optimizer
    if settings.name == "sgd" and not settings.weight_decay:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            decay = f" with weight_decay {settings.weight_decay:g}" if settings.name == "sgd" else ""
            raise ConfigError(
                "optimizer.name",
                f"{settings.name}{decay}",
                f"{name or 'the model'} (sparse=True) has sparse gradients, and this optimizer needs dense ones",
                "build the layer with sparse=False, use --optimizer.name sgd --optimizer.weight-decay 0, or give the "
                "workload an optimizer() that returns torch.optim.SparseAdam",
            )


def _kernels(trained: list[nn.Parameter], config: RunConfig, *, is_sparse: bool = False) -> dict[str, bool]:
    """Arguments that select torch's implementation of an optimizer: fused (one kernel for all parameters, also on the
    CPU) if supported."""
    if is_sparse or not all(p.is_floating_point() for p in trained):
        return {}
    layouts = {p.device_mesh if isinstance(p, DTensor) else None for p in trained}
    if len(layouts) > 1:
        # torch 2.13 takes only DTensors of one mesh in one kernel, and tensor parallelism leaves norms on another
        return {"foreach": False, "fused": False}
    is_sharded = layouts != {None}
    if config.optimizer.name == "sgd" and is_sharded:
        return {"foreach": True}  # torch 2.13 has no fused SGD for DTensors
    if config.optimizer.name == "sgd" and config.precision.dtype == "fp16":
        return {}  # torch 2.13: a first step that the loss scaler skips leaves the momentum of fused SGD uninitialised
    return {"fused": True}


def _layer_wise(trained: list[nn.Parameter], values: OptimizerValues, config: RunConfig) -> torch.optim.Optimizer:
    """LARS or LAMB. Biases and norms are excluded from adaptation and decay, as in both papers' experiments: their
    norms say little about a good step size, and decay would not help them."""
    settings = config.optimizer
    is_matrix = [settings.adapt_vectors or p.ndim > 1 for p in trained]
    groups = [
        {
            "params": [p for p, here in zip(trained, is_matrix, strict=True) if here == adaptive],
            "adaptive": adaptive,
            "weight_decay": values.weight_decay if adaptive else 0.0,
        }
        for adaptive in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if settings.name == "lars":
        return Lars(
            groups, values.learning_rate, momentum=values.momentum, trust_coefficient=settings.trust_coefficient
        )
    return Lamb(groups, values.learning_rate, betas=values.betas, eps=values.epsilon)


class Schedule(torch.optim.lr_scheduler.LambdaLR):
    """torch's schedule without its warning about a skipped first step, which is not a mistake here. plateau: follows
    evaluations."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float], plateau: ConfiguredPlateau | None = None
    ) -> None:
        self.plateau = plateau
        super().__init__(optimizer, factor if plateau is None else lambda step: factor(step) * plateau.factor)

    @property
    def plateaus(self) -> list[ReduceLROnPlateau]:
        """The scheduler that follows evaluations, if there is one."""
        return [self.plateau.scheduler] if self.plateau is not None else []

    def follow_evaluation(self, value: float) -> None:
        """Advance the plateau scheduler with the value of an evaluation."""
        if self.plateau is not None:
            self.plateau.scheduler.step(value)
            self.use_rates()

    def use_rates(self) -> None:
        """Set the rates for the next step in the optimizer."""
        rates: list[Any] = [
            base * factor(self.last_epoch) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            set_rate(group, rate)
        self._last_lr: list[Any] = [group["lr"] for group in self.optimizer.param_groups]

    def restart(self, first: dict[str, Any], position: int) -> None:
        """Continue `position` steps after the start, where the state was `first`, with all reductions made so far."""
        super().load_state_dict({key: value for key, value in first.items() if key != "plateau"})
        self.last_epoch, self._step_count = position, position + 1
        self.use_rates()

    def state_dict(self) -> dict[str, Any]:
        found = {key: value for key, value in super().state_dict().items() if key != "plateau"}
        return found if self.plateau is None else {**found, "plateau": self.plateau.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        plateau = state_dict.pop("plateau", None)
        super().load_state_dict(state_dict)
        if self.plateau is not None and plateau is not None:
            self.plateau.load_state_dict(plateau)

    def step(self, epoch: int | None = None) -> None:
        if self._step_count > 1:
            return super().step(epoch)
        with warnings.catch_warnings():  # costs more than the step itself
            warnings.simplefilter("ignore", UserWarning)
            super().step(epoch)


def build_schedule(
    workload: Any,
    optimizer: torch.optim.Optimizer,
    config: RunConfig,
    recipe: Recipe,
    in_use: InUse,
    *,
    varied: Collection[str] = (),
) -> tuple[torch.optim.lr_scheduler.LRScheduler, InUse]:
    """Build the workload's own schedule, or the configured one, and return it with the config's settings in use.
    in_use: settings that the optimizer uses."""
    if brings_schedule(workload):
        configured = lambda optimizer: configured_schedule(optimizer, config, recipe)
        own, in_use = own_schedule.build_own(
            workload.schedule, optimizer, config, recipe, in_use, varied, configured=configured
        )
        if own is not None:
            return own, in_use
    return configured_schedule(optimizer, config, recipe), in_use


def configured_schedule(optimizer: torch.optim.Optimizer, config: RunConfig, recipe: Recipe) -> Schedule:
    """The schedule described by the config, relative to each parameter group's own learning rate."""
    settings = config.schedule
    direction: Any = (config.followed or "min").rpartition(" ")[2]
    return Schedule(
        optimizer,
        lambda step: learning_rate_factor(
            step,
            name=settings.name,
            warmup_steps=recipe.warmup_steps,
            schedule_steps=recipe.schedule_steps,
            final_ratio=settings.final_ratio,
        ),
        ConfiguredPlateau(settings, direction) if settings.name == "plateau" else None,
    )
