"""Records of trainings with a commit, an environment and data, for what judges or compares them."""

import copy
import time

from scaleray.records.certificate import DATE, EqualityCertificate
from tests import study_examples

ENVIRONMENT = {
    "git": {"commit": "0123456789abcdef", "is_dirty": False, "diff_sha256": None},
    "python": "3.12.1",
    "packages": {"torch": "2.13.0", "ray": "2.60.0"},
    "os": "Linux-6.1",
    "cpu": {"model": "EPYC", "cores": 64},
    "accelerators": {"names": ["H100"], "cuda": "13.0", "cudnn": 91200, "nccl": "2.28", "driver": "580.1"},
}
CONFIG = {
    "workload": {"name": "jobs/digits.py:Digits"}, "batch": {"global_size": 64}, "optimizer": {"learning_rate": 0.1},
    "seed": 0, "stop": {"after": "20 epochs"}, "scale": {"workers": 2},
}  # fmt: skip
DATA = {"train": {"rows": 1437, "sha256": "aa", "hashed": "content", "read_by": "worker"}}


def workers_on(environment, *, device="cuda:0", number=2):
    """What workers of this environment tell of their machines."""
    about = {"device": device, "cpu": environment["cpu"]["model"], "accelerators": environment["accelerators"]}
    return [{"rank": rank, "node": "10.0.0.1", **copy.deepcopy(about)} for rank in range(number)]


def a_certificate(**more):
    """A certificate of two workers with ddp in this environment, written today."""
    values = {
        "passed": True, "verdict": "the same training", "bound": 1e-9, "strategies": ["ddp"], "world_sizes": [1, 2],
        "config": CONFIG, "environment": ENVIRONMENT, "date": time.strftime(DATE), "workload": "jobs/digits.py:Digits",
        "config_hash": "aa", "environment_hash": "bb", "precision": "fp64", "own_precision": "fp32", "steps": 20,
        "where": "Ray", "duration_s": 3.0, "outcomes": [], "run_dir": "/verify", "tracking_uri": "", "run_id": "",
        "mlflow_link": "", "accumulation": [1], "global_batch_size": 64, "data": {},
    }  # fmt: skip
    return EqualityCertificate(**{**values, **more})


def a_run(name="candidate", *, environment=None, workers_told=None, config=None, data=None, **more):
    """A training on GPUs. workers_told: what its workers told of their machines, by default that of `environment`."""
    own = {**copy.deepcopy(ENVIRONMENT), **(environment or {})}
    facts = {"environment": own, "workers": workers_on(own) if workers_told is None else workers_told}
    values = {"config": {**CONFIG, **(config or {})}, "data": data or DATA, "environment": facts}
    return study_examples.run_record(name=name, **values, **more)
