"""Check, before workers start, that a model and its sequences fit a layout, using the workers' own checks.

The model is built and its loss computed with tensors that have shapes but no values, without memory or communication.
Code that needs values is left to the workers."""

import contextlib
import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from scaleray.common.seeding import same_random_numbers
from scaleray.config import RunConfig
from scaleray.config.parallel import Degrees
from scaleray.errors import UsageError
from scaleray.parallel.context import Context, sequences_shared
from scaleray.strategies.fsdp import experts_of
from scaleray.strategies.pipeline.parts import cut
from scaleray.strategies.tensor import plan_of, refuse_uneven_cuts
from scaleray.training.flop_counter import CPU, without_values
from scaleray.training.setup import fine_tuning
from scaleray.training.setup.weighted_losses import summed_loss
from scaleray.training.step.micro_batches import user_batch
from scaleray.workload import built_model


def check_layout(
    workload: Any, config: RunConfig, degrees: Degrees, rows: Mapping[str, Any], *, gives_tuples: bool = False
) -> None:
    """Raise UsageError if a model lacks blocks, a plan or experts that the layout needs, or if a degree does not divide
    the number of its blocks, experts, heads or tokens. rows: a few rows of the training data; without any the loss is
    not computed. Changes neither random numbers nor anything that the workload holds."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # has a stack of each operation that needs values
    was_disabled, log.disabled = log.disabled, True
    with same_random_numbers(CPU):
        try:
            _check(copy.deepcopy(workload), config, degrees, rows, gives_tuples=gives_tuples)
        except UsageError as exc:
            if exc.__cause__ is None:  # else of the user's code, which may need values
                raise
        except (Exception, SystemExit):
            return
        finally:
            log.disabled = was_disabled


def _check(workload: Any, config: RunConfig, degrees: Degrees, rows: Mapping[str, Any], *, gives_tuples: bool) -> None:
    with torch.device("meta"):
        model = built_model(workload)
        fine_tuning.adapt(model, config.fine_tuning)
    if degrees.pipeline > 1:
        cut(model, config, workload, degrees.pipeline)
    if degrees.expert > 1:
        experts_of(model, degrees.expert)
    if degrees.tensor > 1:
        plan = plan_of(model, config, workload, size=degrees.tensor)
        refuse_uneven_cuts(model, plan, size=degrees.tensor)
    if not rows or degrees.context == degrees.tensor == 1:
        return
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as stack:
        without_values(model)
        if degrees.context > 1:
            shared = Context(config.context.exchange, degrees.context, heads_on=degrees.tensor, has_values=False)
            stack.enter_context(sequences_shared(model, shared))
        summed_loss(workload, model, user_batch(workload, dict(rows), CPU, None, gives_tuples=gives_tuples))
