"""`scaleray watch`, `scaleray config` and `scaleray tracking` as functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scaleray.api import Config, resolved
from scaleray.installed import names_what_is_missing

if TYPE_CHECKING:
    from scaleray.records.live import LiveState


@names_what_is_missing
def show_config(config: Config, workload: Any = None, *, data: bool = True) -> dict[str, Any]:
    """The resolved config, its hash, every value that is derived from it, and how.

    config: a RunConfig, a YAML file, or a mapping of dotted keys or sections. workload: a class or an object; None is
    the config's. data: load its data, which derived values depend on; without it they are left out.
    """
    from scaleray.launch.session.shown_config import shown_config

    whole, base_dir, given = resolved(config, workload)
    return shown_config(whole, given, data=data, base_dir=base_dir)


def config_keys(section: str | None = None) -> list[dict[str, str]]:
    """The keys of the config: what each may hold, its default and its meaning.

    section: only a section, such as `optimizer`, or the keys whose name holds this word.
    """
    import dataclasses

    from scaleray.config.reference import key_rows, rows_of

    return [dataclasses.asdict(row) for row in (key_rows() if section is None else rows_of(section))]


def config_schema(what: Literal["config", "run", "study", "sweep", "live"] = "config") -> dict[str, Any]:
    """The JSON schema of the config, for editors, of the record.json of a run, study or sweep, or of what
    `scaleray watch --json` prints of one that lives."""
    from scaleray.records.schemas import SCHEMAS

    return dict(SCHEMAS[what]())


@names_what_is_missing
def replay(file: str | Path, *, uri: str | None = None) -> int | None:
    """Send to MLflow what a run, study or sweep could not write while the server was away.

    file: a run folder's unsent.jsonl, or the record.json of a study or sweep. uri: tracking URI, if the server has
    moved. Gives the number of operations that were sent, None for a record. Raises TrackingError where MLflow still
    lacks something.
    """
    from scaleray.tracking.send import send

    return send(Path(file), uri=uri)


@names_what_is_missing
def tracking_ui(*, uri: str | None = None, port: int = 5000) -> int:
    """Serve MLflow's pages for runs in a database file, on 127.0.0.1 only, until it is interrupted.

    Gives the exit code. uri: tracking URI; None is the one that trainings use.
    """
    from scaleray.tracking.ui import serve

    return serve(uri, port=port)


@names_what_is_missing
def live_state(run: str | Path, *, uri: str | None = None) -> LiveState:
    """Current state of a run: how far it is, its loss, speed, phases, ranks and alerts, or how it ended.

    run: its folder, its name in the storage path or in the cluster of RAY_ADDRESS, or its id or name in MLflow at
    `uri`. Disturbs nothing.
    """
    from scaleray.launch.watch.find import find_watched

    with contextlib.ExitStack() as stack:
        return find_watched(str(run), stack, uri=uri).look()


@names_what_is_missing
def watch(
    run: str | Path | None = None, *, interval: float = 2.0, uri: str | None = None
) -> Iterator[LiveState | list[LiveState]]:
    """A run while it trains: its state again and again, until it has ended.

    run: as for `live_state`; None gives all runs of this machine and of the cluster of RAY_ADDRESS that live or ended
    within the last hour, and never ends. interval: seconds between two states.
    """
    from scaleray.launch.watch.find import states_of

    yield from states_of(None if run is None else str(run), interval_s=interval, uri=uri)
