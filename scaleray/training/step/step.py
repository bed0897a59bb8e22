"""One optimizer step: micro-batches, accumulation, one synchronisation, clipping, update.

The gradient is the sum over all micro-batches and workers divided by the total count, whatever each worker counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from scaleray.config import RunConfig
from scaleray.data import RankBatch
from scaleray.errors import WorkloadError
from scaleray.records.heartbeat_phases import Phase
from scaleray.scaling.recipe.values import Recipe
from scaleray.strategies.contract.parallel import MicroBatch, Run
from scaleray.training.noise.meter import NoiseMeter
from scaleray.training.observer import StepResult
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.place import Place
from scaleray.training.setup.shards import local
from scaleray.training.step.back_off import BackOff, MemoryRanOut
from scaleray.training.step.micro_batches import as_user_batch, micro_batches, to_device
from scaleray.training.step.sum_and_count import check_sum_and_count


class Probe(Protocol):
    """Looks at every step from inside, for checks; changes nothing.

    All ranks have the same one, so it may communicate.
    """

    def on_setup(self, setup: Setup) -> None:
        """Look at the training when everything is built, and nothing has been trained yet."""

    def on_batch(self, batch: RankBatch) -> None:
        """Look at this rank's rows of the step that begins."""

    def on_gradients(self, correction: float) -> None:
        """Look at gradients that are synchronised and unscaled, and not yet clipped; times `correction` they are what
        is meant."""

    def on_step(self, result: StepResult, learning_rate: float) -> None:
        """Look at the training after the optimizer has taken the step, with this learning rate in its first group."""


