"""Records of trainings with a commit, an environment and data, for what judges or compares them."""

import copy

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


def a_run(name="candidate", *, environment=None, config=None, data=None, **more):
    facts = {"environment": {**copy.deepcopy(ENVIRONMENT), **(environment or {})}}
    values = {"config": {**CONFIG, **(config or {})}, "data": data or DATA, "environment": facts}
    return study_examples.run_record(name=name, **values, **more)
