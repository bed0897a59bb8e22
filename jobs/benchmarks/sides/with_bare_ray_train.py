"""The barest Ray Train loop: a TorchTrainer around what torchrun's side does, on the Ray of RAY_ADDRESS or its own."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any


def train_loop(settings: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch
    from common import PlanSampler, Rows, Stopwatch, Task, data_loader, training_columns

    task = Task(**settings)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    workload = task.build_workload()
    rows = Rows(training_columns(workload))
    loader = data_loader(task, rows, PlanSampler(task.plan(len(rows)), rank=rank, world_size=world_size))
    torch.manual_seed(task.seed)
    model = ray.train.torch.prepare_model(workload.build_model())
    optimizer = task.adamw(model.parameters())
    watch = Stopwatch(task, rank=rank)
    while not watch.is_done:
        for batch in watch.batches(loader):
            total, count = workload.loss(model, batch)
            loss = total / count
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
            optimizer.step()
            watch.step_done(loss)
    watch.write()


def main() -> None:
    import ray
    import ray.train
    from common import read_task
    from ray.train.torch import TorchConfig, TorchTrainer

    task = read_task()
    ray.init(logging_level="warning")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        TorchTrainer(
            train_loop,
            train_loop_config=dataclasses.asdict(task),
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=task.world_size),
            run_config=ray.train.RunConfig(storage_path=folder),
        ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
