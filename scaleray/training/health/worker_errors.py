"""Explain an error in a worker: where it comes from, where it occurred, and how the user can fix it."""

import contextlib
import traceback
from collections.abc import Callable, Iterator

import torch

from scaleray.config import RunConfig
from scaleray.config.recipe.values import Recipe
from scaleray.errors import (
    DataError,
    LeftEarly,
    PeerLostError,
    RunFailedError,
    ScaleRayError,
    StepFailedError,
    WorkloadError,
    first_line,
    text_of,
)
from scaleray.training.health.live_memory import is_out_of_memory
from scaleray.training.health.worker_progress import COLLECTIVES, Progress
from scaleray.training.setup.compilation import compile_error
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.workload import no_exit, user_traceback


@contextlib.contextmanager
def locating(now: Callable[[], tuple[TrainJob, int]], place: RankContext, progress: Progress) -> Iterator[None]:
    """Context whose errors are raised as `located` returns them. now: returns the job and the number of its last
    step."""
    try:
        with no_exit("the workload's code"):
            yield
    except Exception as exc:
        job, step = now()
        error = located(exc, place, job.config, job.recipe, step=step, steps_done=progress.steps_done)
        if error is exc:
            raise
        raise error from exc


def located(
    exc: Exception, place: RankContext, config: RunConfig, recipe: Recipe, *, step: int, steps_done: int
) -> Exception:
    """The error as the run should raise it: with rank, node and step, unless its text alone suffices for the user.

    step: number of complete steps. steps_done: number of steps that this process took."""
    where = f"rank {place.rank} on {place.node}"
    if isinstance(exc, (LeftEarly, PeerLostError)):
        return exc
    if isinstance(exc, RunFailedError):
        return type(exc)(f"{where}: {exc}")
    if isinstance(exc, ScaleRayError):
        return exc
    if place.world_size > 1 and is_lost_peer(exc):
        first = first_line(exc)
        return PeerLostError(f"{where}, step {step + 1}: another worker is gone or did not answer: {first}")
    text = f"{where}, step {step + 1}:\n  {user_traceback(exc)}"
    if is_out_of_memory(exc):
        text += f"\n  {_memory_advice(config, recipe)}"
    return explained(exc) or compile_error(exc) or StepFailedError(text, steps_done, step)


def is_lost_peer(exc: BaseException) -> bool:
    """Whether torch reports that a collective could not be completed."""
    if isinstance(exc, (torch.distributed.DistBackendError, torch.distributed.DistNetworkError)):
        return True
    words = (
        "gloo/transport",
        "onnection closed",
        "onnection reset",
        "Timed out waiting",
        "NCCL",
        "Socket closed",
        "caused pair closure",
    )
    if not isinstance(exc, RuntimeError) or not any(word in text_of(exc) for word in words):
        return False
    # the same words may come from the user's own network: what torch says of collectives names its sources, or comes
    # out of a collective (DDP's own in a forward pass included) or a backward pass
    files = [frame.filename for frame in traceback.extract_tb(exc.__traceback__)][-3:]
    return "gloo/transport" in text_of(exc) or any(
        part in file for part in (*COLLECTIVES, "torch/autograd/") for file in files
    )


def explained(exc: Exception) -> DataError | WorkloadError | None:
    """Explanation of a torch error, if its text suffices for the user; None for any other error."""
    text = text_of(exc)
    if isinstance(exc, IndexError) and any(words in text for words in ("out of bounds", "index out of range in self")):
        return DataError.problem(
            "a label or token",
            f"is out of range: {text.rstrip('.')}. It must be below the number of classes or tokens of the model",
            "check the labels of the data, and the size of the model's last layer or embedding",
        )
    if isinstance(exc, RuntimeError) and "device-side assert" in text:
        # told after the kernel that met it, so that the line of Python says little
        return DataError.problem(
            "a label, token or other index",
            f"is out of range in a kernel on the GPU: {first_line(exc).rstrip('.')}",
            "check the labels of the data, and the size of the model's last layer or embedding; "
            "with --local on a CPU the error names the line",
        )
    if isinstance(exc, RuntimeError) and "mixed torch.Tensor and DTensor" in text:
        return WorkloadError.problem(
            "loss()",
            "computes with a weight that is sharded over the workers: such weights can be used only within "
            "the forward() of their own layers",
            "call their layers from the model's own code, or use --strategy.name ddp or zero1",
        )
    if isinstance(exc, RuntimeError) and "Expected to have finished reduction in the prior iteration" in text:
        return WorkloadError.problem(
            "a trained parameter",
            "has no gradient, because the loss of a step does not depend on it: ddp waits for the gradient of every "
            "trained parameter in every step",
            "freeze such parameters (requires_grad_(False) in build_model()), or use --strategy.find-unused-parameters",
        )
    if isinstance(exc, ValueError) and "more than 1 value per channel" in text:
        return DataError(
            "a micro-batch of one worker",
            "a single row",
            "batch normalisation needs at least two for training",
            "leave out the partial batch at the end of an epoch with --batch.drop-last, or enlarge batch.micro_size",
        )
    return None


def _memory_advice(config: RunConfig, recipe: Recipe) -> str:
    size = recipe.micro_batch_size
    if size == 1:
        return "Out of memory with single rows. Use activations.checkpointing full or a strategy that shards the model."
    backs_off = config.memory.on_out_of_memory == "halve"
    why = "Ranks cannot give up a pass in which they communicate. " if backs_off else ""
    more = "" if backs_off else ", --memory.on-out-of-memory halve"
    return (
        f"Out of memory with micro-batches of {size} rows. {why}Use --batch.micro-size {size // 2}, "
        f"--memory.find-micro-size{more}, or activations.checkpointing."
    )


def without_frames(exc: BaseException) -> None:
    """Release the objects held by the frames of an error's traceback: trainings, their groups and connections."""
    current: BaseException | None = exc
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = None
        current = current.__cause__ or current.__context__
