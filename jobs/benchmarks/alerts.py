"""Alerts delivered live: planted faults, Prometheus, Alertmanager, and a receiver of webhooks.

    python jobs/benchmarks/alerts.py [--only straggler,hang] [--healthy-s 300] [--at-once 3] [--results FOLDER]

Starts Debian's `prometheus` and `prometheus-alertmanager` and a receiver on 127.0.0.1, and then trainings of scaleray on two
gloo processes (the lost worker: on Ray) with `monitoring.port`. In each of them one fault is planted after three quarters of
a minute. Compute is a timed sleep (`scaleray.emulation`); everything else is real. Printed is how many seconds after the
fault its alert was delivered: by Prometheus and Alertmanager, and by the run itself (`alerts.webhook`). The healthy training
goes before the others, alone, and must raise none but its end. Exits with 1 where an alert did not come, or came in the
healthy training. The full disk is a small tmpfs, which takes root; GPUs are those of a stand-in for NVIDIA's exporter
(`stand_in_gpus.py`). All that is started ends with the command.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RULES = HERE.parents[1] / "dashboards" / "alerts.yaml"
sys.path.insert(0, str(HERE))
from alert_faults import BY_NAME, BY_PROMETHEUS_ALONE, ON_DEMAND, Fault  # noqa: E402
from harness import arguments_of, conditions, free_port, table, write_report  # noqa: E402
from stand_in_gpus import FAULTS as OF_GPUS  # noqa: E402
from stand_in_gpus import StandInGpus, exporting  # noqa: E402

START_S = 240.0
"""Seconds that a training may take to begin."""
PROMETHEUS = """global: {{scrape_interval: 5s, evaluation_interval: 5s}}
rule_files: [{rules}]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["127.0.0.1:{alertmanager}"]}}]}}]}}
scrape_configs: [{{job_name: watched, file_sd_configs: [{{files: [{targets}]}}]}}]
"""
ALERTMANAGER = """route: {{receiver: hook, group_by: [alertname, run_id], group_wait: 1s, group_interval: 5s}}
receivers: [{{name: hook, webhook_configs: [{{url: "http://127.0.0.1:{receiver}/prometheus", send_resolved: true}}]}}]
"""


@dataclass
class Delivered:
    """What arrived at the receiver: (seconds since 1970, by whom, run, rule, status)."""

    alerts: list[tuple[float, str, str, str, str]] = field(default_factory=list)

    def first(self, by: str, run: str, rule: str, since: float) -> float | None:
        """Seconds from `since` to the first alert of this rule for a run; None where there is none."""
        # alerts of GPUs are of a node, whatever trains there
        runs = (run, "") if rule in OF_GPUS else (run,)
        found = (at for at, who, of, *what in self.alerts if who == by and of in runs and what == [rule, "firing"])
        return next((at - since for at in found if at > since), None)

    def rules(self, by: str, run: str, until: float) -> list[str]:
        """Rules that told of a run, but for its end."""
        found = [
            rule for at, who, of, rule, status in self.alerts if (who, of, status) == (by, run, "firing") and at < until
        ]
        return list(dict.fromkeys(rule for rule in found if rule not in ("run_finished", "run_failed")))


@contextlib.contextmanager
def receiver(delivered: Delivered) -> Iterator[int]:
    """The port of a receiver of webhooks: of Alertmanager at /prometheus, of the runs themselves at /itself."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for alert in body["alerts"]:
                labels = alert["labels"]
                run = labels.get("ray_train_run_name", "")
                delivered.alerts.append((time.time(), self.path[1:], run, labels["rule"], alert["status"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *about: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def running(command: list[str], log: Path, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process, and all that it starts, for as long as the context lasts."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, **more)
        try:
            yield process
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=15)


@contextlib.contextmanager
def monitoring(folder: Path, receiver_port: int) -> Iterator[dict[str, int]]:
    """Prometheus and Alertmanager, and their ports. Targets are read from targets.json of the folder."""
    ports = {"prometheus": free_port(), "alertmanager": free_port()}
    config = PROMETHEUS.format(rules=RULES, targets=folder / "targets.json", alertmanager=ports["alertmanager"])
    (folder / "prometheus.yml").write_text(config)
    (folder / "alertmanager.yml").write_text(ALERTMANAGER.format(receiver=receiver_port))
    (folder / "targets.json").write_text("[]")
    alertmanager = [
        "prometheus-alertmanager", f"--config.file={folder / 'alertmanager.yml'}", f"--storage.path={folder / 'am'}",
        f"--web.listen-address=127.0.0.1:{ports['alertmanager']}", "--cluster.listen-address=",
    ]  # fmt: skip
    prometheus = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{ports['prometheus']}", "--log.level=warn",
    ]  # fmt: skip
    with running(alertmanager, folder / "alertmanager.log"), running(prometheus, folder / "prometheus.log"):
        yield ports


def config_of(fault: Fault, folder: Path, port: int, hook: str, seconds: float) -> dict[str, Any]:
    """The config of a training with a fault."""
    return {
        "workload.name": "planted_faults.py:Planted",
        "workload.args": {"fault": fault.name, "folder": str(folder)},
        "batch.global_size": 8,
        "optimizer.learning_rate": 1e-3,
        "stop.after": f"{int(seconds / 0.065)} steps",
        "scale.workers": 2,
        "scale.gpus_per_worker": 0,
        "strategy.name": "ddp",
        "strategy.bucket_size_mib": 1 / 64,
        "data.readers": "worker",
        "data.chunk_mib": 0.001,
        "data.prefetch_mib": 0.002,
        "tracking.uri": f"sqlite:///{folder}/mlflow.db",
        "tracking.run_name": fault.name.replace(" ", "-"),
        "tracking.interval_s": 1,
        "checkpoint.storage_path": str(folder / "runs"),
        "monitoring.port": port,
        "alerts.webhook": hook,
        **fault.flags,
    }


def train_here(path: Path) -> None:
    """The training that a file describes, in this process and those that it starts."""
    from scaleray.config import load_config
    from scaleray.launch.run.train import train

    given = json.loads(path.read_text())
    config = load_config(flags=given["flags"], environ={})
    train(config, base_dir=HERE, local=not given["on_ray"], in_processes=not given["on_ray"], say=print)


class Run:
    """One training with a fault, and what came of it."""

    def __init__(self, fault: Fault, folder: Path, hook: str, seconds: float, gpus: StandInGpus) -> None:
        self.fault, self.folder, self.port = fault, folder / fault.name.replace(" ", "-"), free_port()
        (self.folder / "runs").mkdir(parents=True)
        flags = config_of(fault, self.folder, self.port, hook, seconds)
        self.config = self.folder / "config.json"
        self.config.write_text(json.dumps({"flags": flags, "on_ray": fault.on_ray}))
        self.gpus = gpus
        self.planted_at: float | None = None
        self.ended_at = float("inf")
        self.has_begun = False

    @property
    def name(self) -> str:
        return self.folder.name

    def watch(self, delivered: Delivered, healthy_s: float) -> None:
        """Train, plant the fault, and wait for its alerts."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--train", str(self.config)]
        with self.disk(), self.server(), running(command, self.folder / "log", env=environment) as process:
            if not self.wait_for_steps(process):
                return log(f"{self.fault.name}: did not begin, see {self.folder / 'log'}")
            self.has_begun = True
            if not self.fault.rule:
                process.wait(timeout=healthy_s + START_S)
                time.sleep(15)
                return
            time.sleep(self.fault.healthy_s)
            self.plant()
            until = time.time() + self.fault.watched_s
            while time.time() < until and any(None in self.seconds(delivered, rule) for rule in self.fault.rules):
                time.sleep(0.5)
            for rule in self.fault.rules:
                log(f"{self.fault.name}: {rule}: {self.seconds(delivered, rule)}")
            self.ended_at = time.time()

    def seconds(self, delivered: Delivered, rule: str) -> list[float | None]:
        """Seconds from the fault to its alert, by Prometheus and by the run itself where that judges it."""
        since = self.planted_at or time.time()
        whom = ("prometheus",) if rule in BY_PROMETHEUS_ALONE else ("prometheus", "itself")
        return [delivered.first(by, self.name, rule, since) for by in whom]

    def wait_for_steps(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until steps are published; false when they never are."""
        until = time.time() + START_S
        while time.time() < until and process.poll() is None:
            with contextlib.suppress(OSError):
                page = urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5).read().decode()
                if "ray_scaleray_last_step_timestamp_seconds{" in page:
                    return True
            time.sleep(1)
        return False

    def plant(self) -> None:
        """Begin the fault."""
        for _ in range(2 if self.fault.name == "restarts" else 0):
            self.kill_worker()
            time.sleep(10)
        self.planted_at = time.time()
        if self.fault.name == "dead worker" or self.fault.name == "restarts":
            self.kill_worker(waits=False)
        elif self.fault.name == "mlflow away":
            os.killpg(int((self.folder / "mlflow").read_text()), signal.SIGKILL)
        elif self.fault.name == "finished":
            self.planted_at = self.last_step()
        elif self.fault.name == "full disk":
            free = shutil.disk_usage(self.folder / "runs")
            (self.folder / "runs" / "filler").write_bytes(bytes(int(free.free - 0.02 * free.total)))
        else:
            for rule in OF_GPUS if self.fault.name == "gpus" else ():
                self.gpus.plant(rule)
            (self.folder / "planted").touch()

    def last_step(self) -> float:
        """When the last step began, once none has begun for three seconds."""
        while time.time() - (at := (self.folder / "step").stat().st_mtime) < 3.0:
            time.sleep(0.1)
        return at

    def kill_worker(self, *, waits: bool = True) -> None:
        """End the second worker, and wait for the one that is started in its place."""
        path = self.folder / "process-1"
        process = path.read_text()
        os.kill(int(process), signal.SIGKILL)
        until = time.time() + START_S
        while waits and path.read_text() == process and time.time() < until:
            time.sleep(0.5)

    @contextlib.contextmanager
    def server(self) -> Iterator[None]:
        """An MLflow server for the run, where its fault is that it goes away."""
        if self.fault.name != "mlflow away":
            yield
            return
        port = free_port()
        uri = f"http://127.0.0.1:{port}"
        given = json.loads(self.config.read_text())
        given["flags"]["tracking.uri"] = uri
        self.config.write_text(json.dumps(given))
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"]
        artifacts = ["--artifacts-destination", str(self.folder / "artifacts")]
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            *store,
            *artifacts,
        ]
        with running(command, self.folder / "mlflow.log") as process:
            (self.folder / "mlflow").write_text(str(process.pid))
            until = time.time() + START_S
            while time.time() < until and process.poll() is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{uri}/health", timeout=5)
                    break
                time.sleep(1)
            yield

    @contextlib.contextmanager
    def disk(self) -> Iterator[None]:
        """A small disk for the run, where its fault is a full one."""
        if self.fault.name != "full disk":
            yield
            return
        place = str(self.folder / "runs")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", place], check=True)


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def report(runs: list[Run], delivered: Delivered) -> str:
    """A row for each fault."""
    rows = []
    for run in runs:
        others = {
            by: [rule for rule in delivered.rules(by, run.name, run.ended_at) if rule not in run.fault.rules]
            for by in ("prometheus", "itself")
        }
        if not run.fault.rule:
            rows.append(
                [run.fault.name, run.fault.planted, "none", *(", ".join(o) or "none" for o in others.values()), ""]
            )
        for rule in run.fault.rules:
            times = ["not" if second is None else f"{second:.0f} s" for second in run.seconds(delivered, rule)]
            also = "; ".join(f"{by}: {', '.join(found)}" for by, found in others.items() if found)
            rows.append([run.fault.name, run.fault.planted, rule, *times, *["not judged"] * (2 - len(times)), also])
    return table(["fault", "planted", "rule", "by Prometheus", "by the run itself", "other alerts"], rows)


