"""Question to the planner: a model, a cluster, the strategies, and the order of the results."""

from dataclasses import dataclass

from scaleray.config import RunConfig
from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.errors import ConfigError
from scaleray.planner.cost.block_pass import Measured
from scaleray.planner.cost.uncertainty import Anchor
from scaleray.planner.models.block_counts import ModelProfile

STRATEGIES = ("ddp", "zero1", "fsdp", "hsdp", "tp", "pp", "ep")
RANKINGS = ("throughput", "cost", "time", "time-to-target", "memory")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model to train on a cluster. `global_batch`: samples of an optimizer step, over all GPUs."""

    model: ModelProfile
    cluster: Cluster
    global_batch: int
    precision: str = "bf16"
    strategies: tuple[str, ...] = STRATEGIES
    optimizer_bytes: int = 8
    fused_attention: bool = True
    compiled: bool = False
    measured: Measured | None = None
    anchor: Anchor | None = None
    """The point on which `measured` was calibrated."""
    learned: tuple[str, ...] = ()
    """Corrections from a team's own points, as text."""
    input_samples_per_s: float | None = None
    """Samples per second that the input pipeline of one node delivers; None if it is no limit."""
    config: RunConfig | None = None
    """The planned config, if any, with which `scaleray train` may refuse layouts."""
    rank_by: str = "throughput"
    """`throughput` (also for cost and time), or `memory`. `time-to-target` also compares batch sizes (`to_target`)."""

    def __post_init__(self) -> None:
        if self.rank_by not in RANKINGS:
            raise ConfigError("--rank", self.rank_by, f"it must be one of {', '.join(RANKINGS)}")
        if self.global_batch < 1:
            raise ConfigError("--global-batch", self.global_batch, "it must be at least 1 sample")
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown:
            raise ConfigError("--strategies", ",".join(unknown), f"the planner supports {', '.join(STRATEGIES)}")
        if not self.model.has_flops and self.measured is None:
            raise ConfigError(
                "model",
                self.model.name,
                "only its size is known, not its operations",
                "give a measured step with --step-time and --micro-batch",
            )
