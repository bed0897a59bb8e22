"""The faults. Each does its harm to a run, waits until it is over, and says what it really did.

An injector returns the time of the harm. It raises NotInjected when the harm could not be done, which is then not counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from fault_suite.cluster import Nodes, raylet_of
from fault_suite.run import Failed, Run
from fault_suite.services import TROUBLES, Bucket, Proxy, TrackingServer

HANG_SLACK_S = 30.0  # the message travels to the terminal once a second; with 15 busy processes it took 23 s longer
DRAIN_S = 8


class NotInjected(Exception):
    """The harm could not be done."""


@dataclass(frozen=True)
class Scene:
    """What an injector may touch."""

    run: Run
    nodes: Nodes
    random: random.Random
    bucket: Bucket | None = None
    tracking: TrackingServer | None = None
    proxy: Proxy | None = None

    def victim(self) -> tuple[int, int]:
        """(rank, process) of a worker that trains now."""
        entry = self.random.choice(list(self.run.workers().values()))
        return entry.rank, entry.process


def kill_worker(scene: Scene) -> float:
    """SIGKILL to a worker."""
    _, process = scene.victim()
    return kill(process)


def kill_node(scene: Scene) -> float:
    """SIGKILL to a node with a worker; another node comes later, as in a cloud."""
    _, process = scene.victim()
    node = scene.nodes.at(process)
    at, raylet = time.time(), raylet_of(node)
    scene.nodes.kill(node)
    wait_gone(raylet)
    wait_gone(process)
    scene.nodes.add()
    return at


def drain_node(scene: Scene) -> float:
    """Announce that a worker's node goes away, then take it away."""
    _, process = scene.victim()
    node = scene.nodes.at(process)
    at, raylet = time.time(), raylet_of(node)
    if not scene.nodes.drain(node, seconds=DRAIN_S):
        raise NotInjected("the drain was not accepted")
    scene.nodes.add()
    scene.run.wait_for(
        lambda: scene.run.said("announced that it will remove a node", since=at), "word of the drain", seconds=30
    )
    time.sleep(max(0.0, at + DRAIN_S - time.time()))
    gone = time.time()
    scene.nodes.kill(node)
    wait_gone(raylet)
    return gone


def kill_controller(scene: Scene) -> float:
    """SIGKILL to Ray Train's controller."""
    found = [actor for actor in scene.nodes.actors() if actor.class_name.endswith("TrainController")]
    if len(found) != 1:
        raise NotInjected(f"{len(found)} controllers")
    return kill(found[0].pid)


def kill_workers_and_controller(scene: Scene) -> float:
    """SIGKILL to every worker and, while Ray Train still deals with that, to its controller."""
    for entry in scene.run.workers().values():
        kill(entry.process)
    return kill_controller(scene)


def kill_recorder(scene: Scene) -> float:
    """SIGKILL to the process that writes MLflow and steps.csv."""
    found = [actor for actor in scene.nodes.actors() if actor.class_name.endswith("PoliteRecorder")]
    if len(found) != 1:
        raise NotInjected(f"{len(found)} recorders")
    return kill(found[0].pid)


def kill_driver(scene: Scene) -> float:
    """SIGKILL to the command, then the same command again."""
    assert scene.run.driver is not None
    at = kill(scene.run.driver.pid)
    scene.run.driver.wait(timeout=30)
    scene.run.start()
    return at


def terminate_driver(scene: Scene) -> float:
    """SIGTERM to the command, which has to save and leave; then the same command again."""
    run = scene.run
    assert run.driver is not None
    at, before = time.time(), run.step()
    run.driver.terminate()
    if run.driver.wait(timeout=60) != 130 or not run.said("KILLED", since=at):
        raise Failed(f"SIGTERM ended the run with exit code {run.driver.returncode}:\n{run.tail()}")
    saved = [line for _, line in run.said("to continue after step", since=at)]
    if not saved or int(saved[-1].split("after step ")[1].split(":")[0]) < before:
        raise Failed(f"SIGTERM at step {before} did not save: {saved}")
    run.start()
    return at


def hang_in_code(scene: Scene) -> float:
    """A worker's own code does not come back."""
    rank, _ = scene.victim()
    order = scene.run.diary / f"hang-{rank}"
    order.touch()
    scene.run.wait_for(lambda: not order.exists(), "the hang", seconds=30)
    at = time.time()
    step = next(int(path.name.split("-")[2]) for path in scene.run.diary.glob(f"hung-{rank}-*"))
    for path in scene.run.diary.glob(f"hung-{rank}-*"):
        path.unlink()
    expect_named(scene.run, rank, step, at)
    return at


def stop_process(scene: Scene) -> float:
    """SIGSTOP to a worker: not even its threads run any more."""
    rank, process = scene.victim()
    psutil.Process(process).suspend()
    at = time.time()
    time.sleep(0.2)
    step = scene.run.workers()[rank].step
    expect_named(scene.run, rank, step, at)
    return at


