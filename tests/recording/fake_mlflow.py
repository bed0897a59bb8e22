"""MLflow's client in memory, as far as a run needs it, so that a recorder can be killed hundreds of times in a test."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType
from types import SimpleNamespace as Some

ENTITIES = ModuleType("mlflow.entities")
ENTITIES.Metric = lambda key, value, timestamp, step: Some(key=key, value=value, timestamp=timestamp, step=step)
ENTITIES.Param = ENTITIES.RunTag = ENTITIES.InputTag = lambda key, value: Some(key=key, value=value)
ENTITIES.Dataset = ENTITIES.DatasetInput = Some


class FakeMlflow:
    """Runs by id. on_call: called with the name of each write, before it is done and again after it."""

    def __init__(self):
        self.runs = {}
        self.on_call = lambda name, is_done: None
        self._numbers = itertools.count()

    def install(self, monkeypatch):
        """Put it in the place of the real client, whose import costs seconds of a core."""
        for module in (ModuleType("mlflow"), ENTITIES):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr("scaleray.recording.store.open_client", lambda uri: self)

    def active(self):
        """The runs that a user sees."""
        return [run for run in self.runs.values() if run.info.lifecycle_stage == "active"]

    def points(self, metric, run):
        return sorted((m.step, m.value) for m in run.points if m.key == metric)

    def _writes(self, name, write):
        self.on_call(name, False)
        result = write()
        self.on_call(name, True)
        return result

    # what scaleray calls

    def get_experiment_by_name(self, name):
        return Some(experiment_id="1", lifecycle_stage="active")

    def create_run(self, experiment_id, *, run_name, tags, start_time):
        def write():
            run_id = f"{next(self._numbers):032x}"
            info = Some(run_id=run_id, experiment_id=experiment_id, status="RUNNING", lifecycle_stage="active")
            self.runs[run_id] = Some(
                info=info, data=Some(tags=dict(tags), params={}, metrics={}), points=set(), artifacts=[]
            )
            return self.runs[run_id]

        return self._writes("create_run", write)

    def search_runs(self, experiment_ids, query):
        _, key, _, value, _ = query.replace("`", "'").split("'")
        return [run for run in self.active() if run.data.tags.get(key) == value]

    def get_run(self, run_id):
        return self.runs[run_id]

    def get_metric_history(self, run_id, key):
        return [m for m in self.runs[run_id].points if m.key == key]

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        def write():
            run = self.runs[run_id]
            run.points |= {_Point(m.key, m.value, m.timestamp, m.step) for m in metrics}
            run.data.metrics.update({m.key: m.value for m in metrics})
            run.data.params.update({p.key: p.value for p in params})
            run.data.tags.update({t.key: t.value for t in tags})

        self._writes("log_batch", write)

    def log_artifact(self, run_id, path, folder=None):
        self._writes("log_artifact", lambda: self.runs[run_id].artifacts.append(path))

    def log_inputs(self, run_id, datasets):
        self._writes("log_inputs", lambda: None)

    def update_run(self, run_id, status):
        self._writes("update_run", lambda: setattr(self.runs[run_id].info, "status", status))

    def set_terminated(self, run_id, status, end_time):
        self._writes("set_terminated", lambda: setattr(self.runs[run_id].info, "status", status))

    def delete_run(self, run_id):
        self._writes("delete_run", lambda: setattr(self.runs[run_id].info, "lifecycle_stage", "deleted"))


class _Point(Some):
    """Equal points are one, as in MLflow's table."""

    def __init__(self, key, value, timestamp, step):
        super().__init__(key=key, value=value, timestamp=timestamp, step=step)

    def __hash__(self):
        return hash((self.key, self.value, self.timestamp, self.step))
