"""Where runs are recorded in MLflow, and how often."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scaleray.config.base import Count, Positive, Settings


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
