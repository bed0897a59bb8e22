"""Every error that scaleray raises on purpose.

    ScaleRayError                  exit code 1 unless a subclass sets another
    |-- UsageError                 exit code 2: the user can fix it without changing scaleray
    |   |-- ConfigError            a key of the config, its value, what is allowed
    |   |-- WorkloadError          the user's workload does not import or breaks its contract
    |   |-- DataError              a source is empty, unreadable, too small or holds bad values
    |   |-- ClusterError           the cluster can never hold the run, or cannot be reached
    |   |-- StorageError           the storage path cannot be written
    |   |-- CheckpointError        a checkpoint is damaged, of another model or config, or of a newer format
    |   |-- TrackingError          the MLflow server cannot be reached or written
    |   `-- TraceError             a trace or memory snapshot is cut off, or not of this run's kind
    `-- RunFailedError             the run started and did not finish
        |-- NonFiniteLossError     a loss or gradient became NaN or infinite
        |-- InputStarvedError      the input pipeline delivered nothing for too long
        |-- InitialisationError    ranks disagree on the initial parameters
        |-- StepFailedError        the workload's code raised an error in a step
        |-- PeerLostError          a collective failed because another worker is gone or hangs
        `-- LeftEarly              the run was asked to stop, saved its state and can be resumed

A message has four parts: what, the value found if there is one, the reason or what is allowed, and what to do next.
Arguments are the positional `args` of the exception, so that each one survives the pickling that carries it from a
worker."""

from __future__ import annotations

import re
from typing import Self

MARKED_KILLED = "the MLflow run is marked KILLED"
"""Argument of a KeyboardInterrupt that ended a run already created in MLflow."""
NO_VALUE = ...
"""Stands for the value found in errors that have none; stays the same object when pickled."""
_CALL = re.compile(r"\w+\(\)")
"""Subject of an error about the result of one of the user's methods, such as `loss()`."""
_ABOUT_THE_VALUE = re.compile("it (?!may |must )")
"""Beginning of a reason that continues the sentence. A rule, such as `it must be positive`, is a separate clause."""


class ScaleRayError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(ScaleRayError):
    """An input cannot be used. The text is `WHAT is FOUND: ALLOWED.`, with the hint on the next line.

    A quoted value with `it does not exist` as `allowed` gives `WHAT FOUND does not exist.` `loss()` as `what` gives
    `loss() returned FOUND: ALLOWED.` None stands for a value that was not given, which the text calls required or
    missing. `problem` makes a text without a value."""

    exit_code = 2

    def __init__(self, what: str, found: object, allowed: str, hint: str = "") -> None:
        super().__init__(what, found, allowed, hint)
        self.what, self.found, self.allowed, self.hint = what, found, allowed, hint

    @classmethod
    def problem(cls, what: str, text: str, hint: str = "") -> Self:
        """Error with the text `WHAT TEXT.`, for cases in which `WHAT is VALUE` would not be a sentence. text: a
        predicate such as `lacks a line`, or a sentence after a colon."""
        return cls(what, NO_VALUE, text, hint)

    def __str__(self) -> str:
        found = _shown(self.found)
        if self.found is None:
            found = "required" if isinstance(self, ConfigError) or self.what.startswith("--") else "missing"
        reason = f": {self.allowed}" if self.allowed else ""
        if self.found is NO_VALUE:
            sentence = f"{self.what}{'' if self.allowed.startswith(':') else ' '}{self.allowed}"
        elif self.found is not None and _CALL.fullmatch(self.what):
            sentence = f"{self.what} returned {found}{reason}"
        elif found.startswith(("'", '"')) and _ABOUT_THE_VALUE.match(self.allowed):
            sentence = f"{self.what} {found} {self.allowed.removeprefix('it ')}"
        else:
            sentence = f"{self.what} is {found}{reason}"
        return f"{sentence}.\n  {self.hint}" if self.hint else f"{sentence}."


class ConfigError(UsageError):
    """A config value is missing, unknown or impossible.

    `what` is the dotted key, with the file and line where known."""

    @property
    def key(self) -> str:
        """The dotted key alone, for programs that want to act on it."""
        return self.what.rsplit(" ", 1)[-1]


class WorkloadError(UsageError):
    """The workload cannot be imported or breaks its contract."""


class DataError(UsageError):
    """A data source cannot be read or does not hold what training needs."""


class ClusterError(UsageError):
    """The Ray cluster cannot be reached or can never hold the run."""


class StorageError(UsageError):
    """The storage path cannot be written."""


class CheckpointError(UsageError):
    """A checkpoint cannot be used: damaged, incomplete, of another model or config, or of a newer format."""


class TrackingError(UsageError):
    """The MLflow tracking server or database cannot be used."""


class TraceError(UsageError):
    """A trace or a memory snapshot cannot be read: cut off, in another format, or without the requested data."""


class RunFailedError(ScaleRayError):
    """The run started and failed. The text names rank, node and step if they are known."""


class NonFiniteLossError(RunFailedError):
    """A loss or gradient norm is NaN or infinite, and `on_nonfinite` is `raise`."""


class InputStarvedError(RunFailedError):
    """No batch arrived within the input timeout."""


class InitialisationError(RunFailedError):
    """Ranks have different parameters before the first step."""


class StepFailedError(RunFailedError):
    """The workload's code raised an error in a step.

    step: number of complete steps. steps_done: number of steps that this worker has taken since its start."""

    def __init__(self, text: str, steps_done: int = 0, step: int = -1) -> None:
        super().__init__(text, steps_done, step)
        self.text, self.steps_done, self.step = text, steps_done, step

    def __str__(self) -> str:
        return self.text


class PeerLostError(RunFailedError):
    """A collective failed because another worker is gone or hangs. Always a consequence, never the cause."""


class LeftEarly(RunFailedError):
    """The run stopped on request: its last step is saved, and it can be resumed."""


def text_of(error: BaseException) -> str:
    """Message of an error, or a note if making the text of a user's error fails."""
    try:
        return str(error)
    except Exception as failed:
        return f"its text cannot be made: {type(failed).__name__}"


def first_line(error: BaseException) -> str:
    """First line of an error's message, or the name of its type if it has none, as with a bare `assert`."""
    return next(iter(text_of(error).strip().splitlines()), type(error).__name__)


def _shown(found: object) -> str:
    try:
        is_phrase = (
            isinstance(found, str) and found.isprintable() and (" " in found or (found.isalpha() and found.islower()))
        )
        text = str(found) if is_phrase else repr(found)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in a list in a list ...
        text = f"a value of type {type(found).__name__} that is too large to print"
    return text if len(text) <= 200 else text[:197] + "..."
