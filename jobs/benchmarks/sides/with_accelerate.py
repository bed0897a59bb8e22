"""Hugging Face Accelerate: the usual loop, started by torchrun.

`accelerate launch --cpu` starts several processes through MPI only; torchrun is the other way its documentation gives."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from common import PlanSampler, Rows, Stopwatch, data_loader, read_task, training_columns


def main() -> None:
    task = read_task()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    workload = task.build_workload()
    rows = Rows(training_columns(workload))
    # the order of the whole batch: prepare() deals consecutive batches out to the ranks, which gives each its share
    sampler = PlanSampler(task.plan(len(rows)), rank=0, world_size=1)
    loader = data_loader(task, rows, sampler)

    torch.manual_seed(task.seed)
    model = workload.build_model()
    model, optimizer, loader = accelerator.prepare(model, task.adamw(model.parameters()), loader)

    watch, epoch = Stopwatch(task, rank=accelerator.process_index), 0
    while not watch.is_done:
        loader.set_epoch(epoch)
        for batch in watch.batches(loader):
            total, count = workload.loss(model, batch)
            loss = total / count
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), task.clip_norm)
            optimizer.step()
            watch.step_done(loss)
        epoch += 1
    watch.write()
    accelerator.end_training()


if __name__ == "__main__":
    main()
