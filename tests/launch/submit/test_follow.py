"""A job's log through Ray's own client, from a dashboard that goes silent, or lets nobody in any more."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from aiohttp import web

from scaleray.errors import ClusterError
from scaleray.launch.submit import jobs_api
from scaleray.launch.submit.jobs_api import Jobs

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
    assert written == ["one"] and len(said) == 1 and "is lost; the job goes on" in said[0]


@pytest.mark.parametrize("code", [401, 403])
def test_a_token_that_is_not_taken_any_more_is_no_connection_that_is_lost(dashboard, code):
    jobs, said = Jobs(dashboard.url), []
    dashboard.code = code
    with pytest.raises(ClusterError, match="the token is missing"):
        jobs.follow("mine", said.append, said.append)
    assert said == []
