"""Ray on the machines of `machines.py`, each a node with an address of its own, and scaleray's commands on any of them."""

from __future__ import annotations

import csv
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from machines import Machine
from waiting import wait_until

from scaleray.checkpoints.catalog import Catalog

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(sys.executable).parent
PORT = 6379
SIZES = ("--object-store-memory=200000000", "--disable-usage-stats", "--temp-dir=/tmp/ray")
WORKLOADS = ROOT / "tests" / "launch" / "workloads.py"
SLOW = {
    "workload.name": f"{WORKLOADS}:Slow", "workload.args": "{rows: 100, seconds: 0.08}", "batch.global-size": "12",
    "optimizer.learning-rate": "0.01", "checkpoint.every": "20 steps", "stop.after": "200 steps",
}  # fmt: skip
"""A training of at least 16 s, in which something can happen."""
ON_CPUS = {
    "scale.cpus-per-worker": "1", "scale.gpus-per-worker": "0", "tracking.system-metrics": "false",
    "tracking.interval-s": "0.5",
}  # fmt: skip


class RayMachines:
    """A Ray whose head is on one of them. folder: where runs, MLflow's database and what commands print are, which all
    of them see."""

    def __init__(self, head: Machine, folder: Path) -> None:
        self.head, self.folder, self.address = head, folder, f"{head.address}:{PORT}"
        others = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SCALERAY_", "MLFLOW_"))}
        self.environment = {
            **others, "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HOME": str(folder),
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def start(self, *words: str, **variables: str) -> None:
        """Start the head."""
        self._ray(self.head, "--head", f"--port={PORT}", "--include-dashboard=false", *words, **variables)

    def join(self, machine: Machine, *words: str, **variables: str) -> None:
        """Let a machine be a node."""
        self._ray(machine, f"--address={self.address}", *words, **variables)

    def _ray(self, machine: Machine, *words: str, **variables: str) -> None:
        command = ["ray", "start", f"--node-ip-address={machine.address}", *SIZES, *words]
        for _ in range(3):
            process = self.begin(machine, f"ray-{machine.name}", *command, **variables)
            if process.wait(timeout=300) == 0:
                return
            if "The current node timed out during startup" not in self.said(f"ray-{machine.name}"):
                break
            machine.end_processes()  # Ray gives a node 30 s, which a machine that others load may not have for it
        raise AssertionError(self.said(f"ray-{machine.name}"))

    def begin(self, machine: Machine, name: str, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        """A command on a machine. What it prints is kept by this name."""
        with open(self._log(name), "ab") as log:
            return subprocess.Popen(
                machine.command(words, folder=ROOT), env={**self.environment, **variables},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def scaleray(self, machine: Machine, name: str, *words: str) -> subprocess.Popen[bytes]:
        """A command of scaleray on a machine."""
        return self.begin(machine, name, sys.executable, "-m", "scaleray", *words, RAY_ADDRESS=self.address)

    def train(
        self, machine: Machine, name: str, options: Mapping[str, str], words: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """A training whose driver is on this machine."""
        return self.scaleray(machine, name, *self.training(name, options), *words)

    def training(self, name: str, options: Mapping[str, str]) -> list[str]:
        """The words of a training's command."""
        places = {
            "checkpoint.storage-path": str(self.folder / "runs"), "tracking.uri": f"sqlite:///{self.folder}/mlflow.db",
            "tracking.run-name": name,
        }  # fmt: skip
        given = {**ON_CPUS, **places, **options}
        return ["train", *(word for key, value in given.items() for word in (f"--{key}", value))]

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        """The end of what a command has printed."""
        return self._log(name).read_text(errors="replace")[-4000:]

    def run_folder(self, name: str) -> Path:
        """The folder of a training."""
        return self.folder / "runs" / name

    def rows(self, name: str) -> list[dict[str, str]]:
        """The steps of a training."""
        with open(self.run_folder(name) / "steps.csv", newline="") as file:
            return list(csv.DictReader(file))

    def record(self, name: str) -> dict:
        """The record of a training that has ended."""
        return json.loads((self.run_folder(name) / "record.json").read_text())

    def nodes_of_ranks(self, name: str) -> list[str]:
        """The addresses of the workers of a training that has ended, in the order of the ranks."""
        workers = self.record(name)["environment"]["workers"]
        return [worker["node"] for worker in sorted(workers, key=lambda worker: worker["rank"])]

    def wait_for_checkpoint(self, process: subprocess.Popen[bytes], name: str, step: int) -> int:
        """The step of the newest checkpoint of a training that is under way, as soon as it is this one or a later one."""
        found = [0]

        def is_there() -> bool:
            assert process.poll() is None, self.said(name)
            newest = Catalog.of_run(str(self.run_folder(name))).newest()
            found[0] = 0 if newest is None else newest.step
            return found[0] >= step

        wait_until(is_there, seconds=300)
        return found[0]