class TrainStep:
    """Runs optimizer steps for one worker. `gives_tuples`: the loss receives the columns as a tuple.

    signals: numbers of this rank that are summed over all ranks with each step. before_update: called when the
    optimizer is about to change parameters. on_halved: called with the recipe of smaller micro-batches after memory ran
    out.
    """

    def __init__(
        self,
        workload: Any,
        setup: Setup,
        config: RunConfig,
        recipe: Recipe,
        place: Place,
        *,
        gives_tuples: bool,
        probe: Probe | None = None,
        signals: Callable[[], tuple[float, ...]] = tuple,
        before_update: Callable[[], None] = lambda: None,
        enter: Callable[[Phase], None] = lambda phase: None,
        on_halved: Callable[[Recipe], None] = lambda recipe: None,
    ) -> None:
        self.workload, self.setup, self.config, self.recipe, self.place = workload, setup, config, recipe, place
        self.on_halved = on_halved
        self.back_off = BackOff(config, setup, place)
        self.gives_tuples, self.probe = gives_tuples, probe
        self.signals, self.before_update, self.enter = signals, before_update, enter
        self.num_updates = 0  # steps taken; the loop says how many came before
        self.count_per_row = (
            1.0  # the loop knows better; learned from each step, a guess that saves a pass over the gradients
        )
        self.nonfinite_steps = self.nonfinite_in_a_row = 0  # steps since the last meeting, and the last ones up to now
        self.noise: NoiseMeter | None = None

    def __call__(self, batch: RankBatch, *, num_rows: int, want_norm: bool, meets: bool = True) -> StepResult:
        """Train on one global batch of `num_rows` rows, of which `batch` is this rank's part. Collective.

        meets: whether ranks sum losses and signals; without, loss and count are this rank's and there are no signals.
        """
        setup, parallel = self.setup, self.setup.parallel
        if self.probe is not None:
            self.probe.on_batch(batch)
        number = self.num_updates + 1
        parallel.before_step(number)
        is_local = parallel.is_local(number)
        setup.optimizer.zero_grad(set_to_none=True)
        # Losses are scaled by the expected count before the backward pass, which keeps gradients in range, and
        # corrected by the true count after it. With a constant count per row there is nothing to correct.
        expected = (max(1, batch.num_rows) if is_local else num_rows) * self.count_per_row
        self._scale = (1 if is_local else parallel.gradient_divisor) / expected
        start = [0.0, 0.0, *self.signals()]
        buffers = self.back_off.buffers()
        while True:
            self._totals = torch.tensor(start, dtype=torch.float64, device=self.place.device)
            if self.noise is not None:
                self.noise.begin(number, is_local=is_local)
            try:
                own_sum, own_count = self._run_micro_batches(batch, num_rows=num_rows, meets=meets)
                break
            except MemoryRanOut as exc:
                why = str(exc)
            self.recipe = self.back_off.halved(self.recipe, why, buffers)
            self.on_halved(self.recipe)
        loss_sum, count, *signals = self._totals.tolist()
        if meets and not 0 < count < math.inf:
            raise WorkloadError(
                "loss()", f"a total count of {count:g}", "at least one sample or token must count in every global batch"
            )
        if meets:  # in a local step too: all ranks then have the value, and a checkpoint holds it
            self.count_per_row = count / num_rows
        update = partial(self._update, want_norm=want_norm, own_count=own_count)
        if is_local:
            # a rank of which no row counts has no gradient
            correction = expected / own_count if own_count else 0.0
            result = update(own_sum, own_count or 1.0, correction=correction, num_rows=batch.num_rows)
            own = dataclasses.replace(result, count=own_count, is_own=True)
            result = self._met(result, loss_sum, count) if meets else own
        else:
            result = update(loss_sum, count, correction=expected / count, num_rows=num_rows)
            bad, self.nonfinite_steps = self.nonfinite_steps, 0
            result = dataclasses.replace(result, nonfinite_steps=bad, nonfinite_in_a_row=self.nonfinite_in_a_row)
        result = dataclasses.replace(result, signals=tuple(signals) if meets else ())
        if self.noise is not None:
            self.noise.settle()
        if self.probe is not None:
            self.probe.on_step(result, float(setup.schedule.get_last_lr()[0]))
        return result

    def _met(self, result: StepResult, loss_sum: float, count: float) -> StepResult:
        """The result of a local step in which the ranks met: loss and count of all, and what happened since.

        Collective.
        """
        worst = self.place.all_reduce_max([self.nonfinite_steps, self.nonfinite_in_a_row])
        self.nonfinite_steps, self.nonfinite_in_a_row = 0, int(worst[1])
        loss = loss_sum / count
        return dataclasses.replace(
            result,
            loss=loss,
            count=count,
            is_finite=result.is_finite and math.isfinite(loss),
            nonfinite_steps=int(worst[0]),
            nonfinite_in_a_row=int(worst[1]),
        )

    def _run_micro_batches(self, batch: RankBatch, *, num_rows: int, meets: bool) -> tuple[float, float]:
        """Forward and backward of every micro-batch; leaves the totals of all ranks, where they meet, and returns this
        rank's sum of losses and count."""
        setup, parallel = self.setup, self.setup.parallel
        # where passes communicate, a rank with a row less may need a placeholder more
        least = math.ceil(math.ceil(num_rows / self.place.data_parallel_size) / self.recipe.micro_batch_size)
        at_least = least if parallel.forward_is_collective else 1
        pieces = list(micro_batches(batch, self.recipe.micro_batch_size, at_least=at_least))
        pending: Any = None
        own = self._totals

        def sum_up() -> None:
            nonlocal pending, own
            own = self._totals.clone()
            if not parallel.counts_loss:
                self._totals[:2] = 0.0
            if meets and self.place.world_size > 1:
                pending = dist.all_reduce(self._totals, async_op=True)

        if parallel.run_micro_batches is not None:
            self.enter(Phase.LOSS)
            parallel.run_micro_batches([self._on_device(*p) for p in pieces], self._objective, setup.precision.autocast)
            sum_up()
        else:
            with self.back_off.caught() as shortage:
                for piece in pieces[:-1]:
                    with parallel.no_sync():
                        self.enter(Phase.LOSS)
                        scaled = self._objective(parallel.run, self._on_device(*piece))
                        self.enter(Phase.SYNCHRONISE)
                        scaled.backward()
                self.enter(Phase.LOSS)
                scaled = self._objective(parallel.run, self._on_device(*pieces[-1]))
            self.enter(Phase.SYNCHRONISE)
            self.back_off.agree_on(shortage)
            with self.back_off.caught(here=self.place.world_size == 1) as shortage:
                sum_up()  # beside the backward pass, so that it costs no time of its own
                if self.noise is not None:
                    self.noise.before_last_backward()
                scaled.backward()
            if shortage:
                raise MemoryRanOut(shortage[0])
        if pending is not None:
            self.enter(Phase.SYNCHRONISE)
            pending.wait()
        return float(own[0]), float(own[1])

    def _on_device(self, arrays: dict[str, np.ndarray], weight: int) -> MicroBatch:
        """Move a micro-batch to the device, only when its turn comes, so that one micro-batch's rows are there at a
        time."""
        columns = to_device(arrays, self.place.device, self.setup.precision.input_dtype)
        return MicroBatch(as_user_batch(columns, self.gives_tuples), weight)

    def _objective(self, run: Run, piece: MicroBatch) -> torch.Tensor:
        """The scaled loss of a micro-batch; its sum and count are added to the totals."""
        if self.noise is not None:
            self.noise.before_pass(piece.weight, self._totals[1])
        with self.setup.precision.autocast():
            result = run(lambda module: self.workload.loss(module, piece.batch))
        loss, count = check_sum_and_count(result, what="loss()")
        if piece.weight == 0:  # a placeholder: it must run, as the collectives need every rank, and count nothing
            loss, count = loss * 0.0, count * 0
        self._totals[0] += loss.detach()
        self._totals[1] += count
        return self.setup.precision.scaler.scale(loss * self._scale)

    def _update(
        self, loss_sum: float, count: float, *, correction: float, want_norm: bool, own_count: float, num_rows: int
    ) -> StepResult:
        setup, clip_norm = self.setup, self.config.optimizer.clip_norm
        self.enter(Phase.UPDATE)
        scaler = setup.precision.scaler
        scaler.unscale_(setup.optimizer)
        if setup.pruning is not None:
            setup.pruning.mask_gradients()  # before anybody looks at them
        if self.probe is not None:
            self.probe.on_gradients(correction)
        gradients = [p.grad for p in setup.parameters if p.grad is not None]
        grad_norm = norm = None
        factor = correction
        loss_scale = scaler.get_scale()
        is_finite = math.isfinite(loss_sum)
        # what clips or skips keeps the weights, so look first
        want_norm = want_norm or clip_norm is not None or self.config.on_nonfinite != "raise"
        if want_norm or (self.noise is not None and self.noise.wants_norm):
            norm = (setup.parallel.total_norm(gradients) * correction).item()
        if self.noise is not None:
            self.noise.after_backward(
                norm, correction=correction, loss_scale=loss_scale, count=count, own_count=own_count, num_rows=num_rows
            )
        if want_norm and norm is not None:
            grad_norm = norm
            # with loss scaling an infinite gradient is the scaler's business: it skips the step and lowers the scale
            is_finite = is_finite and (math.isfinite(grad_norm) or scaler.is_enabled())
            if clip_norm is not None and grad_norm > clip_norm:
                factor *= clip_norm / (grad_norm + 1e-6)
        if is_finite or setup.parallel.replicas_differ:  # these take part in an averaging all the same
            self.before_update()
        if is_finite:
            if factor != 1.0:
                # their own parts: one call takes neither DTensors beside plain tensors nor those of several meshes
                torch._foreach_mul_([local(gradient) for gradient in gradients], factor)
            scaler.step(setup.optimizer)
        scaler.update()
        self.num_updates += 1
        # a scaler lowers its scale after, and only after, a step that it skipped
        change = scaler.get_scale() / loss_scale
        setup.parallel.carry_over(correction * change, is_finite and change >= 1.0)
        if not is_finite:
            self.nonfinite_steps += 1
        self.nonfinite_in_a_row = 0 if is_finite else self.nonfinite_in_a_row + 1
        self.enter(Phase.SYNCHRONISE)
        setup.parallel.after_update(self.num_updates)
        self._prune(is_finite)
        return StepResult(loss=loss_sum / count, count=count, grad_norm=grad_norm, is_finite=is_finite)

    def _prune(self, has_updated: bool) -> None:
        """Prune if it is due, after the strategy, which may have fetched parameters from other ranks."""
        pruning = self.setup.pruning
        if pruning is None:
            return
        if pruning.is_due(self.num_updates):
            self.before_update()
            pruning.prune(self.num_updates)
        elif has_updated:
            pruning.apply()
