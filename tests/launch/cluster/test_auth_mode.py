"""Who is asked for a token, decided anew for each cluster that a process starts or talks to; and who is given it."""

import contextlib
import http.server
import os
import threading
import urllib.request
from types import SimpleNamespace

import pytest
import ray  # noqa: F401  # before a test sets a mode that Ray refuses when it is imported

from scaleray.clusters import local_clusters
from scaleray.clusters.submit import jobs_api
from scaleray.config import load_config
from scaleray.errors import ClusterError, UsageError
from scaleray.launch.cluster import connection, head, loopback, node_process, own_ray, token

ELSEWHERE = "http://10.0.0.1:8265"
VARIABLES = (
    token.MODE,
    token.TOKEN,
    token.TOKEN_PATH,
    "RAY_ADDRESS",
    loopback.VARIABLE,
    "http_proxy",
    "HTTP_PROXY",
    "no_proxy",
    "NO_PROXY",
)


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A user who has no token, in a process that has decided nothing and is connected to nothing."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # put back afterwards what the test sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(connection, "_decided_mode", None)
    monkeypatch.setattr(connection, "_is_connected", lambda: False)
    monkeypatch.setattr(connection.ray_settings, "read_again", lambda: None)
    return tmp_path


def mode():
    return os.environ[token.MODE]


def test_what_one_cluster_was_asked_without_says_nothing_of_the_next(user):
    connection.set_auth_mode(ELSEWHERE)
    assert mode() == "disabled"
    connection.set_auth_mode("local")
    assert mode() == "token"
    connection.set_auth_mode(ELSEWHERE)
    assert mode() == "disabled"
    token.token_file().parent.mkdir()
    token.token_file().write_text("mine")
    connection.set_auth_mode(ELSEWHERE)
    assert mode() == "token"


@pytest.mark.parametrize("given", ["disabled", "token"])
def test_a_mode_that_the_user_set_stays(user, monkeypatch, given):
    connection.set_auth_mode(ELSEWHERE if given == "token" else "local")
    monkeypatch.setenv(token.MODE, given)
    connection.set_auth_mode("local")
    connection.set_auth_mode(ELSEWHERE)
    assert mode() == given


def test_a_head_of_this_machine_has_a_token_whatever_ray_address_names(user, monkeypatch):
    seen = {}

    def start_head(folder, **how):
        seen.update(mode=mode(), has_token=token.has_token())
        raise OSError("seen enough")

    monkeypatch.setenv("RAY_ADDRESS", ELSEWHERE)
    monkeypatch.setattr(node_process, "start_head", start_head)
    with pytest.raises(OSError, match="seen enough"), head.local_head(num_cpus=1):
        pass
    assert seen == {"mode": "token", "has_token": True}


def test_no_cluster_is_started_beside_a_connection_that_has_no_token(user, monkeypatch):
    connection.set_auth_mode(ELSEWHERE)
    monkeypatch.setattr(connection, "_is_connected", lambda: True)
    connection.set_auth_mode()  # of what is connected
    with pytest.raises(ClusterError, match=r"connected to a Ray without a token.*") as raised:
        connection.set_auth_mode("local")
    assert "ray.shutdown()" in str(raised.value) and mode() == "disabled"


def test_a_ray_that_other_hosts_reach_asks_for_a_token_or_is_not_started(user, monkeypatch):
    started = []
    monkeypatch.setattr(own_ray, "start", lambda *arguments: started.append(mode()))
    monkeypatch.setattr(own_ray, "request_workers", lambda config: None)
    monkeypatch.setattr(own_ray, "stop", lambda **named: None)
    monkeypatch.setattr(connection, "_address", lambda: "here")
    values = {"workload.name": "m:W", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch"}
    config = load_config(flags=values, environ={})
    monkeypatch.setenv(loopback.VARIABLE, "1")
    with connection.connected(config):
        pass
    monkeypatch.setenv(token.MODE, "disabled")
    with pytest.raises(UsageError, match="must require a token") as raised, connection.connected(config):
        pass
    assert len(str(raised.value).splitlines()) == 2 and started == ["token"]
    monkeypatch.setenv(loopback.VARIABLE, "0")
    with connection.connected(config):
        pass
    assert started == ["token", "disabled"]


@pytest.fixture
def asked(user, monkeypatch):
    """A proxy that the environment names, and a dashboard; what each was sent. Both answer that they are Ray."""
    monkeypatch.setattr(urllib.request, "_opener", None)  # which knows the proxies of its first use
    with listening() as proxy, listening() as dashboard:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("no_proxy", "example.com")
        token.token_file().parent.mkdir()
        token.token_file().write_text("mine")
        yield SimpleNamespace(proxy=proxy.got, dashboard=dashboard.got, url=dashboard.url)


@contextlib.contextmanager
def listening():
    """A server that keeps the headers that it is sent, and answers each request with the same page."""
    page = b'{"ray_version": "2.60.0", "version": "4", "ray_commit": "", "session_name": ""}'
    got: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            got.append(str(self.headers))
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *about: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):
            pass  # a caller that waited for too long has closed its connection, and asks again

    with Server((loopback.ADDRESS, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_address[1]}", got=got)
        server.shutdown()


def test_a_proxy_is_never_given_the_token_of_a_cluster_of_this_machine(asked, tmp_path):
    connection.set_auth_mode("local")
    local_clusters._nodes_of_ray(asked.url)
    jobs_api.Jobs(asked.url)._client.get_version()
    log = tmp_path / "log"
    log.write_bytes(node_process.JOINED)
    node_process.wait_for_head(SimpleNamespace(check=lambda *words: None, log=log), asked.url)
    assert asked.proxy == [] and len(asked.dashboard) >= 4
    assert any("Bearer mine" in request for request in asked.dashboard)
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.com,127.0.0.1,localhost,::1,[::1]"
    connection.set_auth_mode("local")
    assert os.environ["no_proxy"].count("localhost") == 1


def test_a_head_is_awaited_until_its_node_has_joined_however_early_its_dashboard_answers(tmp_path, monkeypatch):
    """Jobs were submitted to a head that gave up after its dashboard had answered."""
    log = tmp_path / "log"
    log.write_text("Local node IP: 127.0.0.1")
    looks = []

    def check(*words):
        looks.append(words)
        if len(looks) == 3:
            log.write_text("Ray runtime started.")

    monkeypatch.setattr(node_process, "fetch", lambda url, **how: b"{}")
    monkeypatch.setattr(node_process.time, "sleep", lambda seconds: None)
    node_process.wait_for_head(SimpleNamespace(check=check, log=log), "http://127.0.0.1:1")
    assert len(looks) == 3


def test_other_hosts_are_still_asked_through_the_users_proxy(asked):
    connection.set_auth_mode(ELSEWHERE)
    urllib.request.urlopen(ELSEWHERE, timeout=10).close()
    assert len(asked.proxy) == 1


def test_without_a_proxy_nothing_is_said_of_proxies(user):
    connection.set_auth_mode("local")
    assert "no_proxy" not in os.environ and "NO_PROXY" not in os.environ
