"""A study or a sweep for monitoring: its metrics and its alerts, while it runs."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

from scaleray.config import RunConfig
from scaleray.launch.cluster import connection as cluster
from scaleray.launch.session.alerts import alert_settings
from scaleray.launch.session.folder import RunFolder
from scaleray.monitoring.live.measured_series import Measured
from scaleray.records.published import RAYS_JOB, PublishedFacts
from scaleray.records.run import Say
from scaleray.tracking.measured_metrics import MeasuredMetrics
from scaleray.tracking.metrics_endpoint import HOST, chosen_port
from scaleray.tracking.run_description import RunDescription
from scaleray.tracking.study_runs import ParentRun


def check_published(config: RunConfig) -> None:
    """Raise ConfigError for a port in use, or alerts that cannot be delivered, before anything is started."""
    chosen_port(config.monitoring.port)
    alert_settings(config.alerts)


@contextlib.contextmanager
def published_while(
    measured: Callable[[], Measured], config: RunConfig, *, folder: RunFolder, parent: ParentRun, say: Say
) -> Iterator[MeasuredMetrics]:
    """A context in which what is measured so far is published and judged. measured: gives it. parent: its run in
    MLflow. Raises what `check_published` does."""
    alerts, webhook = alert_settings(config.alerts)
    port = chosen_port(config.monitoring.port)
    description = RunDescription(
        tracking_uri="",
        experiment=config.tracking.experiment,
        run_name=folder.name,
        work_dir=folder.work_dir,
        run_path=folder.path,
        every_steps=1,
        params={},
        tags={},
        files={},
        key=parent.run_id,
        strategy=config.strategy.name,
        alerts=alerts,
        webhook=webhook,
        published=PublishedFacts(port=port, job=os.environ.get(RAYS_JOB, "")),
    )
    metrics = MeasuredMetrics(measured, description=description, parent=parent, say=say)
    metrics.publish = _rays_nodes(config)
    if port is not None:
        say(f"  metrics for Prometheus: http://{HOST}:{port}/metrics")
    metrics.begin()
    status = "FAILED"
    try:
        yield metrics
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        metrics.leave(status)


def _rays_nodes(config: RunConfig) -> Callable[..., None] | None:
    """Where Ray's nodes take metrics, what brings them there from this process."""
    ray = sys.modules.get("ray")  # a local study does without
    if ray is None or not ray.is_initialized() or not cluster.publishes_metrics(config):
        return None
    from scaleray.training.ray_metrics import RayMetrics

    return RayMetrics().publish
