"""scaleray: take a PyTorch recipe from one GPU to many, and prove each step.

Names load on first use, so that `import scaleray` imports neither torch nor Ray.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "train": "scaleray.launch.run.train",
    "verify": "scaleray.verification.verify",
    "study": "scaleray.studies.study",
    "sweep": "scaleray.sweeps.sweep",
    "plan": "scaleray.planner.ask.plan",
    "explain_plan": "scaleray.planner.ask.plan",
    "compare": "scaleray.studies.compare.comparison",
    "gate": "scaleray.release.gate.gate",
    "promote": "scaleray.release.promote.promote",
    "start_path": "scaleray.release.path.path_state",
    "find_path": "scaleray.release.path.path_state",
    "next_on_path": "scaleray.release.path.go",
    "skip_on_path": "scaleray.release.path.go",
    "redo_on_path": "scaleray.release.path.go",
    "check_promoted": "scaleray.release.promote.verify_promoted",
    "rollback": "scaleray.release.promote.rollback",
    "invalidate_experiment": "scaleray.studies.invalidate",
    "experiment_curves": "scaleray.studies.history_page",
    "profile": "scaleray.launch.profile.profile",
    "report": "scaleray.studies.any_report",
    "write_project": "scaleray.cli.projects.write",
    "write_cluster_files": "scaleray.clusters.manifests.written_files",
    "check": "scaleray.verification.check.check",
    "load": "scaleray.models.load",
    "evaluate": "scaleray.models.evaluate",
    "predict": "scaleray.models.predict",
    "export_model": "scaleray.models.exported",
    "show_config": "scaleray.launch.session.config_argument",
    "config_keys": "scaleray.config.reference",
    "config_schema": "scaleray.records.schemas",
    "replay": "scaleray.recording.replay",
    "watch": "scaleray.launch.watch.find",
    "cluster_up": "scaleray.clusters.local_clusters",
    "cluster_status": "scaleray.clusters.local_clusters",
    "cluster_down": "scaleray.clusters.local_clusters",
    "submit": "scaleray.clusters.submit.submit",
    "list_jobs": "scaleray.clusters.submit.submit",
    "job_logs": "scaleray.clusters.submit.submit",
    "stop_job": "scaleray.clusters.submit.submit",
    "doctor": "scaleray.clusters.doctor.doctor",
    "live_state": "scaleray.launch.watch.find",
    "tracking_ui": "scaleray.recording.ui",
    "list_checkpoints": "scaleray.models.stored_checkpoints",
    "verify_checkpoints": "scaleray.models.stored_checkpoints",
    "prune_checkpoints": "scaleray.models.stored_checkpoints",
    "rebuild_checkpoint": "scaleray.models.stored_checkpoints",
    "import_weights": "scaleray.models.stored_checkpoints",
    "write_dashboards": "scaleray.live.grafana.written_dashboards",
    "install_dashboards": "scaleray.live.grafana.grafana_client",
    "Workload": "scaleray.workload",
    "Callback": "scaleray.common.callbacks",
    "CarriedState": "scaleray.common.carried_state",
    "RunConfig": "scaleray.config",
    "RunRecord": "scaleray.records.run_record",
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
    "CarriedState",
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
    from scaleray.cli.projects.write import write_project
    from scaleray.clusters.doctor.doctor import doctor
    from scaleray.clusters.local_clusters import cluster_down, cluster_status, cluster_up
    from scaleray.clusters.manifests.written_files import write_cluster_files
    from scaleray.clusters.submit.submit import job_logs, list_jobs, stop_job, submit
    from scaleray.common.callbacks import Callback
    from scaleray.common.carried_state import CarriedState
    from scaleray.config import RunConfig, load_config
    from scaleray.config.reference import config_keys
    from scaleray.data import ArraySource, ParquetSource, TokenSource
    from scaleray.errors import ConfigError, ScaleRayError
    from scaleray.launch.profile.profile import profile
    from scaleray.launch.run.train import train
    from scaleray.launch.session.config_argument import show_config
    from scaleray.launch.watch.find import live_state, watch
    from scaleray.live.grafana.grafana_client import install_dashboards
    from scaleray.live.grafana.written_dashboards import write_dashboards
    from scaleray.models.evaluate import evaluate
    from scaleray.models.exported import export_model
    from scaleray.models.load import load
    from scaleray.models.predict import predict
    from scaleray.models.stored_checkpoints import (
        import_weights,
        list_checkpoints,
        prune_checkpoints,
        rebuild_checkpoint,
        verify_checkpoints,
    )
    from scaleray.planner.ask.plan import explain_plan, plan
    from scaleray.recording.replay import replay
    from scaleray.recording.ui import tracking_ui
    from scaleray.records.run_record import RunRecord
    from scaleray.records.schemas import config_schema
    from scaleray.release.gate.gate import gate
    from scaleray.release.path.go import next_on_path, redo_on_path, skip_on_path
    from scaleray.release.path.path_state import find_path, start_path
    from scaleray.release.promote.promote import promote
    from scaleray.release.promote.rollback import rollback
    from scaleray.release.promote.verify_promoted import check_promoted
    from scaleray.studies.any_report import report
    from scaleray.studies.compare.comparison import compare
    from scaleray.studies.history_page import experiment_curves
    from scaleray.studies.invalidate import invalidate_experiment
    from scaleray.studies.study import study
    from scaleray.sweeps.sweep import sweep
    from scaleray.verification.check.check import check
    from scaleray.verification.verify import verify
    from scaleray.workload import Workload


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'scaleray' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as exc:
        from scaleray.common.installed import missing_library

        missing = missing_library(exc)
        if missing is None:
            raise
        raise missing from exc
