"""What a user reads where Ray cannot be reached: one message, at once."""

import socket

import pytest
import ray

from scaleray.config import load_config
from scaleray.errors import ClusterError
from scaleray.launch.cluster import connection, own_ray

CONFIG = load_config(
    flags={"workload.name": "m:W", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch"},
    environ={},
)


def refused(monkeypatch, address, error=None):
    """The message for an address. error: what ray.init raises; without it nobody may call that."""

    def init(**options):
        assert error is not None
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError) as caught, connection.connected(CONFIG):
        pass
    return str(caught.value)


def test_an_address_at_which_nobody_listens_is_refused_without_waiting_for_ray(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    message = refused(monkeypatch, address)
    assert address in message and "no Ray cluster answers" in message and len(message.splitlines()) == 2


def test_other_versions_are_said_with_both(monkeypatch):
    text = "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.12.1\nThis process was started with:\n    Ray: 2.60.0\n    Python: 3.11.7"
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        message = refused(monkeypatch, f"127.0.0.1:{listening.getsockname()[1]}", RuntimeError(text))
    assert "Ray: 2.50.0 Python: 3.12.1" in message and "Ray: 2.60.0" in message and len(message.splitlines()) == 2


def test_a_ray_that_does_not_come_up_here_is_one_message_with_its_logs(monkeypatch):
    def start(*arguments):
        raise Exception("The current node timed out during startup.\nmore\nand more")  # as Ray's own node does

    monkeypatch.setattr(own_ray, "start", start)
    monkeypatch.setattr(own_ray, "stop", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterError, match="timed out during startup") as caught, connection.connected(CONFIG):
        pass
    assert "session_latest/logs" in str(caught.value) and len(str(caught.value).splitlines()) == 3
