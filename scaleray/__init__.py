"""scaleray: take a PyTorch recipe from one GPU to many, and prove each step.

Names load on first use, so that `import scaleray` imports neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "train": "scaleray.api",
    "verify": "scaleray.api",
    "study": "scaleray.api",
    "sweep": "scaleray.api",
    "plan": "scaleray.api_plan",
    "explain_plan": "scaleray.api_plan",
    "compare": "scaleray.api",
    "gate": "scaleray.api",
    "promote": "scaleray.launch.promote.promote",
    "start_path": "scaleray.launch.path.state",
    "find_path": "scaleray.launch.path.state",
    "next_on_path": "scaleray.launch.path.go",
    "skip_on_path": "scaleray.launch.path.go",
    "redo_on_path": "scaleray.launch.path.go",
    "check_promoted": "scaleray.launch.promote.check",
    "rollback": "scaleray.launch.promote.rollback",
    "invalidate_experiment": "scaleray.launch.study.invalidate",
    "experiment_curves": "scaleray.api_registry",
    "profile": "scaleray.api",
    "report": "scaleray.api",
    "write_project": "scaleray.projects.write",
    "write_cluster_files": "scaleray.manifests.files",
    "check": "scaleray.launch.check.check",
    "load": "scaleray.launch.model.load",
    "evaluate": "scaleray.launch.model.evaluate",
    "predict": "scaleray.launch.model.predict",
    "export_model": "scaleray.launch.model.exported",
    "show_config": "scaleray.api_looks",
    "config_keys": "scaleray.api_looks",
    "config_schema": "scaleray.api_looks",
    "replay": "scaleray.api_looks",
    "watch": "scaleray.api_looks",
    "cluster_up": "scaleray.api_cluster",
    "cluster_status": "scaleray.api_cluster",
    "cluster_down": "scaleray.api_cluster",
    "submit": "scaleray.api_jobs",
    "list_jobs": "scaleray.api_jobs",
    "job_logs": "scaleray.api_jobs",
    "stop_job": "scaleray.api_jobs",
    "doctor": "scaleray.launch.doctor.doctor",
    "live_state": "scaleray.api_looks",
    "tracking_ui": "scaleray.api_looks",
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
    from scaleray.api import compare, gate, profile, report, study, sweep, train, verify
    from scaleray.api_cluster import cluster_down, cluster_status, cluster_up
    from scaleray.api_jobs import job_logs, list_jobs, stop_job, submit
    from scaleray.api_looks import config_keys, config_schema, live_state, replay, show_config, tracking_ui, watch
    from scaleray.api_plan import explain_plan, plan
    from scaleray.api_registry import experiment_curves
    from scaleray.callbacks import Callback
    from scaleray.config import RunConfig, load_config
    from scaleray.data import ArraySource, ParquetSource, TokenSource
    from scaleray.errors import ConfigError, ScaleRayError
    from scaleray.launch.check.check import check
    from scaleray.launch.doctor.doctor import doctor
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
    from scaleray.launch.promote.check import check_promoted
    from scaleray.launch.promote.promote import promote
    from scaleray.launch.promote.rollback import rollback
    from scaleray.launch.study.invalidate import invalidate_experiment
    from scaleray.manifests.files import write_cluster_files
    from scaleray.projects.write import write_project
    from scaleray.records.run import RunRecord
    from scaleray.reports.grafana.api import install_dashboards
    from scaleray.reports.grafana.written import write_dashboards
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