def expect_named(run: Run, rank: int, step: int, at: float) -> None:
    """The hang is reported within its bound, with rank and step: by the watch of steps, or by the collective of another
    rank that timed out first."""
    bound = run.size.hang_limit_s + HANG_SLACK_S
    steps = [f"step {later}" for later in range(step, step + 3)]

    def named() -> bool:
        hangs = [line for _, line in run.said("hang", since=at)]
        waits = run.said(f"rank {rank} did not arrive", since=at)
        timeouts = [line for _, line in run.said("did not answer", since=at)]
        return any(f"rank {rank}" in line and any(later in line for later in steps) for line in hangs) or (
            bool(waits) and any(later in line for line in timeouts for later in steps)
        )

    run.wait_for(named, f"word that rank {rank} hangs in step {step}", seconds=bound)


def kill_while_saving(scene: Scene) -> float:
    """SIGKILL to a worker while a checkpoint has shards but no manifest."""
    folder = scene.run.path / "checkpoints"
    before = {path.name for path in folder.glob("step-*")}
    _, process = scene.victim()

    def half_written() -> Path | None:
        # whatever is in it: a whole file, or one that is being written
        return next((p for p in folder.glob("step-*") if p.name not in before and any(p.iterdir())), None)

    deadline = time.monotonic() + 30
    while (found := half_written()) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    if found is None:
        raise NotInjected("no checkpoint began")
    at = kill(process)
    if (found / "manifest.json").exists():
        raise NotInjected("the checkpoint was faster")
    return at


def kill_while_uploading(scene: Scene) -> float:
    """SIGKILL to the worker whose shard the bucket is receiving."""
    assert scene.bucket is not None
    times: list[float] = []
    _, process = scene.victim()

    def harm() -> None:
        times.append(kill(process))

    scene.bucket.on_shard = harm
    scene.run.wait_for(lambda: times, "an upload", seconds=30)
    return times[0]


