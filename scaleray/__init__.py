"""scaleray: take a PyTorch recipe from one GPU to many, and prove each step.

Names load on first use, so that `import scaleray` imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "train": "scaleray.launch.run.train",
    "verify": "scaleray.launch.verify.verify",
    "study": "scaleray.launch.study.study",
    "sweep": "scaleray.launch.sweep.sweep",
    "plan": "scaleray.launch.plan.plan",
    "explain_plan": "scaleray.launch.plan.plan",
    "compare": "scaleray.reports.compare.comparison",
    "gate": "scaleray.launch.gate.gate",
    "promote": "scaleray.launch.promote.promote",
    "start_path": "scaleray.launch.path.state",
    "find_path": "scaleray.launch.path.state",
    "next_on_path": "scaleray.launch.path.go",
    "skip_on_path": "scaleray.launch.path.go",
    "redo_on_path": "scaleray.launch.path.go",
    "check_promoted": "scaleray.launch.promote.check",
    "rollback": "scaleray.launch.promote.rollback",
    "invalidate_experiment": "scaleray.launch.study.invalidate",
    "experiment_curves": "scaleray.reports.records.history",
    "profile": "scaleray.launch.profile.profile",
    "report": "scaleray.reports.records.any",
    "write_project": "scaleray.projects.write",
    "write_cluster_files": "scaleray.manifests.files",
    "check": "scaleray.launch.check.check",
    "load": "scaleray.launch.model.load",
    "evaluate": "scaleray.launch.model.evaluate",
    "predict": "scaleray.launch.model.predict",
    "export_model": "scaleray.launch.model.exported",
    "show_config": "scaleray.launch.session.shown_config",
    "config_keys": "scaleray.config.reference",
    "config_schema": "scaleray.records.schemas",
    "replay": "scaleray.tracking.send",
    "watch": "scaleray.launch.watch.find",
    "cluster_up": "scaleray.launch.cluster.local_clusters",
    "cluster_status": "scaleray.launch.cluster.local_clusters",
    "cluster_down": "scaleray.launch.cluster.local_clusters",
    "submit": "scaleray.launch.submit.submit",
    "list_jobs": "scaleray.launch.submit.submit",
    "job_logs": "scaleray.launch.submit.submit",
    "stop_job": "scaleray.launch.submit.submit",
    "doctor": "scaleray.launch.doctor.doctor",
    "live_state": "scaleray.launch.watch.find",
    "tracking_ui": "scaleray.tracking.ui",
    "list_checkpoints": "scaleray.launch.model.stored_checkpoints",
    "verify_checkpoints": "scaleray.launch.model.stored_checkpoints",
    "prune_checkpoints": "scaleray.launch.model.stored_checkpoints",
    "rebuild_checkpoint": "scaleray.launch.model.stored_checkpoints",
    "import_weights": "scaleray.launch.model.stored_checkpoints",
    "write_dashboards": "scaleray.reports.grafana.written",
    "install_dashboards": "scaleray.reports.grafana.api",
    "Workload": "scaleray.workload",
    "Callback": "scaleray.callbacks",
    "RunConfig": "scaleray.config",
    "RunRecord": "scaleray.records.run",
    "load_config": "scaleray.config",
    "ArraySource": "scaleray.data",
    "ParquetSource": "scaleray.data",
    "TokenSource": "scaleray.data",
    "ScaleRayError": "scaleray.errors",
    "ConfigError": "scaleray.errors",
}

__all__ = [
    "ArraySource",
    "Callback",
    "ConfigError",
    "ParquetSource",
    "RunConfig",
    "RunRecord",
    "ScaleRayError",
    "TokenSource",
    "Workload",
    "check",
    "check_promoted",
    "cluster_down",
    "cluster_status",
    "cluster_up",
    "compare",
    "config_keys",
    "config_schema",
    "doctor",
    "evaluate",
    "experiment_curves",
    "explain_plan",
    "export_model",
    "find_path",
    "gate",
    "import_weights",
    "install_dashboards",
    "invalidate_experiment",
    "job_logs",
    "list_checkpoints",
    "list_jobs",
    "live_state",
    "load",
    "load_config",
    "next_on_path",
    "plan",
    "predict",
    "profile",
    "promote",
    "prune_checkpoints",
    "rebuild_checkpoint",
    "redo_on_path",
    "replay",
    "report",
    "rollback",
    "show_config",
    "skip_on_path",
    "start_path",
    "stop_job",
    "study",
    "submit",
    "sweep",
    "tracking_ui",
    "train",
    "verify",
    "verify_checkpoints",
    "watch",
    "write_cluster_files",
    "write_dashboards",
    "write_project",
]

if TYPE_CHECKING:
    from scaleray.callbacks import Callback
    from scaleray.config import RunConfig, load_config
    from scaleray.config.reference import config_keys
    from scaleray.data import ArraySource, ParquetSource, TokenSource
    from scaleray.errors import ConfigError, ScaleRayError
    from scaleray.launch.check.check import check
    from scaleray.launch.cluster.local_clusters import cluster_down, cluster_status, cluster_up
    from scaleray.launch.doctor.doctor import doctor
    from scaleray.launch.gate.gate import gate
    from scaleray.launch.model.evaluate import evaluate
    from scaleray.launch.model.exported import export_model
    from scaleray.launch.model.load import load
    from scaleray.launch.model.predict import predict
    from scaleray.launch.model.stored_checkpoints import (
        import_weights,
        list_checkpoints,
        prune_checkpoints,
        rebuild_checkpoint,
        verify_checkpoints,
    )
    from scaleray.launch.path.go import next_on_path, redo_on_path, skip_on_path
    from scaleray.launch.path.state import find_path, start_path
    from scaleray.launch.plan.plan import explain_plan, plan
    from scaleray.launch.profile.profile import profile
    from scaleray.launch.promote.check import check_promoted
    from scaleray.launch.promote.promote import promote
    from scaleray.launch.promote.rollback import rollback
    from scaleray.launch.run.train import train
    from scaleray.launch.session.shown_config import show_config
    from scaleray.launch.study.invalidate import invalidate_experiment
    from scaleray.launch.study.study import study
    from scaleray.launch.submit.submit import job_logs, list_jobs, stop_job, submit
    from scaleray.launch.sweep.sweep import sweep
    from scaleray.launch.verify.verify import verify
    from scaleray.launch.watch.find import live_state, watch
    from scaleray.manifests.files import write_cluster_files
    from scaleray.projects.write import write_project
    from scaleray.records.run import RunRecord
    from scaleray.records.schemas import config_schema
    from scaleray.reports.compare.comparison import compare
    from scaleray.reports.grafana.api import install_dashboards
    from scaleray.reports.grafana.written import write_dashboards
    from scaleray.reports.records.any import report
    from scaleray.reports.records.history import experiment_curves
    from scaleray.tracking.send import replay
    from scaleray.tracking.ui import tracking_ui
    from scaleray.workload import Workload


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'scaleray' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as exc:
        from scaleray.installed import missing_library

        missing = missing_library(exc)
        if missing is None:
            raise
        raise missing from exc
