"""Roll an alias back to an earlier version."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

from scaleray.common.own_folder import cache_folder, user_or_somebody
from scaleray.errors import TrackingError, UsageError
from scaleray.models.fetched import changes
from scaleray.models.registry import ModelRegistry, ModelVersion, Named
from scaleray.release.gate.stored_evidence import EVIDENCE


def rollback(model: str, *, to: int | None = None, unchecked: str | None = None, uri: str | None = None) -> int:
    """Point an alias to an earlier version if its files are unchanged since its promotion. Returns that version.

    model: `NAME@ALIAS`. to: version; None: the last version that had the alias before the current one, without versions
    from which it was withdrawn. unchecked: reason for not checking files, stored in a tag of the version. Runs and
    evidence are not needed, as they may be unreachable in an incident.

    Raises UsageError if there is no such version, or TrackingError for files that have changed or cannot be fetched;
    the alias is then unchanged."""
    named = Named.parse(model)
    if named.alias is None:
        raise UsageError("MODEL", model, "it must be NAME@ALIAS")
    registry = ModelRegistry(uri)
    known = {one.number: one for one in registry.versions(named.model)}
    now = next((one.number for one in known.values() if named.alias in one.aliases), None)
    if now is None:
        raise TrackingError.problem(
            "The model", f"{named.model} has no alias {named.alias}", f"scaleray promote RUN --as {named.alias}"
        )
    before = had_before(known, known[now], named.alias)
    if to is None and not before:
        problem = f"has no version before {now}: it is the first one, or all earlier ones were rolled back"
        raise UsageError.problem(str(named), problem, "name a version with --to")
    chosen = before[0] if to is None else to
    if chosen not in known:
        raise UsageError("--to", chosen, f"{named.model} has the versions {', '.join(map(str, sorted(known)))}")
    if known[chosen].given_at(named.alias) is None:
        allowed = f"it was never promoted as {named.alias}, so it passed no gate"
        raise UsageError("--to", chosen, allowed, f"scaleray promote RUN --as {named.alias}")
    if unchecked is None:
        _check_files(registry, known[chosen])
    user = user_or_somebody() + (f", unchecked: {unchecked}" if unchecked else "")
    if chosen != now:  # first: cut off here, the alias names what it named, and the same command goes on
        registry.withdraw(known[now], named.alias, by=user)
    return registry.give(known[chosen], named.alias, by=user).number


def _check_files(registry: ModelRegistry, version: ModelVersion) -> None:
    """Raise TrackingError if files have changed since the promotion; evidence may be missing."""
    with tempfile.TemporaryDirectory(dir=cache_folder("models")) as place:
        try:
            wrong = changes(registry.download(version, Path(place)), version)
        except TrackingError as exc:
            wrong = [str(exc)]
    if wrong := [one for one in wrong if not one.startswith(f"{EVIDENCE}/")]:
        what, changed = f"the model {version.model}/{version.number}", "; ".join(wrong[:3])
        hint = "name another with --to, or move the alias without this check: --unchecked REASON"
        raise TrackingError.problem(what, f"has files that changed since its promotion: {changed}", hint)


def had_before(known: Mapping[int, ModelVersion], now: ModelVersion, alias: str) -> list[int]:
    """Numbers of the versions that had the alias before the current one, latest first."""
    given = {one.number: at for one in known.values() if (at := one.given_at(alias)) is not None}
    until = given.get(now.number, math.inf)
    older = [number for number, at in given.items() if at < until and not known[number].is_withdrawn(alias)]
    return sorted((number for number in older if number != now.number), key=lambda number: -given[number])
