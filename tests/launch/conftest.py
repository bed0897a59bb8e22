"""One Ray head for the whole session: starting one costs seconds, and so does every Ray Train launch."""

from __future__ import annotations

import os
from unittest import mock

import pytest
from waiting import wait_until


@pytest.fixture(scope="session")
def ray_head():
    """A head with 6 logical CPUs, whatever the machine has."""
    from scaleray.launch.cluster import head, node_process

    # all tests on Ray fail where it does not start, and a loaded machine was seen to need more than two minutes
    with mock.patch.object(node_process, "START_TIMEOUT_S", 600.0), head.local_head(num_cpus=6) as found:
        yield found


@pytest.fixture(scope="session")
def ray_session(ray_head):
    """This process as a driver of the session's head; `scaleray.train` uses the connection."""
    import ray

    from scaleray.launch.cluster import connection as cluster
    from scaleray.launch.cluster import loopback

    for name, value in cluster.DRIVER_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    runtime_env = cluster.runtime_env(ray_head.address)

    def connects() -> bool:
        """The dashboard answers before the node has joined, much before on a loaded machine."""
        try:
            with loopback.reaching(ray_head.address):
                ray.init(address=ray_head.address, runtime_env=runtime_env, logging_level="ERROR")
        except ConnectionError:
            return False
        return True

    wait_until(connects)
    yield ray_head
    ray.shutdown()


@pytest.fixture
def bucket(monkeypatch):
    """The bucket `bucket` of an emulator of S3, as pyarrow's filesystem."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import pyarrow.fs

    filesystem = pyarrow.fs.S3FileSystem(endpoint_override=f"http://{host}:{port}", allow_bucket_creation=True)
    filesystem.create_dir("bucket")
    yield filesystem
    server.stop()
