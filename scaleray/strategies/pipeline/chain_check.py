"""Check that a model is a chain of its blocks, by comparing all its stages on one worker with the whole model."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from scaleray.errors import WorkloadError, first_line
from scaleray.strategies.pipeline.stages import Stage

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative and absolute tolerance between the chain of stages and the whole model, which run the same operations on the
same worker. 1e-2 for other types."""


def check_chain(
    whole: nn.Module, stages: list[Stage], call: Callable[[nn.Module], Any], device: torch.device, *, or_else: str = ""
) -> None:
    """Compare all stages of a model, run one after the other on this worker, with the whole model. Raises WorkloadError
    if they differ. or_else: an option with which they may be equal."""
    views = [whole, *(stage.module for stage in stages)]
    modes = [(part, part.training) for view in views for part in view.modules()]
    try:
        for view in views:
            view.eval()
        with torch.no_grad():
            expected = _alike(lambda: call(whole), device)
            try:
                found = _alike(lambda: _chain(stages, call), device)
            except WorkloadError:
                raise
            except Exception as exc:
                raise _not_a_chain(f"fails with {type(exc).__name__}: {first_line(exc)}", or_else) from exc
    finally:
        for part, was_training in modes:
            part.training = was_training
    for ours, theirs in zip(_tensors(found), _tensors(expected), strict=False):
        tolerance = TOLERANCES.get(theirs.dtype, 1e-2)
        if ours.shape != theirs.shape or not torch.allclose(
            ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True
        ):
            raise _not_a_chain("gives another result than the whole model", or_else)


def _chain(stages: list[Stage], call: Callable[[nn.Module], Any]) -> Any:
    passed: Any = ()
    for stage in stages:
        stage.entry.on_pass = lambda: None
        passed = stage.run(call, passed)
    return passed


def _not_a_chain(what: str, or_else: str) -> WorkloadError:
    return WorkloadError(
        "the model",
        f"not a chain of its blocks, as it {what} when cut into stages",
        "each block must take the activation as its first argument and return the next, "
        "and code between blocks must not change it",
        "return the blocks in the order of use from blocks(), "
        f"and register what comes before and after them in that order{f'; or use {or_else}' if or_else else ''}",
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _alike(call: Callable[[], Any], device: torch.device) -> Any:
    """Result of `call` with a fixed seed; random number generators are restored afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return call()
