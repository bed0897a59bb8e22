"""Checks of a command's data: whether its epochs must be known, and whether it is the same as before."""

from __future__ import annotations

from scaleray.config import RunConfig
from scaleray.errors import DataError


def is_in_steps(config: RunConfig) -> bool:
    """Whether all lengths of a training are in steps rather than epochs."""
    lengths = (
        config.stop.after,
        config.schedule.warmup,
        config.schedule.length,
        config.evaluation.every,
        config.checkpoint.every,
        config.checkpoint.keep_every,
    )
    return all(length is None or length.unit != "epochs" or not length.value for length in lengths)


def check_same_data(was: str | None, now: str | None, *, what: str, advice: str) -> None:
    """Raise DataError if both hashes (SHA-256 of the training data) are known and differ.

    what: the interrupted run, study or sweep that read the other data. advice: the next step."""
    if was and now and was != now:
        raise DataError.problem(
            "the training data",
            f"has changed: its SHA-256 is {now[:16]}..., and the interrupted {what} read {was[:16]}",
            advice,
        )