def problems(runs: list[Run], delivered: Delivered) -> list[str]:
    """Alerts that did not come, and those that came in a healthy training."""
    found = []
    for run in runs:
        for rule in run.fault.rules:
            if None in run.seconds(delivered, rule):
                found.append(f"{run.fault.name}: {rule} was not delivered: {run.seconds(delivered, rule)}")
        if not run.fault.rule:
            told = {by: delivered.rules(by, run.name, run.ended_at) for by in ("prometheus", "itself")}
            found += [f"{run.fault.name}: {by}: {', '.join(rules)}" for by, rules in told.items() if rules]
            if not run.has_begun:
                found.append(f"{run.fault.name}: the training did not begin")
    return found


def live_seconds(runs: list[Run], delivered: Delivered) -> dict[str, dict[str, Any]]:
    """By rule: what was planted, and seconds until its alert, by Prometheus and by the run itself."""
    return {
        rule: {"planted": run.fault.planted, "seconds": run.seconds(delivered, rule)}
        for run in runs
        for rule in run.fault.rules
    }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ",".join(name for name in BY_NAME if name not in ON_DEMAND)
    parser.add_argument("--only", default=usual, help="faults, with commas between them")
    parser.add_argument("--healthy-s", type=float, default=300.0, help="length of the healthy training")
    parser.add_argument("--at-once", type=int, default=3, help="trainings side by side")
    parser.add_argument(
        "--hold-s", type=float, default=0.0, help="go on so long after the last one, for a look at the pages"
    )
    parser.add_argument("--results", type=Path, help="folder for the report, such as jobs/benchmarks/results")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.train is not None:
        train_here(options.train)
        return 0
    if unknown := [name for name in options.only.split(",") if name not in BY_NAME]:
        sys.exit(f"--only: there is no fault {', '.join(unknown)}; known are {', '.join(BY_NAME)}")
    for program in ("prometheus", "prometheus-alertmanager"):
        if shutil.which(program) is None:
            sys.exit(f"{program} is not installed: apt-get install prometheus prometheus-alertmanager")
    began, delivered, gpus = conditions(["torch", "ray"]), Delivered(), StandInGpus()
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="alerts-", ignore_cleanup_errors=True))
        port, of_gpus = stack.enter_context(receiver(delivered)), stack.enter_context(exporting(gpus))
        folder, hook = Path(name), f"http://127.0.0.1:{port}/itself"
        ports = stack.enter_context(monitoring(folder, port))
        log(", ".join(f"{title} at http://127.0.0.1:{at}" for title, at in ports.items()) + f", {folder}")
        runs = [
            Run(BY_NAME[one], folder, hook, seconds_of(BY_NAME[one], options.healthy_s), gpus)
            for one in options.only.split(",")
        ]
        targets = [{"targets": [f"127.0.0.1:{port}" for port in (*(run.port for run in runs), of_gpus)]}]
        (folder / "new.json").write_text(json.dumps(targets))
        os.replace(folder / "new.json", folder / "targets.json")
        healthy = [run for run in runs if not run.fault.rule]
        for run in healthy:  # alone: others that start beside it on the same cores do make it slower
            run.watch(delivered, options.healthy_s)
        with ThreadPoolExecutor(options.at_once) as pool:
            list(pool.map(lambda run: run.watch(delivered, options.healthy_s), (r for r in runs if r not in healthy)))
        time.sleep(options.hold_s)
        for run in runs:
            if run.planted_at is None and run.fault.rule:
                log((run.folder / "log").read_text()[-2000:])
        found = problems(runs, delivered)
        text = f"{report(runs, delivered)}\n\n{chr(10).join(found) or 'Nothing is missing.'}"
        if options.results is None:
            print(text)
        else:
            record = {"conditions": began, "arguments": arguments_of(options), "rules": live_seconds(runs, delivered)}
            record["load_after"], record["problems"] = os.getloadavg()[0], found
            title = "Seconds until an alert is delivered"
            write_report("alerts", title=title, text=text, record=record, folder=options.results)
    return int(bool(found))


def seconds_of(fault: Fault, healthy_s: float) -> float:
    """How long a training would go on by itself."""
    if fault.name == "healthy":
        return healthy_s
    return fault.healthy_s if fault.name == "finished" else fault.healthy_s + 2 * fault.watched_s


if __name__ == "__main__":
    sys.exit(main())
