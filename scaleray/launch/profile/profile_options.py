"""Options of `scaleray profile`."""

from __future__ import annotations

from dataclasses import dataclass

from scaleray.errors import UsageError
from scaleray.records.worker_requests import USUAL_RANKS, TraceRequest, trace_request

STEPS = 50


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Length of a short training, and its traces."""

    steps: int | None = None
    """Steps to train with -c, at least 20; 50 by default."""
    trace: bool = False
    """With -c: trace the last steps with torch.profiler, into the run's folder."""
    ranks: str | None = None
    """Ranks to trace: numbers, slowest, one-a-node, separated by commas; all three kinds by default."""
    memory: bool = False
    """With -c: take a snapshot of each chosen rank's memory, on GPUs."""
    local: bool = False
    """With -c: run without Ray, in this process, or in gloo processes if there are several workers."""
    uri: str | None = None
    """MLflow's tracking URI, to find a run there; by default SCALERAY_TRACKING__URI or MLFLOW_TRACKING_URI."""

    def __post_init__(self) -> None:
        if self.ranks is not None and not self.is_traced:
            raise UsageError.problem("--ranks", "needs --trace or --memory")

    @property
    def is_traced(self) -> bool:
        """Whether a part of the training is traced."""
        return self.trace or self.memory

    @property
    def request(self) -> TraceRequest | None:
        """The traces to take. Raises ConfigError for invalid ranks."""
        if not self.is_traced:
            return None
        return trace_request(self.ranks or USUAL_RANKS, operators=self.trace, memory=self.memory)
