"""Cost of checkpoints and interruptions: the stall of each checkpoint, the best interval between checkpoints, and the
share of the wall time in which the training makes progress.

A synchronous checkpoint stops the training until all bytes are stored, an asynchronous one until each GPU's part is in
its host's memory, from which it is written during training. An interruption costs the work since the last complete
checkpoint, and a restart. Sources: Young 1974 (first-order interval); Daly 2006, doi:10.1016/j.future.2004.11.016
(equations 20 and 37); Llama 3's interruptions, arXiv:2407.21783, section 3.3.4.
"""

import math
from dataclasses import dataclass

from scaleray.config.hardware.hardware_kinds import Cluster
from scaleray.errors import ConfigError
from scaleray.planner.cost.compute import element_bytes
from scaleray.planner.cost.layout import Layout
from scaleray.planner.models.block_counts import ModelProfile

STORAGE_GB_PER_S_PER_NODE = 1.0
"""Write rate of one node, assumed if a cluster file lacks it; usual for one client of a shared file system or object
store."""
HOST_COPY_GB_PER_S = 20.0
"""Rate of a copy from a GPU to its host's memory, assumed for every GPU: page-locked memory over PCIe 4 reaches 20 to
25 GB/s."""
RESTART_S = 600.0
"""Seconds of a restart, assumed if a cluster file lacks them: detection, starting processes, building the model and
communicators, but not reading the checkpoint."""
USUAL_INTERVAL_S = 600.0
"""Seconds between checkpoints if the rate of interruptions is unknown: the default of `checkpoint.every_minutes`."""


@dataclass(frozen=True, kw_only=True)
class CheckpointCost:
    """Cost of checkpoints and interruptions. `time_ratio`: useful training time over wall time, from 0 to 1."""

    state_bytes: float
    """Bytes of one checkpoint: parameters and optimizer state, each element stored once."""
    write_s: float
    """Seconds until a checkpoint is completely stored."""
    stall_s: float
    """Seconds for which the training stops at each checkpoint."""
    interval_s: float
    """Seconds of training between two checkpoints."""
    is_interval_chosen: bool
    """Whether the planner chose the interval for the best time ratio; otherwise it was given or is the default."""
    is_asynchronous: bool
    mtbf_s: float | None
    """Mean seconds between interruptions of the whole training; None: interruptions are not counted."""
    restart_s: float
    """Seconds of a restart after an interruption, including reading the checkpoint."""
    time_ratio: float
    notes: tuple[str, ...] = ()
    """Assumptions made for values that were not given."""

    @property
    def stall_share(self) -> float:
        """Share of the time without interruptions that is spent on checkpoints."""
        return self.stall_s / (self.interval_s + self.stall_s)


def checkpoint_cost(
    model: ModelProfile,
    layout: Layout,
    cluster: Cluster,
    *,
    interval_s: float | None = None,
    is_asynchronous: bool = True,
) -> CheckpointCost:
    """Return the cost of checkpoints every `interval_s` seconds of training. None: the interval with the best time
    ratio, or the default if interruptions are not counted. Raises ConfigError for an interval that is not positive."""
    if interval_s is not None and not 0 < interval_s < math.inf:
        raise ConfigError("--checkpoint-minutes", interval_s / 60, "it must be positive")
    notes: list[str] = []
    storage = cluster.storage_gb_per_s
    nodes = math.ceil(layout.num_gpus / cluster.gpus_per_node)
    if storage is None:
        storage = STORAGE_GB_PER_S_PER_NODE * nodes
        notes.append(f"storage writes {storage:g} GB/s, {STORAGE_GB_PER_S_PER_NODE:g} from each node")
    state = state_bytes(model, layout)
    # replicas divide the writing among them, so each GPU copies the same amount
    copy_s = state / layout.num_gpus / (HOST_COPY_GB_PER_S * 1e9)
    write_s = max(copy_s, state / (storage * 1e9))
    mtbf_s = None if cluster.gpu_mtbf_hours is None else cluster.gpu_mtbf_hours * 3600 / layout.num_gpus
    restart = cluster.restart_s
    if restart is None:
        restart = RESTART_S
        if mtbf_s is not None:
            notes.append(f"a restart takes {restart:g} s before the checkpoint is read")
    restart += write_s  # reading is as fast as writing
    is_chosen = interval_s is None and mtbf_s is not None
    if interval_s is None:
        interval_s = USUAL_INTERVAL_S
        if mtbf_s is not None:
            interval_s = best_interval_s(copy_s if is_asynchronous else write_s, mtbf_s)
            # an asynchronous one must be complete before the next begins
            interval_s = max(interval_s, write_s - copy_s) if is_asynchronous else interval_s
    stall_s = copy_s + max(0.0, write_s - copy_s - interval_s) if is_asynchronous else write_s
    # an asynchronous checkpoint that is still being written is lost in an interruption
    late_s = write_s - stall_s if is_asynchronous else 0.0
    return CheckpointCost(
        state_bytes=state,
        write_s=write_s,
        stall_s=stall_s,
        interval_s=interval_s,
        is_interval_chosen=is_chosen,
        is_asynchronous=is_asynchronous,
        mtbf_s=mtbf_s,
        restart_s=restart,
        notes=tuple(notes),
        time_ratio=effective_time_ratio(
            interval_s, stall_s=stall_s, restart_s=restart + late_s, mtbf_s=mtbf_s or math.inf
        ),
    )


def is_asked(cluster: Cluster, interval_s: float | None) -> bool:
    """Whether checkpoints were specified, so that a plan should include them."""
    return any(given is not None for given in (interval_s, cluster.gpu_mtbf_hours, cluster.storage_gb_per_s))


def state_bytes(model: ModelProfile, layout: Layout) -> float:
    """Bytes of one checkpoint: parameters at their stored precision, 32 bits in mixed precision, and the optimizer's
    state for each."""
    kept = 4 if layout.is_mixed else element_bytes(layout)
    return model.num_params * (kept + layout.optimizer_bytes)


def effective_time_ratio(interval_s: float, *, stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """Useful training time over wall time, with random interruptions, which also occur during checkpoints and restarts
    (Daly, equation 20)."""
    if math.isinf(mtbf_s):
        return interval_s / (interval_s + stall_s)
    exponent = (interval_s + stall_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:
        return 0.0  # interruptions are so frequent that no interval is ever completed
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


def best_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Seconds of training between two checkpoints with the best time ratio: Young's sqrt(2 stall mtbf) with Daly's
    higher-order terms (equation 37)."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s
