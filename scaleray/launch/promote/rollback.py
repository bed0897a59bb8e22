"""An alias back to a version that it named before."""

from __future__ import annotations

import getpass

from scaleray.errors import TrackingError, UsageError
from scaleray.gates.record import GateRecord
from scaleray.launch.promote.check import check_promoted
from scaleray.tracking.registry.models import ModelRegistry, Named


def rollback(model: str, *, to: int | None = None, uri: str | None = None) -> tuple[int, GateRecord]:
    """Let an alias name an earlier version again, once that one has been checked. Gives the version that it names then,
    and the check, which moves nothing unless it passes.

    model: `NAME@ALIAS`. to: version; None is the newest below the present one that had the alias before. Raises
    UsageError where there is no such version.
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
    before = sorted((n for n, one in known.items() if one.given_at(named.alias) is not None and n < now), reverse=True)
    if to is None and not before:
        allowed = f"version {now} is the first that was promoted as {named.alias}"
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
    return registry.give(known[chosen], named.alias, by=getpass.getuser()).number, check
