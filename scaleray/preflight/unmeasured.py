"""A check of what was not measured: because there is nothing to measure, or because measuring failed."""

from __future__ import annotations

from scaleray.records.preflight import PreflightCheck

FAILED = "it failed: "
"""Beginning of the reason if a measurement was tried."""


def unmeasured(name: str, why: str, *, allowed: str = "") -> PreflightCheck:
    """The check, which is in doubt where measuring was tried and failed: what is very slow may be the cause."""
    if not why.startswith(FAILED):
        return PreflightCheck(name=name, verdict="not applicable", found=why, allowed=allowed)
    remedy = "try again with nothing else running; where it fails again, look at the node that is named, and its link"
    return PreflightCheck(name=name, verdict="yellow", found=why, allowed=allowed, remedy=remedy)
