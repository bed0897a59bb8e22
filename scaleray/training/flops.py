"""Floating-point operations of a sample, counted by torch while one micro-batch is trained on."""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode

from scaleray.data import Part
from scaleray.reproducibility.seeding import seed_everything
from scaleray.training.job import TRAIN, OpenStream, TrainJob
from scaleray.training.micro_batches import as_user_batch, micro_batches, to_device
from scaleray.training.place import Place
from scaleray.training.sum_and_count import check_sum_and_count


def flops_per_sample(job: TrainJob, place: Place, open_stream: OpenStream) -> float | None:
    """Of the forward and backward pass: each multiplication and each addition of matrix products and convolutions is one.

    Of the workload's model as it is, on one worker: what is computed a second time for activation checkpointing is
    nothing that the model needs. None where torch knows none of its operations.
    """
    split, plan = job.splits[TRAIN], job.train_plan()
    stream = open_stream(split, Part(plan, 0, 1, 0, 1))
    try:
        batch = next(iter(stream))
    finally:
        stream.close()
    seed_everything(job.config.seed)
    with place.device:
        model = job.workload.build_model()
    model.to(place.device)
    arrays, num_rows = next(micro_batches(batch, job.recipe.micro_batch_size))
    columns = to_device(arrays, place.device, None)
    with FlopCounterMode(display=False) as counter:
        total, _ = check_sum_and_count(
            job.workload.loss(model, as_user_batch(columns, split.gives_tuples)), what="loss()"
        )
        total.backward()
    flops = float(counter.get_total_flops())
    return flops / num_rows if flops else None