def truncate_shard(scene: Scene) -> float:
    """The newest checkpoint's shard loses its second half, and a worker dies."""
    return damage(scene, lambda path: os.truncate(path, path.stat().st_size // 2))


def flip_bit(scene: Scene) -> float:
    """One bit of the newest checkpoint changes, and a worker dies."""
    return damage(scene, lambda path: _flip(path, scene.random))


def damage(scene: Scene, harm: Callable[[Path], None]) -> float:
    """Harm a shard right after a checkpoint was published; the restart must find out and say so."""
    folder = scene.run.path / "checkpoints"
    before = {path.parent.name for path in folder.glob("step-*/manifest.json")}

    def published() -> Path | None:
        return next((p.parent for p in folder.glob("step-*/manifest.json") if p.parent.name not in before), None)

    checkpoint = scene.run.wait_for(published, "a checkpoint", seconds=30)
    shard = scene.random.choice(sorted(checkpoint.glob("*.bin")))
    content = shard.read_bytes()
    harm(shard)
    if shard.read_bytes() == content:
        raise NotInjected("the file is as it was")
    _, process = scene.victim()
    at = kill(process)
    scene.run.wait_for(
        lambda: any(shard.name in line for _, line in scene.run.said("is damaged", since=at)),
        f"word that {shard.name} of {checkpoint.name} is damaged",
    )
    return at


def refuse_writes(scene: Scene) -> float:
    """No process of the run can write to its files for a while, as on a full disk; then a worker dies."""
    run = scene.run
    recorders = [actor.pid for actor in scene.nodes.actors() if actor.class_name.endswith("PoliteRecorder")]
    # every write beyond so many bytes of a file fails: shards do, diaries and logs of workers do not
    limits = {**{entry.process: 64 * 1024 for entry in run.workers().values()}, **dict.fromkeys(recorders, 1024)}
    at = time.time()
    for process, limit in limits.items():
        psutil.Process(process).rlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    run.wait_for(lambda: run.said("could not be written", since=at), "a checkpoint that cannot be written", seconds=30)
    for process in limits:
        psutil.Process(process).rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return kill(scene.victim()[1])


def fail_bucket(scene: Scene) -> float:
    """The bucket answers 500 to everything for a while; then a worker dies."""
    bucket, run = scene.bucket, scene.run
    assert bucket is not None
    wait_until_under_way(run)
    at, refused = time.time(), bucket.num_refused
    bucket.failing.set()
    try:
        run.wait_for(
            lambda: run.said("could not be written", since=at), "a checkpoint that cannot be written", seconds=60
        )
    finally:
        bucket.failing.clear()
    if bucket.num_refused == refused:
        raise NotInjected("nothing was refused")
    return kill(scene.victim()[1])


def kill_tracking(scene: Scene) -> float:
    """SIGKILL to the MLflow server; a worker dies while it is away; then it comes back."""
    assert scene.tracking is not None
    wait_until_under_way(scene.run)
    at = time.time()
    if not scene.tracking.kill():
        raise NotInjected("the server is still there")
    scene.run.wait_for(
        lambda: scene.run.said("MLflow accepts no more data", since=at), "word of the lost server", seconds=30
    )
    killed = kill(scene.victim()[1])
    scene.tracking.start()
    # the end of a run tries once more, and says nothing when that succeeds
    scene.run.wait_for(
        lambda: scene.run.said("MLflow is back", since=at) or scene.run.is_over, "the return of the server", seconds=60
    )
    return killed


def lose_storage(scene: Scene) -> float:
    """The run's folder is gone for a while, with a file in its place; then a worker dies."""
    run = scene.run
    wait_until_under_way(run)
    at, folder = time.time(), run.path
    away = run.folder / "away"
    folder.rename(away)
    folder.touch()
    try:
        run.wait_for(lambda: run.said("could not be written", since=at), "a checkpoint that cannot be written")
    finally:
        folder.unlink()
        away.rename(folder)
    return kill(scene.victim()[1])


def trouble_tracking(scene: Scene, trouble: str) -> float:
    """MLflow's server answers in a wrong way, or late; a worker dies meanwhile."""
    proxy, run = scene.proxy, scene.run
    assert proxy is not None
    wait_until_under_way(run)
    proxy.begin(trouble)
    try:
        killed = kill(scene.victim()[1])
        run.wait_for(lambda: proxy.num_troubled >= 3, f"three answers of the kind `{trouble}`", may_end=True)
    finally:
        proxy.begin("")
    return killed


def kill_of_own_ray(scene: Scene, name: str) -> float:
    """SIGKILL to a process of the command's own Ray, with which the command dies: there must be a message, a run that is
    marked, and nothing left. Then the same command again."""
    run = scene.run
    assert run.driver is not None
    family = psutil.Process(run.driver.pid).children(recursive=True)
    found = [process for process in family if process.name() == name]
    if len(found) != 1:
        raise NotInjected(f"{len(found)} processes called {name}")
    folder = Path(found[0].environ()["WORKER_TEMPLATE_SOCKET"]).parent
    at = kill(found[0].pid)
    if run.driver.wait(timeout=150) == 0:
        raise NotInjected("the run was done before its Ray was missed")
    run.wait_for(lambda: run.said("ended before it was done", since=at), "a message", seconds=60, may_end=True)
    _, alive = psutil.wait_procs(family, timeout=30)
    if alive or folder.exists():
        raise Failed(f"{name} left {alive} and {folder if folder.exists() else 'no folder'}")
    with contextlib.closing(sqlite3.connect(run.tracking_uri.removeprefix("sqlite:///"))) as database:
        status = [row[0] for row in database.execute("select status from runs")]
    if status != ["FAILED"]:
        raise Failed(f"MLflow has {status} after the end of {name}")
    run.start()
    return at


def step_clock(scene: Scene) -> float:
    """The wall clock of all Python code of the run steps forward by an hour; then a worker dies."""
    (scene.run.folder / "clock" / "stepped").touch()
    return kill(scene.victim()[1])


def wait_until_under_way(run: Run) -> None:
    """The run is known to MLflow and has a checkpoint; before that, it cannot do without servers."""
    run.wait_for(lambda: run.said("| checkpoint |"), "the first checkpoint", seconds=60)


def kill(process: int) -> float:
    """SIGKILL, and wait until the process is gone. Gives the time of the signal."""
    at = time.time()
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        raise NotInjected(f"process {process} was gone already") from None
    wait_gone(process)
    return at


def wait_gone(process: int, *, seconds: float = 20.0) -> None:
    """Return when the process has ended. Raises NotInjected when it does not."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(process).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                raise NotInjected(f"process {process} still runs")
            time.sleep(0.02)


def _flip(path: Path, chosen: random.Random) -> None:
    position = chosen.randrange(path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << chosen.randrange(8)]))


LOCAL: dict[str, Callable[[Scene], float]] = {
    "worker killed": kill_worker,
    "node killed": kill_node,
    "controller killed": kill_controller,
    "workers and controller killed": kill_workers_and_controller,
    "recorder killed": kill_recorder,
    "driver killed": kill_driver,
    "hang in user code": hang_in_code,
    "process stopped": stop_process,
    "killed while saving": kill_while_saving,
    "shard truncated": truncate_shard,
    "shard bit flipped": flip_bit,
    "writes refused": refuse_writes,
    "SIGTERM with grace": terminate_driver,
    "node drained": drain_node,
    "storage gone": lose_storage,
}
S3: dict[str, Callable[[Scene], float]] = {
    "S3 answers 500": fail_bucket,
    "killed while uploading": kill_while_uploading,
}
SERVER: dict[str, Callable[[Scene], float]] = {"MLflow server killed": kill_tracking}
PROXY: dict[str, Callable[[Scene], float]] = {
    f"MLflow answers: {trouble}": partial(trouble_tracking, trouble=trouble) for trouble in TROUBLES
}
OWN_RAY: dict[str, Callable[[Scene], float]] = {
    "raylet killed": partial(kill_of_own_ray, name="raylet"),
    "GCS killed": partial(kill_of_own_ray, name="gcs_server"),
    "clock steps": step_clock,
}
"""Faults of runs with a Ray of their own."""
KINDS = {**LOCAL, **S3, **SERVER, **PROXY, **OWN_RAY}
