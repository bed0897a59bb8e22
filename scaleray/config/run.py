"""Whole config of a run, composed of its sections."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from scaleray.config.alerts import AlertSettings, without_secret
from scaleray.config.averaging_pruning_fine_tuning import AveragingSettings, FineTuningSettings, PruningSettings
from scaleray.config.base import Settings, without_password
from scaleray.config.batch_noise_scale import BatchSettings, NoiseScaleSettings
from scaleray.config.checkpoint import CheckpointSettings
from scaleray.config.compilation_activation_memory import ActivationSettings, CompilationSettings, MemorySettings
from scaleray.config.compression import CompressionSettings
from scaleray.config.data import DataSettings
from scaleray.config.decides import is_beside_training
from scaleray.config.fsdp import FsdpSettings
from scaleray.config.optimizer_schedule import OptimizerSettings, ScheduleSettings
from scaleray.config.parallel import Degrees, ParallelSettings, degrees_of, short_form
from scaleray.config.precision import PrecisionSettings
from scaleray.config.scale import RecoverySettings, ScaleSettings
from scaleray.config.stop_evaluation import EvaluationSettings, StopSettings
from scaleray.config.strategy import (
    ContextSettings,
    GossipSettings,
    LocalSgdSettings,
    PipelineSettings,
    SharesSettings,
    StrategySettings,
    TensorSettings,
)
from scaleray.config.strategy_traits import traits_of
from scaleray.config.tracking_monitoring_study import MonitoringSettings, StudySettings, TrackingSettings
from scaleray.config.workload_section import WorkloadSettings


class RunConfig(Settings):
    """All settings of a run. The same config on 1, 2 or 64 workers is the same training."""

    workload: WorkloadSettings
    batch: BatchSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    stop: StopSettings
    schedule: ScheduleSettings = ScheduleSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    scale: ScaleSettings = ScaleSettings()
    recovery: RecoverySettings = RecoverySettings()
    strategy: StrategySettings = StrategySettings()
    parallel: ParallelSettings = ParallelSettings()
    fsdp: FsdpSettings = FsdpSettings()
    context: ContextSettings = ContextSettings()
    tensor: TensorSettings = TensorSettings()
    pipeline: PipelineSettings = PipelineSettings()
    local_sgd: LocalSgdSettings = LocalSgdSettings()
    gossip: GossipSettings = GossipSettings()
    compression: CompressionSettings = CompressionSettings()
    shares: SharesSettings = SharesSettings()
    precision: PrecisionSettings = PrecisionSettings()
    activations: ActivationSettings = ActivationSettings()
    compilation: CompilationSettings = CompilationSettings()
    memory: MemorySettings = MemorySettings()
    pruning: PruningSettings = PruningSettings()
    fine_tuning: FineTuningSettings = FineTuningSettings()
    averaging: AveragingSettings = AveragingSettings()
    noise_scale: NoiseScaleSettings = NoiseScaleSettings()
    data: DataSettings = DataSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: TrackingSettings = TrackingSettings()
    monitoring: MonitoringSettings = MonitoringSettings()
    alerts: AlertSettings = AlertSettings()
    study: StudySettings = StudySettings()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the run; separate streams for model, data and dropout are derived from it."""
    deterministic: bool = False
    """Use torch's deterministic algorithms; slower, and an error for operations that have none."""
    on_nonfinite: Literal["raise", "stop", "skip"] = "raise"
    """Action on a NaN or infinite loss: raise an error, stop and save the weights so far, or skip the step and count
    it."""

    @model_validator(mode="before")
    @classmethod
    def _degrees_have_a_short_form(cls, values: Any) -> Any:
        parallel, strategy = (values.get(section, {}) for section in ("parallel", "strategy"))
        is_named = not isinstance(strategy, dict) or strategy.get("name", "auto") != "auto"
        if is_named or not isinstance(parallel, dict) or (name := short_form(parallel)) is None:
            return values
        return {**values, "strategy": {**strategy, "name": name}}

    @model_validator(mode="after")
    def _target_is_looked_at(self) -> RunConfig:
        if self.stop.at is not None and self.evaluation.every is None:
            raise ValueError(
                "stop.at: it is checked after evaluations, so evaluation.every is needed, for example '1 epoch'"
            )
        if self.stop.patience is not None and self.evaluation.every is None:
            raise ValueError(
                "stop.patience: it counts evaluations, so evaluation.every is needed, for example '1 epoch'"
            )
        if self.stop.patience is not None and self.stop.watch is None and self.checkpoint.best is None:
            raise ValueError("stop.patience: it needs stop.watch or checkpoint.best, for example 'val/loss min'")
        if self.schedule.name == "plateau" and self.evaluation.every is None:
            raise ValueError(
                "schedule.name: plateau follows evaluations, so evaluation.every is needed, for example '1 epoch'"
            )
        return self

    @model_validator(mode="after")
    def _budget_is_the_compilers(self) -> RunConfig:
        if self.activations.checkpointing == "budget" and (
            self.compilation.what == "nothing" or self.compilation.backend == "eager"
        ):
            raise ValueError(
                "activations.checkpointing: budget needs the compiler, which has the cost and memory of each "
                "operation: set compilation.what to blocks or model with backend inductor, or use selective"
            )
        return self

    @model_validator(mode="after")
    def _micro_batches_may_change(self) -> RunConfig:
        traits = traits_of(self.strategy.name)
        for key, is_on, is_possible in (
            ("memory.find_micro_size", self.memory.find_micro_size, traits.can_try_micro_sizes and not self.has_stages),
            ("memory.on_out_of_memory", self.memory.on_out_of_memory == "halve", traits.can_repeat_steps),
        ):
            if is_on and not is_possible:
                raise ValueError(
                    f"{key}: a step cannot be repeated on all workers under strategy.name {self.strategy.name}"
                )
            if is_on and self.strategy.static_graph:
                raise ValueError(f"{key}: it may accumulate more than planned, which strategy.static_graph cannot")
        if self.memory.find_micro_size and self.memory.limit_gib is None and not self.scale.may_have_gpus:
            raise ValueError("memory.find_micro_size: CPU workers share memory, so it needs memory.limit_gib")
        return self

    @property
    def followed(self) -> str | None:
        """Metric that a plateau of the learning rate follows, with its direction; None: a loss, see
        `schedule.watch`."""
        return self.schedule.watch or (self.stop.watch if self.stop.patience else None) or self.checkpoint.best

    @property
    def follows_evaluations(self) -> bool:
        """Whether evaluations determine the learning rate or the end of the training."""
        return self.stop.at is not None or self.stop.patience is not None or self.schedule.name == "plateau"

    @property
    def has_stages(self) -> bool:
        """Whether the model's blocks are spread over stages of a pipeline."""
        return self.strategy.name == "pipeline" or self.parallel.pipeline not in (None, 1)

    @property
    def is_in_steps(self) -> bool:
        """Whether all lengths of the training are in steps rather than epochs."""
        checkpoint, schedule = self.checkpoint, self.schedule
        lengths = (self.stop.after, schedule.warmup, schedule.length, self.evaluation.every)
        return all(
            length is None or length.unit != "epochs" or not length.value
            for length in (*lengths, checkpoint.every, checkpoint.keep_every)
        )

    def degrees(self, workers: int | None = None) -> Degrees:
        """Number of workers along each axis. workers: their total; None: the largest that the config allows. Raises
        ConfigError if the product of the degrees differs from it."""
        return degrees_of(self.parallel, self.strategy.name, workers or self.scale.max_workers)

    @property
    def gathered_dtype(self) -> Literal["fp32", "bf16", "fp16"] | None:
        """dtype in which sharded parameters are gathered and used; None means their own."""
        if self.fsdp.parameter_dtype is not None:
            return self.fsdp.parameter_dtype
        # wider ones would be cast where they are used, and the copies would be kept until the backward pass
        return self.precision.dtype if self.precision.dtype in ("bf16", "fp16") else None

    def changed(self, settings: Mapping[str, Any]) -> RunConfig:
        """Return the config with other values for keys such as `scale.workers` or for whole sections. Values are not
        checked: some strategies are valid here but not in a config file."""
        sections: dict[str, Any] = {}
        for key, value in settings.items():
            section, _, name = key.partition(".")
            before = sections.get(section, getattr(self, section))
            sections[section] = before.model_copy(update={name: value}) if name else value
        return self.model_copy(update=sections)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain values, as written in a YAML file. Secrets are replaced by stars, since the values
        are stored: passwords in URIs, and all of a webhook except its host.
        """
        values = self.model_dump(mode="json")
        secret = (
            ("tracking", "uri"),
            ("checkpoint", "storage_path"),
            ("checkpoint", "copy_path"),
            ("workload", "weights"),
        )
        for section, key in secret:
            if values[section][key] is not None:
                values[section][key] = without_password(values[section][key])
        if self.alerts.webhook is not None:
            values["alerts"]["webhook"] = without_secret(self.alerts.webhook)
        return values

    def hash(self) -> str:
        """SHA-256 (16 hex digits) of the keys that determine the training, without those on storage and recording."""
        values = {section: value for section, value in self.to_dict().items() if not is_beside_training(section)}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
