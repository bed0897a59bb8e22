"""The experiments that somebody asks for: by model, number of workers, date, kind, and conditions on any field."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from scaleray.errors import ConfigError
from scaleray.parsing import near_words
from scaleray.records.experiment import COLUMNS, KINDS, Experiment
from scaleray.records.where import HINT, Condition
from scaleray.tracking.registry.experiments import read_experiments

ALL_KINDS = ("profile", *dict.fromkeys(KINDS.values()))
UNITS = {"h": "hours", "d": "days", "w": "weeks"}


def list_experiments(
    *,
    model: str | None = None,
    gpus: int | None = None,
    since: str | None = None,
    where: str | None = None,
    kinds: Sequence[str] = (),
    uri: str | None = None,
) -> list[Experiment]:
    """Runs, studies with their points, sweeps and plans in MLflow, the newest first: `scaleray registry list`.

    model: a part of the workload's name. gpus: number of workers. since: a date such as 2026-11-01, or how long ago, as
    in 7d or 12h. where: a condition such as `efficiency < 0.8 and owner == anna`, on the registry's fields and on any
    param or metric of MLflow. kinds: run, profile, study, point, sweep, trial or plan; none are all but trials. uri:
    MLflow's. Raises UsageError for a store that is empty or away, and for a condition that cannot be read.
    """
    condition = _condition(where)
    unknown = [kind for kind in kinds if kind not in ALL_KINDS]
    if unknown:
        raise ConfigError("--kind", unknown[0], f"it must be one of {', '.join(ALL_KINDS)}")
    if gpus is not None and gpus < 1:
        raise ConfigError("--gpus", gpus, "it must be a number of workers, at least 1")
    since_ms = None if since is None else moment_ms(since)
    found = read_experiments(uri, since_ms=since_ms)
    if condition is not None:
        _check_fields(condition, found)
    wanted = kinds or [kind for kind in ALL_KINDS if kind != "trial"]
    return [
        one
        for one in found
        if one.kind in wanted
        and (model is None or model.lower() in str(one.values.get("model", "")).lower())
        and (gpus is None or one.values.get("gpus") == gpus)
        and (condition is None or _holds(condition, one))
    ]


def moment_ms(text: str) -> int:
    """Milliseconds since 1970 of a date, a date with a time (UTC), or a time ago. Raises ConfigError."""
    ago = re.fullmatch(r"(\d{1,4})\s*([hdw])", text.strip())
    try:
        if ago is not None:
            moment = datetime.now(UTC) - timedelta(**{UNITS[ago[2]]: int(ago[1])})
        else:
            moment = datetime.fromisoformat(text.strip())
            moment = moment.replace(tzinfo=moment.tzinfo or UTC)
    except (ValueError, OverflowError):
        allowed = "it must be a date such as 2026-11-01, or how long ago: 12h, 7d, 2w"
        raise ConfigError("--since", text, allowed) from None
    return math.floor(moment.timestamp() * 1000)


def _condition(where: str | None) -> Condition | None:
    if where is None:
        return None
    try:
        return Condition.parse(where)
    except ValueError as exc:
        raise ConfigError("--where", where, f"it is no condition: {exc}", HINT) from exc


def _check_fields(condition: Condition, found: Sequence[Experiment]) -> None:
    """Refuse a field that nothing has, which is a slip of the pen."""
    known = {*COLUMNS, *(name for one in found for name in (*one.params, *one.metrics))}
    for name in condition.fields:
        if name not in known:
            near = near_words(name, sorted(known))
            fields = f"fields are {', '.join(COLUMNS)}, and every param and metric in MLflow"
            hint = f"did you mean {near[0]}? {fields}" if near else fields
            raise ConfigError("--where", condition.text, f"no experiment has a field {name}", hint)


def _holds(condition: Condition, one: Experiment) -> bool:
    try:
        return condition.holds(one.asked()) is True
    except ValueError as exc:
        raise ConfigError("--where", condition.text, f"of {one.values.get('name')}: {exc}", HINT) from exc
