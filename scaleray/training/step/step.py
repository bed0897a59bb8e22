"""One optimizer step: micro-batches, accumulation, one synchronisation, clipping, update.

The gradient is the sum over all micro-batches and workers divided by the total count, so workers may have different
counts."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from scaleray.common.equal_models import dense_buffers
from scaleray.config import RunConfig
from scaleray.config.recipe.values import Recipe
from scaleray.data import RankBatch
from scaleray.records.phases import Phase
from scaleray.records.run_record import StepRecord
from scaleray.strategies.contract.later import on_device
from scaleray.strategies.contract.numbers import Number, Truth, Unread, as_factor, choose, is_finite, ratio, together
from scaleray.strategies.contract.parallel import MicroBatch, Run
from scaleray.strategies.sharding.shards import local
from scaleray.training.noise.meter import NoiseMeter
from scaleray.training.setup.model_setup import Setup
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.setup.weighted_losses import has_batch_loss
from scaleray.training.step.back_off import BackOff, MemoryRanOut
from scaleray.training.step.launched import LaunchedStep
from scaleray.training.step.micro_batches import micro_batches, most_micro_batches, user_batch
from scaleray.training.step.sum_and_count import check_sum_and_count
from scaleray.training.step.whole_batch import WholeBatchLoss


class GuardedUpdate:
    """Updates the weights if the step is finite, and otherwise changes nothing.

    If possible, the optimizer's own kernel decides on the device: torch's fused optimizers take a factor and a verdict,
    as mixed precision needs them. For any other optimizer the host first reads the verdict, which waits for the device.
    waits: whether it may always do so, as on the CPU, where this costs nothing and a factor of 1 saves a pass over the
    gradients."""

    def __init__(self, setup: Setup, device: torch.device, *, waits: bool) -> None:
        self.optimizer, self.scaler = setup.optimizer, setup.precision.scaler
        self._device, self._waits = device, waits

    def __call__(self, gradients: Sequence[torch.Tensor], factor: Number, is_sound: Truth) -> None:
        """Update with `factor` times the unscaled gradients."""
        if self.scaler.is_enabled():
            found = self.scaler._found_inf_per_device(self.optimizer)
            is_sound = is_sound & (sum(there.to(self._device) for there in found.values()) == 0)
        if isinstance(is_sound, torch.Tensor) and not self._waits and self._decides_itself():
            self._update_on_device(factor, ~is_sound)
            return
        sound, number = Unread([is_sound, factor]).read()
        if not sound:
            return
        if number != 1.0:
            # their own parts: one call takes neither DTensors beside plain tensors nor those of several meshes
            torch._foreach_mul_([local(gradient) for gradient in gradients], number)
        self.optimizer.step()

    def _decides_itself(self) -> bool:
        groups = self.optimizer.param_groups
        if not getattr(self.optimizer, "_step_supports_amp_scaling", False) or not all(g.get("fused") for g in groups):
            return False
        # torch 2.13: fused SGD takes a momentum for initialised whose first step was left out
        has_momentum = any(group.get("momentum") for group in groups)
        return not has_momentum or all(
            p in self.optimizer.state for g in groups for p in g["params"] if p.grad is not None
        )

    def _update_on_device(self, factor: Number, is_left_out: torch.Tensor) -> None:
        """Pass factor and verdict to the optimizer as torch's GradScaler does, which has already divided the
        gradients."""
        optimizer: Any = self.optimizer
        optimizer.found_inf = is_left_out.float()
        if isinstance(factor, torch.Tensor):
            optimizer.grad_scale = factor.reciprocal().float()
        else:
            optimizer.grad_scale = None if factor == 1.0 else on_device([1.0 / factor], self._device, torch.float32)[0]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf


class Probe(Protocol):
    """Observer of the inside of every step, for checks; it changes nothing.

    All ranks have the same probe, so it may communicate."""

    def on_setup(self, setup: Setup) -> None:
        """Called once everything is built and before any training."""

    def on_batch(self, batch: RankBatch) -> None:
        """Called with this rank's rows at the beginning of a step."""

    def on_gradients(self, correction: float) -> None:
        """Called with synchronised, unscaled gradients before clipping. Multiplied by `correction`, they are the mean
        gradients."""

    def on_step(self, result: StepRecord, learning_rate: float) -> None:
        """Called after the optimizer's step, with the learning rate of its first group."""


