"""A dashboard as it is asked for its versions and for a log: one that lets nobody in, hangs, goes silent, or is none."""

import asyncio
import contextlib
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from aiohttp import web

from scaleray.clusters import local_clusters
from scaleray.clusters.submit import jobs_api
from scaleray.clusters.submit.clusters import clusters_file
from scaleray.clusters.submit.jobs_api import Jobs
from scaleray.errors import ClusterError
from scaleray.launch.cluster import loopback
from scaleray.launch.cluster.ray_settings import read_again

ABOUT_RAY = {"version": "4", "ray_version": "2.60.0", "ray_commit": "x", "session_name": "x"}
JOB = {"type": "SUBMISSION", "submission_id": "mine", "entrypoint": "python x"}


@pytest.fixture
def dashboard(project, monkeypatch):
    """A dashboard with one job, which tells the log as `connections` says, one function each."""
    about = SimpleNamespace(connections=[], status="RUNNING", code=200, silent=False, made=0)

    async def version(request):
        return web.json_response(ABOUT_RAY)

    async def job(request):
        while about.silent:
            await asyncio.sleep(0.05)
        return web.json_response({**JOB, "status": about.status}, status=about.code)

    async def tail(request):
        if about.code != 200:
            return web.Response(status=about.code)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await about.connections[about.made](socket)
        return socket

    def serve():
        asyncio.set_event_loop(loop)
        loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        loop.run_until_complete(site.start())
        about.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        ready.set()
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))

    app = web.Application()
    app.router.add_get("/api/version", version)
    app.router.add_get("/api/jobs/mine", job)
    app.router.add_get("/api/jobs/mine/logs/tail", tail)
    loop, runner, ready = asyncio.new_event_loop(), web.AppRunner(app), threading.Event()
    threading.Thread(target=serve, daemon=True).start()
    assert ready.wait(60)
    monkeypatch.setattr(jobs_api, "SILENCE_S", 0.3)
    monkeypatch.setattr(jobs_api, "REQUEST_S", 0.3)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    yield about
    loop.call_soon_threadsafe(loop.stop)


async def never(socket):
    await asyncio.sleep(600)


def test_a_connection_that_says_nothing_any_more_is_made_anew_and_nothing_is_written_twice(dashboard):
    async def goes_silent(socket):
        dashboard.made += 1
        await socket.send_str("one two")
        await never(socket)

    async def tells_all(socket):
        dashboard.status = "SUCCEEDED"
        await socket.send_str("one two three")
        await socket.close()

    dashboard.connections = [goes_silent, tells_all]
    written, said = [], []
    assert Jobs(dashboard.url).follow("mine", written.append, said.append).status == "SUCCEEDED"
    assert "".join(written) == "one two three" and said == []


def test_a_head_that_hangs_is_a_connection_that_is_lost(dashboard):
    async def hangs(socket):
        dashboard.silent = True
        await never(socket)

    async def is_back(socket):
        dashboard.status = "SUCCEEDED"
        await socket.send_str("one")
        await socket.close()

    def say(text):
        said.append(text)
        dashboard.made, dashboard.silent = 1, False

    dashboard.connections = [hangs, is_back]
    written, said = [], []
    assert Jobs(dashboard.url).follow("mine", written.append, say).status == "SUCCEEDED"
    assert written == ["one"] and len(said) == 1 and "was lost; the job continues" in said[0]


@pytest.mark.parametrize("code", [401, 403])
def test_a_token_that_is_not_taken_any_more_is_no_connection_that_is_lost(dashboard, code):
    jobs, said = Jobs(dashboard.url), []
    dashboard.code = code
    with pytest.raises(ClusterError, match=r"The cluster at .* requires a token"):
        jobs.follow("mine", said.append, said.append)
    assert said == []


@pytest.fixture
def server():
    """A server on a port of its own that answers with what the test puts into `answers`, by path."""
    answers, seen = {}, []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("Authorization")))
            code, text = answers.get(self.path, (404, "no"))
            self.send_response(code)
            if code == 302:
                self.send_header("Location", text)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *words):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{made.server_port}", answers=answers, seen=seen)
    made.shutdown()
    made.server_close()


