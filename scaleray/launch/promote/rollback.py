"""An alias back to a version that it named before."""

from __future__ import annotations

import math
from collections.abc import Mapping

from scaleray.errors import TrackingError, UsageError
from scaleray.gates.record import GateRecord
from scaleray.launch.promote.check import check_promoted
from scaleray.tracking.registry.models import ModelRegistry, ModelVersion, Named
from scaleray.user_name import user_or_somebody


def rollback(model: str, *, to: int | None = None, uri: str | None = None) -> tuple[int, GateRecord]:
    """Let an alias name an earlier version again, once that one has been checked. Gives the version that it names then,
    and the check, which moves nothing unless it passes.

    model: `NAME@ALIAS`. to: version; None is the one that had the alias last before the present one, without those from
    which it was taken back. Raises UsageError where there is no such version.
    """
    named = Named.parse(model)
    if named.alias is None:
        raise UsageError("the model", model, "an alias is taken back, so it must be NAME@ALIAS")
    registry = ModelRegistry(uri)
    known = {one.number: one for one in registry.versions(named.model)}
    now = next((one.number for one in known.values() if named.alias in one.aliases), None)
    if now is None:
        raise TrackingError(
            "the model", str(named), "there is no such alias", f"scaleray promote RUN --as {named.alias}"
        )
    before = had_before(known, known[now], named.alias)
    if to is None and not before:
        allowed = f"version {now} is the first that was promoted as {named.alias}, or it was taken back from all others"
        raise UsageError("the version to go back to", None, allowed, "name one with --to")
    chosen = before[0] if to is None else to
    if chosen not in known:
        raise UsageError("--to", chosen, f"{named.model} has the versions {', '.join(map(str, sorted(known)))}")
    if known[chosen].given_at(named.alias) is None:
        allowed = f"it was never promoted as {named.alias}, so that no gate let it through"
        raise UsageError("--to", chosen, allowed, f"scaleray promote RUN --as {named.alias}")
    check = check_promoted(f"{named.model}/{chosen}", uri=registry.uri)
    if check.answer != "pass":
        return now, check
    user = user_or_somebody()
    if chosen != now:  # first: cut off here, the alias names what it named, and the same command goes on
        registry.withdraw(known[now], named.alias, by=user)
    return registry.give(known[chosen], named.alias, by=user).number, check


def had_before(known: Mapping[int, ModelVersion], now: ModelVersion, alias: str) -> list[int]:
    """Numbers of the versions that had the alias before it was given to the present one, the last one first."""
    given = {one.number: at for one in known.values() if (at := one.given_at(alias)) is not None}
    until = given.get(now.number, math.inf)
    older = [number for number, at in given.items() if at < until and not known[number].is_withdrawn(alias)]
    return sorted((number for number in older if number != now.number), key=lambda number: -given[number])
