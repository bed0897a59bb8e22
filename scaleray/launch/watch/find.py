"""Find the run to watch, and a source of its state: its folder on this machine, its recorder in a cluster, or MLflow.
The folder is preferred, since it needs no Ray, no MLflow and no answer from the run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleray.checkpoints.storage import Store
from scaleray.common.installed import names_what_is_missing
from scaleray.common.parsing import load_json
from scaleray.config.base import without_password
from scaleray.config.checkpoint import default_storage_path
from scaleray.errors import ClusterError, TrackingError
from scaleray.launch.cluster.connection import joined
from scaleray.launch.workers.recorder_actor import NAMES, NAMESPACE
from scaleray.live.live_folder import as_lost, runs_in, state_in_folder
from scaleray.recording.find_record import locations_of
from scaleray.recording.live_mlflow import find_in_mlflow, state_in_mlflow
from scaleray.recording.store import resolve_uri
from scaleray.records.live_state import FILE, LOST, LiveState

ANSWER_S = 10.0
"""Seconds within which a recorder must answer; enough even if its cores are busy."""

Ask = Callable[[], LiveState]


class RecorderGone(Exception):
    """The queried recorder has ended or can no longer be reached."""


@contextlib.contextmanager
def cluster_runs() -> Iterator[Callable[[], list[tuple[LiveState, Ask]]]]:
    """Yield a function that returns the live runs of the cluster of RAY_ADDRESS, each with a function that queries it
    again; both work during the context. Raises ClusterError."""
    address = os.environ["RAY_ADDRESS"]
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            "RAY_ADDRESS",
            address,
            "it is the address of the dashboard, which only accepts jobs",
            "give HOST:6379, or ray://HOST:10001 from outside the cluster",
        )
    with joined(address, name="RAY_ADDRESS"):
        yield _runs


def _runs() -> list[tuple[LiveState, Ask]]:
    import ray

    found = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] != NAMESPACE or not actor["name"].startswith(NAMES):
            continue
        with contextlib.suppress(RecorderGone, ValueError):  # it has ended since it was listed
            ask = asking(ray.get_actor(actor["name"], namespace=NAMESPACE))
            found.append((ask(), ask))
    return found


def asking(actor: Any) -> Ask:
    """Make a function that queries a recorder for the state of its run and raises RecorderGone."""

    def ask() -> LiveState:
        import ray

        try:
            return LiveState.from_json(ray.get(actor.live_text.remote(), timeout=ANSWER_S))
        except (ray.exceptions.RayError, AttributeError, ValueError) as exc:  # also a recorder of an older version
            raise RecorderGone(str(exc)) from exc

    return ask


MLFLOW_EVERY_S = 5.0
"""Minimum seconds between queries of MLflow, which receives a point only every few steps."""


@dataclass(frozen=True)
class Watched:
    """A watched run. where: source of its state, as text. least_s: minimum seconds between queries."""

    look: Callable[[], LiveState]
    where: str
    least_s: float = 0.0


def find_watched(run: str, stack: contextlib.ExitStack, *, uri: str | None = None) -> Watched:
    """Find the run that `run` names: by folder or bucket, by name in the storage path or in the cluster of RAY_ADDRESS,
    or by id or name in MLflow. stack: keeps the connection to the cluster. Raises UsageError."""
    known = _in_folders(run, uri)
    if known is not None and not known.look().has_ended:
        return known
    problem: ClusterError | None = None
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        try:
            if (found := _in_cluster(run, stack)) is not None:
                return found
        except ClusterError as exc:
            problem = exc
    if known is not None:
        return known
    try:
        return _in_mlflow(run, resolve_uri(uri))
    except TrackingError as exc:
        if exc.what != "RUN":
            raise
        raise problem or _unknown(run, exc) from exc


def watched_runs(stack: contextlib.ExitStack) -> Callable[[], list[LiveState]]:
    """Return a function that lists the runs of this machine's storage path and of the cluster of RAY_ADDRESS that are
    active or ended within the last hour. stack: keeps the connection. Raises ClusterError."""
    in_cluster = stack.enter_context(cluster_runs()) if os.environ.get("RAY_ADDRESS", "local") != "local" else list

    def look() -> list[LiveState]:
        here = runs_in()
        known = {(state.name, state.run_id) for state in here}
        return [*here, *(state for state, _ in in_cluster() if (state.name, state.run_id) not in known)]

    return look


@names_what_is_missing
def live_state(run: str | Path, *, uri: str | None = None) -> LiveState:
    """Return the current state of a run: its progress, loss, speed, phases, ranks and alerts, or how it ended.

    run: its folder, its name in the storage path or in the cluster of RAY_ADDRESS, or its id or name in MLflow at
    `uri`. Does not affect the run. Raises UsageError."""
    with contextlib.ExitStack() as stack:
        return find_watched(str(run), stack, uri=uri).look()


def watch(
    run: str | Path | None = None, *, interval: float = 2.0, uri: str | None = None
) -> Iterator[LiveState | list[LiveState]]:
    """Watch a run while it trains: yields its state repeatedly, until it has ended.

    run: as for `live_state`; None gives all runs of this machine and of the cluster of RAY_ADDRESS that are active or
    ended within the last hour, and never ends. interval: seconds between two states. Raises UsageError."""
    with contextlib.ExitStack() as stack:
        if run is None:
            look: Callable[[], LiveState | list[LiveState]] = watched_runs(stack)
        else:
            found = find_watched(str(run), stack, uri=uri)
            look, interval = found.look, max(interval, found.least_s)
        while True:
            seen = look()
            yield seen
            if isinstance(seen, LiveState) and seen.has_ended:
                return
            time.sleep(interval)


def _in_folders(run: str, uri: str | None) -> Watched | None:
    for location in locations_of(run):
        if "://" in location.root:
            return _in_bucket(location, uri)
        folder = Path(location.root)
        if state_in_folder(folder) is not None:
            return Watched(lambda folder=folder: _of_folder(folder), f"folder {folder}")  # type: ignore[misc]
    folder = Path(run).expanduser()
    if folder.is_dir() and ("/" in run or run in (".", "..")):
        inside = [state.name for state in runs_in(str(folder))]
        raise TrackingError(
            "RUN",
            run,
            f"it is not the folder of a run, as it has no run.json, {FILE} or record.json",
            f"runs in it: {', '.join(inside[:5])}" if inside else "give a run's folder, name or id; --all shows all",
        )
    return None


def _of_folder(folder: Path) -> LiveState:
    state = state_in_folder(folder)
    if state is None:
        raise TrackingError("the run folder", str(folder), "it no longer exists", "someone moved or removed it")
    return state


def _in_bucket(location: Store, uri: str | None) -> Watched | None:
    """A run in a bucket, where its state is stored only at its end; until then, MLflow has the state."""
    where = without_password(location.root)
    with contextlib.suppress(OSError, ValueError, TypeError):
        state = LiveState.from_json(location.read(FILE))
        return Watched(lambda: state, where)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        about = load_json(location.read("run.json"))
        return _in_mlflow(about["run_id"], resolve_uri(uri))
    raise TrackingError("RUN", where, "it holds no run of this version", "give a run's folder, name or id in MLflow")


def _in_cluster(run: str, stack: contextlib.ExitStack) -> Watched | None:
    found = [(state, ask) for state, ask in stack.enter_context(cluster_runs())() if run in (state.name, state.run_id)]
    if len(found) > 1:
        ids = ", ".join(f"{state.run_id or 'not yet in MLflow'} ({state.run_dir})" for state, _ in found)
        raise TrackingError("RUN", run, f"{len(found)} runs of the cluster have this name: {ids}", "give an id")
    if not found:
        return None
    last, ask = found[0]

    def look() -> LiveState:
        nonlocal last
        try:
            last = ask()
        except RecorderGone:
            last = _after_its_recorder(last)
        return last

    return Watched(look, f"cluster {os.environ['RAY_ADDRESS']}")


def _after_its_recorder(last: LiveState) -> LiveState:
    """State of a run whose recorder is gone, which normally means that the run has ended."""
    here = Path(last.run_dir)
    if (state := state_in_folder(here) if here.is_absolute() else None) is not None and state.name == last.name:
        return state
    if not last.has_ended and last.run_id:
        with contextlib.suppress(TrackingError, ModuleNotFoundError):
            of_mlflow = state_in_mlflow(last.run_id, resolve_uri(None))
            return dataclasses.replace(last, status=of_mlflow.status, verdict=of_mlflow.verdict, left_s=None)
    silent_s = time.time() - (last.seen_at or 0.0)
    return dataclasses.replace(as_lost(last), status=LOST) if silent_s > 5.0 and not last.has_ended else last


def _in_mlflow(run: str, uri: str) -> Watched:
    run_id, folder, notes = find_in_mlflow(run, uri)
    if folder is not None and (state := state_in_folder(folder)) is not None and state.run_id == run_id:
        return Watched(lambda: dataclasses.replace(_of_folder(folder), notes=notes), f"folder {folder}")
    where = f"MLflow at {without_password(uri)}"
    return Watched(lambda: state_in_mlflow(run_id, uri, notes), where, MLFLOW_EVERY_S)


def _unknown(run: str, exc: TrackingError) -> TrackingError:
    locations = [f"no folder of this name here or in {default_storage_path()}"]
    if os.environ.get("RAY_ADDRESS", "local") != "local":
        locations.append(f"no live run of the cluster at {os.environ['RAY_ADDRESS']}")
    reason = exc.allowed.partition(" and no run ")[2] or "of this id or name in MLflow"
    return TrackingError.problem(
        "RUN",
        f"{run} was not found: {', '.join(locations)}, and no run {reason}",
        "scaleray watch --all shows all active runs",
    )
