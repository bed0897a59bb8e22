"""Metrics that a run publishes while it trains, and where."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from scaleray.config.base import Positive, Settings


class MonitoringSettings(Settings):
    """Settings of the metrics that a run publishes while it lives."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on 127.0.0.1 of the command's machine where Prometheus finds the run's metrics, with Ray and without it. 0:
    any free one, said at the start. None: nowhere; a Ray cluster with `ray[default]` publishes them by itself."""
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
