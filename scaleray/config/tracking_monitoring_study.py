"""Settings of MLflow tracking, published metrics, and prices for studies."""

from typing import Annotated

from pydantic import Field

from scaleray.config.base import Count, NonNegative, Positive, Settings


class StudySettings(Settings):
    """Values that turn measurements into costs and shares of the peak. They do not affect a training."""

    price_per_worker_hour: NonNegative | None = None
    """Price of one worker per hour, in `currency`. None: costs are omitted."""
    currency: Annotated[str, Field(max_length=12)] = ""
    """Unit of the price, such as USD; only shown."""
    peak_tflops: Positive | None = None
    """Dense peak of one worker's device in the run's precision, in 10^12 FLOP/s, for MFU. None: the peak in the
    planner's catalogue for the GPU's name, if known."""


class MonitoringSettings(Settings):
    """Settings of the metrics that a run publishes while it is running."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on 127.0.0.1 of the driver's machine where Prometheus finds the run's metrics, with or without Ray. 0: any
    free port, printed at the start. None: no port; a Ray cluster with `ray[default]` publishes them anyway."""
    every_s: Positive = 5.0
    """Seconds between two samples of each worker's step time, phases, arrivals and memory. With more than 250 workers
    it is a fiftieth of a second per worker."""
    expected_samples_per_s: Positive | None = None
    """Throughput that a study or `scaleray plan` predicts for this run; the measured share of it is published. None: no
    prediction is known."""
    flops_per_sample: Positive | None = None
    """FLOPs of one sample, forward and backward, for MFU, with the peak in study.peak_tflops or of the GPU's catalogue
    entry. None: counted during the run's first steps, if it has GPUs or that peak.
    """


class TrackingSettings(Settings):
    """Settings of MLflow tracking."""

    uri: str | None = None
    """Tracking URI. None: MLFLOW_TRACKING_URI if set, else an SQLite file mlflow.db in `~/scaleray`."""
    experiment: Annotated[str, Field(min_length=1, max_length=200)] = "scaleray"
    """Name of the MLflow experiment; created if it does not exist."""
    run_name: Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name of the run and of its folder. None: derived from workload, size and time. A name in use is rejected."""
    owner: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Name of the responsible person, in the registry. None: the current user."""
    purpose: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    """Purpose of the run in a few words, in the registry."""
    policy: Annotated[str, Field(min_length=1)] | None = None
    """YAML file with the team's policy for trainings, studies, sweeps, plans and profiles. None: no policy. Its format
    is in docs/experiments.md."""
    policy_reason: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Reason for an exception from the policy's constraints; recorded together with the violations."""
    every_steps: Count = 10
    """Steps between two points of the metrics in MLflow. The run folder's steps.csv has every step."""
    interval_s: Positive = 2.0
    """Seconds between two messages from a worker to the recorder, and between two lines on the terminal."""
    system_metrics: bool = True
    """Record CPU, memory, disk, network and GPU use of every node."""
