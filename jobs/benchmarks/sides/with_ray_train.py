"""Ray Train and Ray Data by hand: TorchTrainer, and iter_torch_batches with a local shuffle.

The data is a Ray dataset in the object store, split among the workers, so the order of samples is Ray's own.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

SHUFFLE_ROWS = 2048  # rows that each worker shuffles together
BLOCKS_PER_WORKER = 4  # Ray's own choice is 200 blocks in all, which makes an epoch of few rows three times slower


def train_loop(settings: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    import torch
    from common import Stopwatch, Task

    task = Task(**settings)
    torch.set_num_threads(1)
    workload = task.build_workload()
    torch.manual_seed(task.seed)
    model = ray.train.torch.prepare_model(workload.build_model())
    optimizer = task.adamw(model.parameters())
    shard = ray.train.get_dataset_shard("train")

    watch, epoch = Stopwatch(task, rank=ray.train.get_context().get_world_rank()), 0
    while not watch.is_done:
        batches = shard.iter_torch_batches(
            batch_size=task.batch_size,
            drop_last=True,
            prefetch_batches=4,
            local_shuffle_buffer_size=SHUFFLE_ROWS,
            local_shuffle_seed=task.seed + epoch,
        )
        for batch in watch.batches(batches):
            total, count = workload.loss(model, batch)
            loss = total / count
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
            optimizer.step()
            watch.step_done(loss)
        epoch += 1
    watch.write()


def main() -> None:
    import dataclasses

    import harness
    from common import read_task, training_columns

    task = read_task()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ.update(harness.ray_environment(folder))
        import ray
        import ray.data
        import ray.train
        from ray.train.torch import TorchConfig, TorchTrainer

        harness.start_ray(num_cpus=3)
        columns = training_columns(task.build_workload())
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        TorchTrainer(
            train_loop,
            train_loop_config=dataclasses.asdict(task),
            torch_config=TorchConfig(backend="gloo", timeout_s=120),
            scaling_config=ray.train.ScalingConfig(num_workers=task.world_size, resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(storage_path=folder),
            datasets={"train": ray.data.from_items(rows, override_num_blocks=BLOCKS_PER_WORKER * task.world_size)},
        ).fit()
        ray.shutdown()


if __name__ == "__main__":
    main()
