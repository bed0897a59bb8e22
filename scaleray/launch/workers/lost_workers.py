"""Explain failures of workers: describe the one that caused the others, and decide whether a restart could help."""

import re
from collections.abc import Mapping, Sequence

from scaleray.errors import (
    InitialisationError,
    InputStarvedError,
    LeftEarly,
    NonFiniteLossError,
    PeerLostError,
    RunFailedError,
    ScaleRayError,
    StepFailedError,
    UsageError,
    text_of,
)
from scaleray.records.phases import MAY_WAIT, OWN_BUSINESS, Phase
from scaleray.records.run_record import Heartbeat
from scaleray.training.health.worker_progress import BEAT_S, HANG

SILENT_S = 4 * BEAT_S
"""Seconds without a heartbeat after which a worker counts as silent."""


def fatal_error(
    failures: Mapping[int, BaseException], failed_before: int = -1, *, is_restart: bool = False
) -> ScaleRayError | None:
    """The error that a restart would repeat: a user's mistake, a non-finite loss, or an error of the workload that
    recurred at the same step or precedes the first. failed_before: the furthest step at which it occurred; -1: none."""
    for _, failure in sorted(failures.items()):
        error = cause_of(failure)
        if isinstance(error, (UsageError, NonFiniteLossError, InitialisationError, InputStarvedError, LeftEarly)):
            return error
        if isinstance(error, StepFailedError) and (
            (error.steps_done == 0 and not is_restart) or 0 <= error.step <= failed_before
        ):
            return error
    return None


def failed_step(failure: BaseException) -> int:
    """Number of complete steps when the workload's own code failed; -1 for any other failure."""
    error = cause_of(failure)
    return error.step if isinstance(error, StepFailedError) else -1


def explain(exc: BaseException, heartbeats: Sequence[Heartbeat] = ()) -> ScaleRayError:
    """The single error to show to the user, out of the errors of several workers and of Ray."""
    failures: dict[int, BaseException] = dict(getattr(exc, "worker_failures", {}) or {})
    failure = getattr(exc, "controller_failure", None)
    known = [cause_of(error) for _, error in sorted(failures.items())] + ([cause_of(failure)] if failure else [])
    own = [error for error in known if isinstance(error, ScaleRayError) and not isinstance(error, PeerLostError)]
    for kind in (UsageError, RunFailedError):
        for error in own:
            if isinstance(error, kind):
                return error
    if failures:
        return RunFailedError(what_failed(failures, heartbeats))
    return RunFailedError(f"Ray could not run the training: {last_line(failure or exc)}")


def what_failed(failures: Mapping[int, BaseException], heartbeats: Sequence[Heartbeat], explanation: str = "") -> str:
    """The failure that explains the others, with rank, node, step, cause and the worker's own last lines.

    explanation: what the ranks' dumps show about their collectives."""
    sentence, beat = _who_failed(failures, heartbeats)
    return "\n  ".join(filter(None, [sentence, explanation])) + tail(beat)


def _who_failed(failures: Mapping[int, BaseException], heartbeats: Sequence[Heartbeat]) -> tuple[str, Heartbeat | None]:
    """Sentence about the failed worker, and its last heartbeat."""
    # workers that lost their peer only echo that it is gone
    rank = min(failures, key=lambda r: (is_echo(failures[r]), r))
    error = cause_of(failures[rank])
    if is_echo(error) and (missed := silent_worker(failures, heartbeats)) is not None:
        step = max(b.step for b in heartbeats) + 1  # the others wait for it there
        state = f"hangs or was lost in step {step}: no sign of life for {missed.silent_s:.0f} s"
        if missed.silent_s < SILENT_S:
            state = _held_up(missed)
        return f"rank {missed.rank} on {missed.node} (process {missed.process}) {state}", missed
    beat = next((b for b in heartbeats if b.rank == rank), None)
    if isinstance(error, ScaleRayError):
        return str(error), beat
    if beat is None:
        return f"rank {rank} was lost: {death(error)}", None
    who = f"rank {rank} on {beat.node} (process {beat.process})"
    if beat.phase.startswith(HANG):
        return f"{who} hangs: {beat.phase.removeprefix(HANG)}", beat
    return f"{who} was lost in step {beat.step + 1}, in `{beat.phase}`: {death(error)}", beat


def _held_up(beat: Heartbeat) -> str:
    """Description of what a worker was doing when the others stopped waiting for it."""
    took = f"for {beat.since_s:.0f} s in step {beat.step + 1}, longer than the others waited for it"
    if beat.phase == Phase.INPUT:
        return f"has been waiting for its input {took}: make reading rows faster, or raise scale.collective_timeout_s"
    if beat.phase == Phase.COMPILING:
        return f"has been compiling {took}: raise scale.collective_timeout_s"
    return f"hangs: it has been in `{beat.phase}` of step {beat.step + 1} for {beat.since_s:.0f} s"


def death(error: BaseException) -> str:
    """Ray's message on a worker's death, without its guesses."""
    found = re.search(
        r"Worker exit type: (\w+) Worker exit detail: (.*?)\.?( Some common causes|$)", text_of(error), re.DOTALL
    )
    return f"its process ended ({found[1]}: {found[2]})" if found else last_line(error)


def silent_worker(failures: Mapping[int, BaseException], heartbeats: Sequence[Heartbeat]) -> Heartbeat | None:
    """The worker for which the failed ones waited: it is silent, or has long been in a phase without waiting."""
    others = [beat for beat in heartbeats if beat.rank not in failures]
    silent = [beat for beat in others if beat.silent_s >= SILENT_S]
    if silent:
        return max(silent, key=lambda beat: beat.silent_s)
    stuck = [beat for beat in others if beat.phase not in MAY_WAIT and beat.since_s >= 2 * SILENT_S]
    # whoever waits for input or compiles waits for no worker, and in any other phase one may be inside a collective
    return max(stuck, key=lambda beat: (beat.phase in OWN_BUSINESS, beat.since_s), default=None)


def tail(beat: Heartbeat | None) -> str:
    """A worker's own last lines, for the end of its error."""
    return "".join(f"\n  | {line}" for line in (beat.tail[-5:] if beat else ()))


def is_echo(error: BaseException) -> bool:
    """Whether a worker's error only reports that another one is gone."""
    text = text_of(error)
    return isinstance(cause_of(error), PeerLostError) or "onnection closed" in text or "Gloo" in text


def was_preempted(failure: BaseException) -> bool:
    """Whether a worker died with a node whose removal had been announced."""
    return bool(getattr(getattr(failure, "health_check_failure", failure), "preempted", False))


def cause_of(exc: BaseException) -> BaseException:
    """The scaleray error inside Ray's wrappers, or the exception itself."""
    current: BaseException | None = exc
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        inner = getattr(current, "cause", None)
        if isinstance(current, ScaleRayError):
            # Ray makes errors that are both its own and the cause's class: take the plain one
            return inner if isinstance(inner, ScaleRayError) else current
        current = inner if isinstance(inner, BaseException) else current.__cause__
    return exc


def last_line(exc: BaseException) -> str:
    """Last line of Ray's error, which begins with a traceback."""
    lines = [line for line in text_of(exc).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(exc).__name__
