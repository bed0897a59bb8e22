"""Records of a run in MLflow, the metrics that it publishes, and the prices that a study uses."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scaleray.config.base import Count, NonNegative, Positive, Settings


class StudySettings(Settings):
    """Figures that turn measurements into costs and shares of the peak. They change nothing about a training."""

    price_per_worker_hour: NonNegative | None = None
    """Price of one worker for an hour, in `currency`. None: costs are left out."""
    currency: Annotated[str, Field(max_length=12)] = ""
    """Name of the price's unit, such as USD; only shown."""
    peak_tflops: Positive | None = None
    """Dense peak of one worker's device in the run's precision, in 10^12 FLOP/s, for MFU. None: the peak in the
    planner's catalogue for the GPU's name, where it is known."""


class MonitoringSettings(Settings):
    """Settings of the metrics that a run publishes while it lives."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on 127.0.0.1 of the command's machine where Prometheus finds the run's metrics, with Ray and without it. 0:
    any free one, said at the start. None: nowhere; a Ray cluster with `ray[default]` publishes them anyway."""
    every_s: Positive = 5.0
    """Seconds between two samples of each worker's step time, phases, arrivals and memory. With more than 250 workers
    it is a fiftieth of a second for each."""
    expected_samples_per_s: Positive | None = None
    """Throughput that a study or `scaleray plan` predicts for this run: what it reaches is published as a share of it.
    None: no prediction is known."""
    flops_per_sample: Positive | None = None
    """FLOPs of one sample, forward and backward, for MFU, with the peak in study.peak_tflops or of the GPU's catalogue
    entry. None: they are counted during the run's first steps, if it has GPUs or that peak.
    """


class TrackingSettings(Settings):
    """Settings of MLflow tracking."""

    uri: str | None = None
    """Tracking URI. None: MLFLOW_TRACKING_URI if set, else an SQLite file mlflow.db in `~/scaleray`."""
    experiment: Annotated[str, Field(min_length=1, max_length=200)] = "scaleray"
    """Name of the MLflow experiment; made if it does not exist."""
    run_name: Annotated[str, Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name of the run and of its folder. None: derived from workload and size, with the time added. A name in use is
    refused."""
    owner: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Name of the person responsible for it, in the registry. None: the user who gave the command."""
    purpose: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    """Its purpose, in a few words, in the registry."""
    policy: Annotated[str, Field(min_length=1)] | None = None
    """YAML file of the team's policy, which trainings, studies, sweeps, plans and profiles must keep to. None: there is
    none. docs/experiments.md says what it may hold."""
    policy_reason: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    """Reason for which constraints of the policy may be broken this time; recorded with what it breaks."""
    every_steps: Count = 10
    """Steps between two points of the metrics in MLflow. The run folder's steps.csv has every step."""
    interval_s: Positive = 2.0
    """Seconds between two messages from a worker to the recorder, and between two lines on the terminal."""
    system_metrics: bool = True
    """Record CPU, memory, disk, network and GPU use of every node."""
