"""Plain PyTorch: a DistributedDataParallel loop as a competent user writes it, started by torchrun."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import PlanSampler, Rows, Stopwatch, data_loader, read_task, training_columns
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    task = read_task()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    workload = task.build_workload()
    rows = Rows(training_columns(workload))
    sampler = PlanSampler(task.plan(len(rows)), rank=rank, world_size=world_size)
    loader = data_loader(task, rows, sampler)

    torch.manual_seed(task.seed)
    model = DistributedDataParallel(workload.build_model())
    optimizer = task.adamw(model.parameters())

    watch, epoch = Stopwatch(task, rank=rank), 0
    while not watch.is_done:
        sampler.set_epoch(epoch)
        for batch in watch.batches(loader):
            total, count = workload.loss(model, batch)
            loss = total / count
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
            optimizer.step()
            watch.step_done(loss)
        epoch += 1
    watch.write()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
