"""Lightning: a LightningModule and the Trainer with its ddp strategy on the CPU."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from common import PlanSampler, Rows, Stopwatch, Task, data_loader, read_task, training_columns


class Module(lightning.LightningModule):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.workload = task, task.build_workload()
        self.model = self.workload.build_model()

    def training_step(self, batch: dict[str, torch.Tensor], batch_index: int) -> torch.Tensor:
        total, count = self.workload.loss(self.model, batch)
        return total / count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.task.adamw(self.parameters())

    def train_dataloader(self) -> Any:
        rows = Rows(training_columns(self.workload))
        self.sampler = PlanSampler(self.task.plan(len(rows)), rank=self.global_rank, world_size=self.trainer.world_size)
        return TimedLoader(data_loader(self.task, rows, self.sampler), self.trainer)


class TimedLoader:
    """The DataLoader, with its batches timed."""

    def __init__(self, loader: torch.utils.data.DataLoader, trainer: lightning.Trainer) -> None:
        self.loader, self.trainer = loader, trainer

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        timer = next(c for c in self.trainer.callbacks if isinstance(c, Timer))
        return timer.watch.batches(self.loader)


class Timer(lightning.Callback):
    def __init__(self, task: Task) -> None:
        self.task = task

    def setup(self, trainer: lightning.Trainer, module: Module, stage: str) -> None:
        self.watch = Stopwatch(self.task, rank=trainer.global_rank)

    def on_train_epoch_start(self, trainer: lightning.Trainer, module: Module) -> None:
        module.sampler.set_epoch(trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.watch.step_done(outputs["loss"])

    def on_train_end(self, trainer: lightning.Trainer, module: Module) -> None:
        self.watch.write()


def main() -> None:
    task = read_task()
    torch.set_num_threads(1)
    lightning.seed_everything(task.seed)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=task.world_size,
        max_steps=task.steps,
        gradient_clip_val=task.clip_norm,
        callbacks=[Timer(task)],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(task))


if __name__ == "__main__":
    main()
