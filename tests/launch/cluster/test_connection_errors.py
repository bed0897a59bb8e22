"""What a user reads where Ray cannot be reached: one message, at once."""

import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import ray

from scaleray.config import load_config
from scaleray.errors import ClusterError
from scaleray.launch.cluster import connection, own_ray, token

IMPORTING = connection._importing  # which no other test has
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


@contextlib.contextmanager
def a_server(*handlers):
    """The address of a server that speaks as Ray's do."""
    server = grpc.server(ThreadPoolExecutor(1), handlers=handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def a_control_store(answer):
    """The address of a server that answers the first call to Ray's control store."""
    service, method = connection.ALIVE[1:].split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    return a_server(grpc.method_handlers_generic_handler(service, handlers))


def wanting_a_token(call, context):
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")


@pytest.mark.parametrize(
    ("has_one", "mode", "found"),
    [
        (True, "token", "different from the cluster's"),
        (True, "disabled", "not sent, as RAY_AUTH_MODE"),
        (False, "disabled", "missing"),
    ],
)
def test_a_cluster_that_wants_another_token_is_one_message_at_once(monkeypatch, has_one, mode, found):
    monkeypatch.setattr(token, "has_token", lambda: has_one)
    monkeypatch.setattr(connection, "_decided_mode", None)  # the mode is the user's, whatever an earlier test decided
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with a_control_store(wanting_a_token) as address:
        message = refused(monkeypatch, address)
    assert f"the token is {found}" in message and address in message and len(message.splitlines()) == 2


def answering(call, context):
    return b""


@pytest.fixture
def with_a_token(monkeypatch):
    """A user who has a token, in a process that has not decided on a mode."""
    monkeypatch.setattr(token, "has_token", lambda: True)
    monkeypatch.setattr(connection, "_decided_mode", None)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # put back afterwards
    yield
    monkeypatch.undo()
    connection.ray_settings.read_again()


def test_a_token_is_not_sent_to_a_cluster_that_was_started_without_one(monkeypatch, with_a_token):
    monkeypatch.delenv("RAY_AUTH_MODE")
    with a_control_store(answering) as address:
        refused(monkeypatch, address, RuntimeError("far enough"))
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_a_mode_of_the_user_that_is_not_the_clusters_is_one_message(monkeypatch, with_a_token):
    with a_control_store(answering) as address:
        message = refused(monkeypatch, address)
    assert "RAY_AUTH_MODE is token" in message and "started without a token" in message
    assert "unset RAY_AUTH_MODE" in message and os.environ["RAY_AUTH_MODE"] == "token"


def test_a_token_is_sent_to_a_cluster_that_requires_one(monkeypatch, with_a_token):
    monkeypatch.delenv("RAY_AUTH_MODE")

    def checking(call, context):
        if not any(key == "authorization" for key, _ in context.invocation_metadata()):
            wanting_a_token(call, context)
        return b""

    with a_control_store(checking) as address:
        assert "far enough" in refused(monkeypatch, address, RuntimeError("far enough"))
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_what_listens_and_is_not_ray_is_said_instead_of_waited_for(monkeypatch):
    monkeypatch.setattr(connection, "ANSWER_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        message = refused(monkeypatch, f"127.0.0.1:{silent.getsockname()[1]}")
    assert (
        "did not answer as Ray does" in message
        and "connected without TLS" in message
        and len(message.splitlines()) == 2
    )


def test_the_address_of_a_dashboard_is_told_from_that_of_a_head(monkeypatch):
    message = refused(monkeypatch, "http://127.0.0.1:8265")
    assert "scaleray submit --to" in message and len(message.splitlines()) == 2


def test_other_versions_are_said_with_both(monkeypatch):
    text = "Version mismatch: The cluster was started with:\n    Ray: 2.50.0\n    Python: 3.12.1\nThis process was started with:\n    Ray: 2.60.0\n    Python: 3.11.7"
    with a_server() as address:
        message = refused(monkeypatch, address, RuntimeError(text))
    assert "Ray: 2.50.0 Python: 3.12.1" in message and "Ray: 2.60.0" in message and len(message.splitlines()) == 2


def test_a_ray_that_does_not_come_up_here_is_one_message_with_its_logs(monkeypatch):
    def start(*arguments):
        raise Exception("The current node timed out during startup.\nmore\nand more")  # as Ray's own node does

    monkeypatch.setattr(own_ray, "start", start)
    monkeypatch.setattr(own_ray, "stop", lambda **named: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterError, match="timed out during startup") as caught, connection.connected(CONFIG):
        pass
    assert "during startup.\n" in str(caught.value)
    assert "session_latest/logs" in str(caught.value) and len(str(caught.value).splitlines()) == 3


def test_a_module_whose_import_failed_while_ray_started_shows_its_own_error(tmp_path, monkeypatch):
    """An import that waited for the failing one got a module without its names, and blamed the name."""
    (tmp_path / "slow_to_fail.py").write_text(
        "import time\ntime.sleep(0.3)\nraise ImportError('the cause')\nname = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with IMPORTING(["slow_to_fail"], "json"):
        pass
    with pytest.raises(ImportError, match="the cause"):
        exec("from slow_to_fail import name")