class TrainStep:
    """Runs optimizer steps for one worker. `gives_tuples`: the loss receives the columns as a tuple.

    signals: numbers of this rank, read after the forward passes, that are summed over all ranks in each step.
    before_update: called when the optimizer is about to change parameters. on_halved: called with the recipe for
    smaller micro-batches after memory ran out. ahead: number of steps that may be launched before the result of the
    first one is read; with 0, the host may read numbers from the device in between."""

    def __init__(
        self,
        workload: Any,
        setup: Setup,
        config: RunConfig,
        recipe: Recipe,
        place: RankContext,
        *,
        gives_tuples: bool,
        probe: Probe | None = None,
        signals: Callable[[], tuple[float, ...]] = tuple,
        before_update: Callable[[], None] = lambda: None,
        enter: Callable[[Phase], object] = lambda phase: None,
        on_halved: Callable[[Recipe], None] = lambda recipe: None,
        ahead: int = 0,
    ) -> None:
        self.workload, self.setup, self.config, self.recipe, self.place = workload, setup, config, recipe, place
        self.on_halved = on_halved
        self.back_off = BackOff(config, setup, place)
        self.gives_tuples, self.probe = gives_tuples, probe
        self.signals, self.before_update, self.enter = signals, before_update, enter
        self.num_updates = 0  # steps taken; the loop says how many came before
        # learned from each step, a guess that saves a pass over the gradients
        self._count_per_row: Number = 1.0
        # steps since the last meeting that were not finite, and how many of the last ones
        self._nonfinite: tuple[Number, Number] = (0.0, 0.0)
        # what is launched after a step that ends the training changes nothing, whether or not the host knows of it
        self._has_ended: Truth = False
        self._ends = ahead > 0 and config.on_nonfinite != "skip"
        self._reads = ahead == 0 and place.device.type == "cpu"
        self._apply = GuardedUpdate(setup, place.device, waits=ahead == 0)
        self.noise: NoiseMeter | None = None
        self._whole = WholeBatchLoss(workload, place, config.seed) if has_batch_loss(workload) else None

    @property
    def count_per_row(self) -> float:
        """Counted samples or tokens per row of the last step; the loop sets the initial value. Waits for the device."""
        return float(self._count_per_row)

    @count_per_row.setter
    def count_per_row(self, value: float) -> None:
        self._count_per_row = value

    @property
    def nonfinite_in_a_row(self) -> int:
        """Number of successive non-finite steps on this rank, up to the last one. Waits for the device."""
        return int(self._nonfinite[1])

    @nonfinite_in_a_row.setter
    def nonfinite_in_a_row(self, value: int) -> None:
        self._nonfinite = (0.0, value)

    def ends_like(self, other: TrainStep) -> None:
        """Make no further changes if an earlier loss of the same step has ended the training."""
        self._has_ended = other._has_ended

    def __call__(self, batch: RankBatch, *, num_rows: int, want_norm: bool, synchronises: bool = True) -> StepRecord:
        """Train on one global batch, and wait for the result. See `launch`."""
        return self.launch(batch, num_rows=num_rows, want_norm=want_norm, synchronises=synchronises).result()

    def launch(self, batch: RankBatch, *, num_rows: int, want_norm: bool, synchronises: bool = True) -> LaunchedStep:
        """Train on one global batch of `num_rows` rows, of which `batch` is this rank's part. Collective.

        synchronises: whether ranks sum losses and signals; if not, loss and count are this rank's, without signals."""
        setup, parallel = self.setup, self.setup.parallel
        self.enter(Phase.HOST)
        if self.probe is not None:
            self.probe.on_batch(batch)
        number = self.num_updates + 1
        parallel.before_step(number)
        is_local = parallel.is_local(number)
        # as zero_grad() does, which tells a profiler of it beside; a workload may add groups while it trains
        in_groups = (group["params"] for group in setup.optimizer.param_groups)
        for parameter in itertools.chain(setup.parameters, *in_groups):
            parameter.grad = None
        # Losses are scaled by the expected count before the backward pass, which keeps gradients in range, and
        # corrected by the true count after it. With a constant count per row there is nothing to correct.
        own_rows = max(1, batch.num_rows) if parallel.local_group is None else num_rows / self.place.mesh.replicate
        expected = self._count_per_row * (own_rows if is_local else num_rows)
        self._scale = ratio(parallel.local_divisor if is_local else parallel.gradient_divisor, expected)
        buffers = self.back_off.buffers()
        while True:
            self._totals: list[Number] = [0.0, 0.0]
            if self.noise is not None:
                self.noise.begin(number, is_local=is_local)
            try:
                group = parallel.local_group if is_local else None
                own_sum, own_count = self._run_micro_batches(
                    batch, num_rows=num_rows, synchronises=synchronises, group=group
                )
                break
            except MemoryRanOut as exc:
                why = str(exc)
            self.recipe = self.back_off.halved(self.recipe, why, buffers)
            self.on_halved(self.recipe)
        loss_sum, count, *signals_of_all = self._totals
        if synchronises:  # in a local step too: all ranks then have the value, and a checkpoint holds it
            self._count_per_row = count / num_rows
        update = partial(self._update, want_norm=want_norm, own_count=own_count)
        if is_local:
            # a rank of which no row counts has no gradient
            correction = choose(own_count > 0, ratio(expected, own_count), 0.0)
            own_count_or_one = choose(own_count > 0, own_count, 1.0)
            launched = update(own_sum, own_count_or_one, correction=correction, num_rows=batch.num_rows)
            if synchronises:
                self._synchronise(launched, loss_sum, count)
            else:
                launched.count, launched.nonfinite, launched.is_own = own_count, (0, 0), True
        else:
            launched = update(loss_sum, count, correction=ratio(expected, count), num_rows=num_rows)
            self._begin_count()
        if self.noise is not None:
            self.noise.settle(num_rows)
        launched.begin_copy(signals_of_all if synchronises else [])
        if self.probe is not None:
            self.probe.on_step(launched.result(), float(setup.optimizer.param_groups[0]["lr"]))
        return launched

    def _synchronise(self, launched: LaunchedStep, loss_sum: Number, count: Number) -> None:
        """Add the losses, counts and signals of all ranks to a local step that ends in a synchronisation.
        Collective."""
        if self.place.world_size > 1:
            worst = together(self._nonfinite, self.place.device)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            steps, in_a_row = self._each(worst)
            self._nonfinite = (steps, in_a_row)
        launched.loss, launched.count, launched.nonfinite = ratio(loss_sum, count), count, self._nonfinite
        launched.is_finite = launched.is_finite & is_finite(launched.loss)
        self._begin_count()

    def _begin_count(self) -> None:
        """Restart the count of non-finite steps, after the ranks have shared it."""
        if self._ends:
            self._has_ended = self._has_ended | (self._nonfinite[0] > 0)
        self._nonfinite = (0.0, self._nonfinite[1])

    def _number(self, tensor: torch.Tensor) -> Number:
        """A computed number, which the host reads immediately if it need not wait for it."""
        return tensor.item() if self._reads else tensor.detach().double()

    def _each(self, tensor: torch.Tensor) -> list[Number]:
        """The numbers of a tensor (n,) of float64, in the form of `_number`."""
        return tensor.tolist() if self._reads else list(tensor.unbind())

    def _run_micro_batches(
        self, batch: RankBatch, *, num_rows: int, synchronises: bool, group: dist.ProcessGroup | None
    ) -> tuple[Number, Number]:
        """Run forward and backward passes of every micro-batch. Stores the totals of all ranks if they synchronise;
        returns the sum of losses and the count of `group`, or of this rank."""
        setup, parallel = self.setup, self.setup.parallel
        # where passes communicate, a rank with a row less may need a placeholder more
        size, shares = self.recipe.micro_batch_size, self.place.data_parallel_size
        most = most_micro_batches(batch, size, num_rows=num_rows, num_shares=shares)
        pieces = list(micro_batches(batch, size, at_least=most if parallel.forward_is_collective else 1))
        if self._whole is not None:
            pieces = self._after_first_pass(self._whole, pieces, most=most)
        pending = own_pending = None
        own = self._totals

        def sum_up() -> None:
            nonlocal pending, own_pending, own
            own = self._totals
            # signals after the forward passes, which may change the shapes of buffers
            self._totals = [*(own if parallel.counts_loss else [0.0, 0.0]), *self.signals()]
            if group is not None:
                own_pending = self._begin_sum(self._totals[:2], group)
            if synchronises and self.place.world_size > 1:
                pending = self._begin_sum(self._totals)

        if parallel.run_micro_batches is not None:
            parallel.run_micro_batches([self._on_device(*p) for p in pieces], self._objective, setup.precision.autocast)
            sum_up()
        else:
            with self.back_off.caught() as shortage:
                for piece in pieces[:-1]:
                    with parallel.no_sync():
                        scaled = self._objective(parallel.run, self._on_device(*piece))
                        self.enter(Phase.BACKWARD)
                        scaled.backward()
                scaled = self._objective(parallel.run, self._on_device(*pieces[-1]))
            self.enter(Phase.COMMUNICATION)
            self.back_off.agree_on(shortage)
            self.enter(Phase.BACKWARD)
            with self.back_off.caught(here=self.place.world_size == 1) as shortage:
                sum_up()  # beside the backward pass, so that it costs no time of its own
                if self.noise is not None:
                    self.noise.before_last_backward()
                scaled.backward()
            if shortage:
                raise MemoryRanOut(shortage[0])
        if self._whole is not None and self.num_updates == 0 and (shares > 1 or not self._whole.at_once):
            setup.parallel.notes.append(self._whole.note(most))
        if pending is not None or own_pending is not None:
            self.enter(Phase.COMMUNICATION)
        parallel.after_backward(self.num_updates + 1)
        if own_pending is not None:
            own = self._end_sum(*own_pending)
        if pending is not None:
            self._totals = self._end_sum(*pending)
        return own[0], own[1]

    def _begin_sum(self, values: list[Number], group: dist.ProcessGroup | None = None) -> tuple[Any, torch.Tensor]:
        sums = together(values, self.place.device)
        return dist.all_reduce(sums, group=group, async_op=True), sums

    def _end_sum(self, work: Any, sums: torch.Tensor) -> list[Number]:
        work.wait()
        return self._each(sums)

    def _after_first_pass(self, whole: WholeBatchLoss, pieces: list[Any], *, most: int) -> list[Any]:
        """The micro-batches on the device, after a first forward pass for a loss over the whole batch. Does nothing for
        a worker with one micro-batch, which needs no second pass. Collective."""
        # a step that may be repeated shares whether memory ran out before it gathers
        at_once = most == 1 and not self.back_off.is_on and getattr(self.workload, "collates_ahead", True)
        whole.begin(self.num_updates + 1, at_once=at_once)
        if at_once:
            return pieces
        autocast = self.setup.precision.autocast
        buffers = [(b, b.clone()) for b in dense_buffers(self.setup.parallel.module)]
        with self.back_off.caught() as shortage:
            pieces = [(self._on_device(*piece), piece[1]) for piece in pieces]
            for piece, weight in pieces:
                self.enter(Phase.FORWARD)
                with whole.first_pass(piece.batch, weight), autocast():
                    self.setup.parallel.run_alone(lambda model: self.workload.loss(model, piece.batch))  # noqa: B023
        self.enter(Phase.COMMUNICATION)
        self.back_off.agree_on(shortage)
        for buffer, before in buffers:
            buffer.copy_(before)
        self.enter(Phase.FORWARD)
        whole.compute(autocast)
        return pieces

    def _on_device(self, rows: Any, weight: int) -> MicroBatch:
        """Move each micro-batch to the device when it is needed, so that only one is on the device at a time."""
        if isinstance(rows, MicroBatch):
            return rows
        self.enter(Phase.COPY)
        dtype = self.setup.precision.input_dtype
        batch = user_batch(self.workload, rows, self.place.device, dtype, gives_tuples=self.gives_tuples)
        return MicroBatch(batch, weight)

    def _objective(self, run: Run, piece: MicroBatch) -> torch.Tensor:
        """Scaled loss of a micro-batch, whose sum and count are added to the totals."""
        self.enter(Phase.FORWARD)
        if self.noise is not None:
            self.noise.before_pass(piece.weight, self._totals[1])
        passing = contextlib.nullcontext() if self._whole is None else self._whole.second_pass(piece.weight)
        with passing, self.setup.precision.autocast():
            result = run(lambda model: self.workload.loss(model, piece.batch))
        loss, count = check_sum_and_count(result, what="loss()")
        if piece.weight == 0:  # a placeholder: it must run, as the collectives need every rank, and count nothing
            loss, count = loss * 0.0, count * 0
        # not in place, as others may keep a number of before
        self._totals[0] = self._totals[0] + self._number(loss)
        self._totals[1] = self._totals[1] + (self._number(count) if isinstance(count, torch.Tensor) else float(count))
        wide = loss if loss.dtype in (torch.float32, torch.float64) else loss.float()  # for the digits of the scale
        return self.setup.precision.scaler.scale(wide * as_factor(self._scale, wide.dtype))

    def _update(
        self, loss_sum: Number, count: Number, *, correction: Number, want_norm: bool, own_count: Number, num_rows: int
    ) -> LaunchedStep:
        setup, clip_norm = self.setup, self.config.optimizer.clip_norm
        self.enter(Phase.OPTIMIZER)
        scaler = setup.precision.scaler
        scaler.unscale_(setup.optimizer)
        if setup.pruning is not None:
            setup.pruning.mask_gradients()  # before anybody looks at them
        if self.probe is not None:
            self.probe.on_gradients(float(correction))
        gradients = [dense_part(p) for p in setup.parameters if p.grad is not None]
        norm: Number | None = None
        factor, scale = correction, self._loss_scale()
        looked_at = loss_sum + correction
        # what clips or skips keeps the weights, so look first
        want_norm = want_norm or clip_norm is not None or self.config.on_nonfinite != "raise"
        if want_norm or (self.noise is not None and self.noise.wants_norm):
            total = setup.parallel.total_norm(gradients).to(self.place.device)
            norm = self._number(total * as_factor(correction, total.dtype))
        # noise is computed on the host, which waits for the device in a step that is measured
        if self.noise is not None and self.noise.looks_at_gradients and math.isfinite(correction):
            self.noise.after_backward(
                norm if norm is None else float(norm),
                correction=float(correction),
                loss_scale=1.0 if scale is None else float(scale),
                count=float(count),
                own_count=float(own_count),
                num_rows=num_rows,
            )
        if want_norm and norm is not None:
            if not scaler.is_enabled():
                # with loss scaling an infinite gradient is the scaler's business: it skips the step, lowers the scale
                looked_at = looked_at + norm
            if clip_norm is not None:
                factor = choose(norm > clip_norm, factor * ratio(clip_norm, norm + 1e-6), factor)
        is_good = is_finite(looked_at)  # one look at all of them: it is NaN where one is not finite
        is_sound = choose(self._has_ended, False, is_good) if self._ends else is_good
        self.before_update()
        self._apply(gradients, factor, is_sound)
        scaler.update()
        self.num_updates += 1
        # a scaler lowers its scale after, and only after, a step that it skipped
        new_scale = self._loss_scale()
        if setup.parallel.carry_over is not None:
            change = 1.0 if scale is None or new_scale is None else ratio(new_scale, scale)
            setup.parallel.carry_over(correction * change, is_sound & (change >= 1.0))
        bad = choose(is_good, 0.0, 1.0)
        self._nonfinite = (self._nonfinite[0] + bad, (self._nonfinite[1] + 1) * bad)
        self.enter(Phase.COMMUNICATION)
        setup.parallel.after_update(self.num_updates)
        self.enter(Phase.HOST)
        self._prune()
        norm = norm if want_norm else None
        return LaunchedStep(ratio(loss_sum, count), count, norm, is_good, self._nonfinite, new_scale)

    def _loss_scale(self) -> Number | None:
        scale = self.setup.precision.loss_scale()
        return None if scale is None else self._number(scale)

    def _prune(self) -> None:
        """Prune if it is due, after the strategy's own work, which may have fetched parameters from other ranks."""
        pruning = self.setup.pruning
        if pruning is None:
            return
        if pruning.is_due(self.num_updates):
            self.before_update()
            pruning.prune(self.num_updates)
        else:
            pruning.apply()


def dense_part(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Gradient of a parameter, or the coalesced values of a sparse one, to be changed in place, because torch has no
    norm for a list of sparse tensors."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    parameter.grad = gradient = gradient.coalesce()
    return gradient._values()
