"""How long a browser takes to show what a sweep of a thousand trials left: its HTML report, and its pages in MLflow.

    python jobs/benchmarks/thousand_trials.py --trials 1000 --keep FOLDER
    python jobs/benchmarks/page_loads.py FOLDER --repeats 5

Chromium is asked over its own DevTools protocol, so that the clock is the real one. Each load has a new profile: nothing is
in a cache. MLflow's server runs on this machine beside the browser and has answered once before.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import harness

from scaleray.common.guarded import guarded

RULES = """\
From the request of a page until the browser has drawn what the line names, median (smallest to largest) of {repeats} loads in random
order, each with an empty cache. The report is a file; MLflow's pages come from its server with one worker on the same machine, over SQLite."""
LONGEST_S = 120.0
POLL_S = 0.02
WINDOW = "1600,1400"
IS_READY = {
    "report": "document.readyState === 'complete' && document.querySelectorAll('svg').length > 0",
    "charts": "document.querySelectorAll('.js-plotly-plot .main-svg').length >= 4",
    "description": "[...document.querySelectorAll('table')].length > 0 && document.body.innerText.includes('Child runs')",
}
"""JavaScript that is true when there is something to see."""


class Browser:
    """One page of a Chromium that has just started."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json(timeout=LONGEST_S)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    async def seconds_until(self, url: str, condition: str) -> float:
        """From the request of `url` until `condition` is true and two frames were drawn after it."""
        started = time.perf_counter()
        await self.call("Page.navigate", url=url)
        while not await self._value(condition):
            if time.perf_counter() - started > LONGEST_S:
                raise SystemExit(f"{url} did not come in {LONGEST_S:.0f} s")
            await asyncio.sleep(POLL_S)
        await self._value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
        return time.perf_counter() - started

    async def _value(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        return answer["result"].get("value")


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser with an empty profile; it ends with the context."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("there is no Chromium to load pages with")
    # its last processes may still write when it is asked to end
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            guarded(
                [
                    program,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    f"--user-data-dir={profile}",
                    f"--window-size={WINDOW}",
                    "--remote-debugging-port=0",
                    "about:blank",
                ]
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [page for page in await answer.json() if page["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Browser(socket)
        finally:
            process.terminate()
            process.wait(timeout=30)


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """MLflow over the folder's database, as `scaleray tracking ui` starts it; yields its address."""
    port = harness.free_port()
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--host",
        "127.0.0.1",
    ]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    process = subprocess.Popen(
        guarded([*command, "--port", str(port), "--workers", "1"]),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + LONGEST_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(address, timeout=5).read()
                break
            if time.monotonic() > deadline or process.poll() is not None:
                raise SystemExit("MLflow's server does not start")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what thousand_trials.py --keep wrote")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--results", type=Path, default=harness.RESULTS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    known = harness.conditions(["scaleray", "mlflow"])
    record = json.loads(next(folder.glob("runs/*/record.json")).read_text())
    with mlflow_server(folder) as address:
        pages = pages_of(folder, record, address)
        measurements = []
        for number, name in harness.interleaved(list(pages), repeats=arguments.repeats, seed=0):
            seconds = asyncio.run(load(*pages[name]))
            measurements.append({"side": name, "round": number, "seconds": seconds})
            harness.log(f"{name}: {seconds:.2f} s")
    rows = [[name, harness.show([m["seconds"] for m in measurements if m["side"] == name], "{:.2f}")] for name in pages]
    rows.append(["trials", f"{len(record['trials'])}"])
    rows.append(["report.html (MiB)", f"{(folder / 'report' / 'report.html').stat().st_size / 2**20:.3g}"])
    text = f"{RULES.format(repeats=arguments.repeats)}\n\n{harness.table(('page', 'seconds'), rows)}"
    found = {"conditions": known, "arguments": {"repeats": arguments.repeats}, "measurements": measurements}
    harness.write_report(
        "page-loads", title="Loading the pages of a thousand trials", text=text, record=found, folder=arguments.results
    )


def pages_of(folder: Path, record: dict[str, Any], address: str) -> dict[str, tuple[str, str]]:
    """(address, what to wait for) by what a line of the result is called."""
    link = urllib.parse.urlsplit(record["mlflow_link"])
    run = f"{address}/#/experiments/{record['experiment_id']}/runs/{record['run_id']}"
    return {
        "HTML report": ((folder / "report" / "report.html").as_uri(), IS_READY["report"]),
        "MLflow, the printed link with its charts": (f"{address}/#{link.fragment}", IS_READY["charts"]),
        "MLflow, the sweep's own page with its table": (run, IS_READY["description"]),
    }


async def load(url: str, condition: str) -> float:
    """Seconds of one load in a new browser."""
    async with chromium() as browser:
        return await browser.seconds_until(url, condition)


async def _port(file: Path) -> int:
    deadline = time.monotonic() + LONGEST_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(file.read_text().splitlines()[0])
        await asyncio.sleep(POLL_S)
    raise SystemExit("Chromium does not start")


if __name__ == "__main__":
    main()