def test_a_dashboard_tells_its_versions_to_whoever_has_its_token(project, server, monkeypatch):
    server.answers["/api/version"] = (200, '{"ray_version": "2.60.0"}')
    assert jobs_api._check(server.url) == ("2.60.0", "")
    server.answers["/api/v0/cluster_metadata"] = (200, '{"data": {"pythonVersion": "3.11.2"}}')
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "open-sesame\n")
    assert jobs_api._check(server.url) == ("2.60.0", "3.11.2")
    assert server.seen[-1][1] == "Bearer open-sesame"


@pytest.mark.parametrize(
    ("answer", "token", "said"),
    [
        ((401, "no"), None, "The cluster at .* requires a token"),
        ((401, "no"), "wrong", "rejected the token"),
        ((500, "oops"), None, "responded with 500"),
        ((404, ""), None, "not a Ray dashboard"),
        ((200, "<html>"), None, "not a Ray dashboard"),
        ((200, "[]"), None, "not a Ray dashboard"),
    ],
)
def test_a_cluster_that_does_not_let_in_or_is_none_is_one_message(project, server, monkeypatch, answer, token, said):
    server.answers["/api/version"] = answer
    if token:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with pytest.raises(ClusterError, match=said) as raised:
        Jobs(server.url)
    assert "wrong" not in str(raised.value)


@contextlib.contextmanager
def answering_with(content):
    """The URL of a server that is none of HTTP: it sends this to each client."""

    class Greets(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(content)
            self.request.recv(4096)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Greets) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_what_answers_in_another_protocol_is_no_traceback():
    """http.client's errors are no OSErrors."""
    with answering_with(b"SSH-2.0-OpenSSH_9.2\r\n") as url:
        assert local_clusters._nodes_of_ray(url) == []


def test_an_address_at_which_nothing_answers_or_never_is_one_message(project, monkeypatch):
    import socket

    with pytest.raises(ClusterError, match="cannot be reached"):
        Jobs("http://127.0.0.1:1")
    with pytest.raises(ClusterError, match="cannot be reached"):
        Jobs("http://no-such-host.invalid:8265")
    with answering_with(b"SSH-2.0-OpenSSH_9.2\r\n") as url, pytest.raises(ClusterError, match="does not speak HTTP"):
        Jobs(url)
    monkeypatch.setattr(jobs_api, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ClusterError, match="did not answer within"):
        Jobs(f"http://127.0.0.1:{silent.getsockname()[1]}")


@pytest.fixture
def token_of_this_user(project, tmp_path, monkeypatch):
    """A token in the home alone, and an address that is not of this machine by its name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of-this-user")
    read_again()
    monkeypatch.setattr(loopback, "NAMES", ("localhost",))
    yield tmp_path
    monkeypatch.undo()
    read_again()


def tokens_seen(server):
    server.answers["/api/version"] = (200, '{"version": "4", "ray_version": "2.60.0"}')
    server.answers["/api/jobs/"] = (200, "[]")
    server.seen.clear()
    Jobs(server.url).list()
    return dict(server.seen)


def test_the_token_of_this_user_goes_to_no_address_that_nobody_has_named(token_of_this_user, server):
    assert set(tokens_seen(server).values()) == {None}
    server.answers["/api/version"] = (401, "no")
    with pytest.raises(ClusterError, match=r"The cluster at .* requires a token") as raised:
        Jobs(server.url)
    assert "clusters.yaml has this address" in str(raised.value)


@pytest.mark.parametrize("named", ["as this machine", "in the file", "in the environment"])
def test_the_token_goes_to_this_machine_and_where_the_user_sends_it(token_of_this_user, server, monkeypatch, named):
    file = token_of_this_user / ".ray" / "auth_token"
    if named == "as this machine":
        monkeypatch.setattr(loopback, "NAMES", ("127.0.0.1",))
    elif named == "in the environment":
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    else:
        clusters_file().parent.mkdir(parents=True)
        clusters_file().write_text(f"mine:\n  url: {server.url}/\nother: http://10.0.0.1:8265\n")
    assert set(tokens_seen(server).values()) == {"Bearer of-this-user"}


@pytest.mark.parametrize("path", ["/api/version", "/api/jobs/"])
def test_the_token_follows_no_redirect(token_of_this_user, server, monkeypatch, path):
    monkeypatch.setattr(loopback, "NAMES", ("127.0.0.1",))
    server.answers["/api/version"] = (200, '{"version": "4", "ray_version": "2.60.0"}')
    server.answers[path] = (302, f"{server.url}/elsewhere")
    with pytest.raises(ClusterError):
        Jobs(server.url).list()
    assert "/elsewhere" not in dict(server.seen)
