"""One Ray head for the whole session: starting one costs seconds, and so does every Ray Train launch."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def ray_head():
    """A head with 6 logical CPUs, whatever the machine has."""
    from scaleray.launch.cluster.head import local_head

    with local_head(num_cpus=6) as head:
        yield head


@pytest.fixture(scope="session")
def ray_session(ray_head):
    """This process as a driver of the session's head; `scaleray.train` uses the connection."""
    import ray

    from scaleray.launch.cluster import connection as cluster

    for name, value in cluster.DRIVER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray.init(address=ray_head.address, runtime_env=cluster.runtime_env(ray_head.address), logging_level="ERROR")
    yield ray_head
    ray.shutdown()
