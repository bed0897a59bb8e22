"""Record of a check of a cluster before training on it: `scaleray doctor`.

Bandwidths are per direction, in bytes per second; sizes are bytes; unknown values are None or empty, never 0.
"""

from dataclasses import dataclass, field
from typing import Literal

from scaleray.records.json_record import JsonRecord

GREEN, YELLOW, RED, NOT_APPLICABLE = "green", "yellow", "red", "not applicable"
Verdict = Literal["green", "yellow", "red", "not applicable"]
WORST_FIRST: tuple[Verdict, ...] = ("red", "yellow", "green", "not applicable")


@dataclass(frozen=True, kw_only=True)
class PreflightCheck:
    """One check: the finding, the limit, and the remedy if the limit is violated."""

    name: str
    verdict: Verdict
    found: str
    allowed: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuSeen:
    """A GPU as reported by NVIDIA's driver, whether or not it is in use."""

    index: int
    name: str
    memory_bytes: int | None = None
    used_bytes: int | None = None
    utilisation: float | None = None
    """Share of the last sample period in which a kernel ran."""
    processes: list[str] = field(default_factory=list)
    """Processes that compute on it, as `name (pid)`."""
    num_nvlinks: int = 0


@dataclass(frozen=True, kw_only=True)
class DiskSeen:
    """Free space at one path of a node. use: files that a training stores there."""

    use: str
    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class NodeSeen:
    """One node, as it reported itself. error: reason why it could not be inspected; all else is then empty."""

    name: str
    """Address of the node, with its id if several nodes share the address."""
    machine: str = ""
    """Boot id of the machine: nodes with the same id are on one machine."""
    is_drivers: bool = False
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions by normalised name."""
    accelerators: dict[str, str] = field(default_factory=dict)
    """Versions of `driver`, `cuda`, `cudnn` and `nccl`, if present."""
    gpus: list[GpuSeen] = field(default_factory=list)
    torch_gpus: int = 0
    """GPUs that torch can use."""
    ray_gpus: float | None = None
    """GPUs offered by Ray; None without Ray."""
    limits: dict[str, int | None] = field(default_factory=dict)
    """Limits `nofile`, `nproc` and `memlock` of a worker's process; None is unlimited."""
    has_rdma: bool = False
    shm_bytes: int | None = None
    memory_bytes: int | None = None
    object_store_bytes: int | None = None
    disks: list[DiskSeen] = field(default_factory=list)
    port_range: int | None = None
    """Number of ephemeral ports of the system."""
    mlflow_error: str | None = None
    """Error when this node contacted MLflow; empty if MLflow answered, None if it was not contacted."""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class ClockSeen:
    """Seconds by which a node's clock is ahead of the driver's. within_s: error, half of the shortest round trip."""

    node: str
    ahead_s: float
    within_s: float


@dataclass(frozen=True, kw_only=True)
class StorageSeen:
    """Access of a node to the shared storage. error: reason why it could not write."""

    node: str
    error: str = ""
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    does_not_see: list[str] = field(default_factory=list)
    """Nodes whose files this node cannot see there, or sees with other content."""


@dataclass(frozen=True, kw_only=True)
class DeviceRate:
    """Rate of matrix products on one GPU or on a node's CPUs. precision: as in the catalogue of GPUs."""

    node: str
    device: str
    kind: str
    precision: str
    flops_per_s: float

    @property
    def name(self) -> str:
        """Names of the device and its node."""
        return f"{self.device} of {self.node}"


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """Transfer rate between two places, in bytes per second and direction, with both ranks sending at once."""

    one: str
    other: str
    is_between_nodes: bool
    bytes_per_s: float

    @property
    def name(self) -> str:
        """Both ends of the link."""
        return f"{self.one} - {self.other}"


@dataclass(frozen=True, kw_only=True)
class Links:
    """Measured pairs of a tournament. rounds: rounds completed, of the total number."""

    pairs: list[LinkRate] = field(default_factory=list)
    rounds: int = 0
    all_rounds: int = 0


@dataclass(frozen=True, kw_only=True)
class AllReduceTime:
    """Seconds of an all-reduce of `num_bytes` over `ranks` workers on `nodes` nodes. where: the nodes."""

    ranks: int
    nodes: int
    num_bytes: int
    seconds: float
    where: str = ""

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth as nccl-tests defines it: 2 (n - 1) / n of the bytes, divided by the time."""
        return 2 * (self.ranks - 1) / self.ranks * self.num_bytes / self.seconds


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All observations and measurements, before evaluation."""

    nodes: list[NodeSeen]
    has_ray: bool = False
    storage_path: str = ""
    tracking_uri: str = ""
    """MLflow's address, without a password."""
    tracking_error: str = ""
    """Error when the driver contacted MLflow; empty if it answered."""
    network: str = ""
    """Specified network between nodes; empty if none was given."""
    clocks: list[ClockSeen] = field(default_factory=list)
    closed: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of nodes whose first node cannot reach a port of the second."""
    storage: list[StorageSeen] = field(default_factory=list)
    rates: list[DeviceRate] = field(default_factory=list)
    all_reduces: list[AllReduceTime] = field(default_factory=list)
    links: Links = field(default_factory=Links)
    not_measured: dict[str, str] = field(default_factory=dict)
    """Reason for each missing measurement (`clocks`, `ports`, `storage`, `rates`, `links`)."""


@dataclass(frozen=True, kw_only=True)
class DoctorRecord(JsonRecord):
    """Result of `scaleray doctor`."""

    checks: list[PreflightCheck]
    measured: Measured
    address: str = ""
    """Address of the Ray cluster; empty for this machine without Ray."""
    duration_s: float = 0.0
    mlflow_link: str = ""

    @property
    def worst(self) -> Verdict:
        """The worst verdict of all checks."""
        found = {check.verdict for check in self.checks}
        return next((verdict for verdict in WORST_FIRST if verdict in found), "not applicable")

    @property
    def verdict(self) -> str:
        """The result in one line."""
        red, yellow, green = ([c.name for c in self.checks if c.verdict == one] for one in (RED, YELLOW, GREEN))
        words = [f"red: {', '.join(red)}"] if red else []
        words += [f"yellow: {', '.join(yellow)}"] if yellow else []
        count = len(self.measured.nodes)
        where = f"{count} node{'s' if count != 1 else ''}"
        if not words:
            return f"ready: {len(green)} checks of {where} are green"
        return f"{'not ready' if red else 'ready, with doubts'}: {'; '.join(words)} ({len(green)} green, {where})"

    @property
    def summary(self) -> str:
        """The verdict, and every check that is not green."""
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """Lines with the verdict and every check that is not green."""
        doubtful = [check for check in self.checks if check.verdict in (RED, YELLOW)]
        return [self.verdict, *(f"{check.verdict}: {check.name}: {check.found}" for check in doubtful)]
