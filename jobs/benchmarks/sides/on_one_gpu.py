"""One measurement of the GPU benchmark in a process of its own: a hand-written loop, or scaleray's with or without Ray.

python on_one_gpu.py TASK.json     writes its figures to the file that the task names
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scaleray.config import RunConfig, load_config
from scaleray.config.recipe.derive import derive
from scaleray.config.recipe.values import DataSize
from scaleray.data import TRAIN, Split, as_source
from scaleray.data.sources import TokenSource
from scaleray.records.run_record import EventRecord, StepRecord, WorkerMessage
from scaleray.training import loop
from scaleray.training.setup.job import TrainJob
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step.micro_batches import to_device
from scaleray.workload import load_workload

FOLDER = Path(__file__).resolve().parents[1]
WORKLOAD = f"{FOLDER / 'gpu_workload.py'}:RandomTokens"
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 3e-4, (0.9, 0.95), 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """side: `plain` or `scaleray`. Times are taken from the end of step `warmup_steps` to the end of the last."""

    side: str
    size: str
    sequence_length: int
    batch_size: int
    micro_batch_size: int
    steps: int
    warmup_steps: int
    device: str
    compiled: str
    """`nothing`, `blocks` or `model`."""
    is_checkpointed: bool
    is_sharded: bool
    """FSDP over the one worker that there is: what wrapping alone costs."""
    float8: str
    uses_ray: bool
    seed: int
    result: str

    def config(self, folder: str) -> RunConfig:
        """The run as scaleray is told."""
        is_cuda = self.device == "cuda"
        flags: dict[str, Any] = {
            "workload.name": WORKLOAD,
            "workload.args.size": self.size,
            "workload.args.sequence_length": self.sequence_length,
            "batch.global_size": self.batch_size,
            "batch.micro_size": self.micro_batch_size,
            "batch.drop_last": True,
            "optimizer.name": "adamw",
            "optimizer.learning_rate": LEARNING_RATE,
            "optimizer.betas": list(BETAS),
            "optimizer.weight_decay": WEIGHT_DECAY,
            "optimizer.clip_norm": CLIP_NORM,
            "precision.dtype": "bf16",
            "precision.float8": self.float8,
            "precision.emulate_float8": self.float8 != "none" and not is_cuda,
            "compilation.what": self.compiled,
            "compilation.must_succeed": self.compiled != "nothing",
            "activations.checkpointing": "full" if self.is_checkpointed else "none",
            "stop.after": f"{self.steps} steps",
            "scale.gpus_per_worker": 1 if is_cuda else 0,
            "checkpoint.save_final": False,
            "checkpoint.every_minutes": None,
            "checkpoint.storage_path": folder,
            "tracking.uri": f"sqlite:///{folder}/mlflow.db",
            "tracking.every_steps": 10,
            "seed": self.seed,
        }
        if self.compiled != "nothing" and not is_cuda:
            flags["compilation.backend"] = "eager"
        return load_config(flags=flags, environ={})


class GroupOfOne(RankContext):
    """One worker with a process group, so that a strategy can wrap the model as it would among many."""

    @property
    def group(self) -> Any:
        return torch.distributed.group.WORLD


def by_hand(task: Task) -> dict[str, float]:
    """The loop that a careful user writes: bf16 autocast, compiled, fused AdamW, pinned copies, no reading of the loss."""
    device = torch.device(task.device)
    workload = load_workload(WORKLOAD, {"size": task.size, "sequence_length": task.sequence_length})
    torch.manual_seed(task.seed)
    with device:
        model = workload.build_model()
    if task.is_checkpointed:
        for block in model.blocks:
            block.forward = _recomputed(block)
    if task.compiled == "blocks":
        for block in model.blocks:
            block.compile(backend=_backend(task))
    elif task.compiled == "model":
        model.compile(backend=_backend(task))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    source, pieces = as_source(workload.datasets()["train"], split="train"), task.batch_size // task.micro_batch_size
    rows = torch.randperm(source.num_rows, generator=torch.Generator().manual_seed(task.seed)).numpy()
    begun = 0.0
    for step in range(task.steps):
        if step == task.warmup_steps:
            _wait(device)
            begun = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        for piece in range(pieces):
            first = (step * pieces + piece) * task.micro_batch_size % (source.num_rows - task.micro_batch_size)
            batch = to_device(source.read(rows[first : first + task.micro_batch_size]), device, None)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                total, count = workload.loss(model, batch)
            (total / (count * pieces)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
    _wait(device)
    return {"time_s": time.perf_counter() - begun, **_memory(device)}


def without_ray(task: Task, folder: str) -> dict[str, float]:
    """scaleray's own loop in this process; no Ray and no MLflow, which need not be installed."""
    device, config = torch.device(task.device), task.config(folder)
    workload = load_workload(WORKLOAD, dict(config.workload.args))
    source = workload.datasets()[TRAIN]
    assert isinstance(source, TokenSource)
    recipe = derive(config, DataSize(source.num_rows, source.tokens_per_row))
    place = RankContext(device=device)
    if task.is_sharded:
        recipe, place = dataclasses.replace(recipe, strategy="fsdp"), GroupOfOne(device=device)
        _join_alone(device)
    job = TrainJob(config, recipe, workload, {TRAIN: Split.of(TRAIN, source)}, time.time())
    step_times: list[float] = []

    def emit(message: WorkerMessage) -> None:
        if isinstance(message, StepRecord):
            step_times.append(message.step_time_s)
        if isinstance(message, EventRecord):
            print(message.text, file=sys.stderr)

    loop.run(job, place, sources={TRAIN: source}, emit=emit)
    if task.is_sharded:
        torch.distributed.destroy_process_group()
    return {"time_s": sum(step_times[task.warmup_steps :]), **_memory(device)}


def on_ray(task: Task, folder: str) -> dict[str, float]:
    """The whole way: one worker of Ray Train, NCCL, input through Ray Data, MLflow."""
    import csv

    import harness

    os.environ.update(harness.ray_environment(folder))
    import ray

    import scaleray

    harness.start_ray(num_cpus=max(3, (os.cpu_count() or 3)))
    try:
        record = scaleray.train(task.config(folder))
    finally:
        ray.shutdown()
    with open(Path(record.run_dir) / "steps.csv", newline="") as file:
        step_times = [float(row["step_time_s"]) for row in csv.DictReader(file)]
    return {"time_s": sum(step_times[task.warmup_steps :]), "peak_memory_bytes": float(max(record.peak_memory_bytes))}


def _backend(task: Task) -> str:
    return "inductor" if task.device == "cuda" else "eager"


def _recomputed(block: nn.Module) -> Any:
    forward = block.forward
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def _join_alone(device: torch.device) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory(device: torch.device) -> dict[str, float]:
    if device.type == "cuda":
        return {"peak_memory_bytes": float(torch.cuda.max_memory_allocated())}
    return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}  # Linux counts in KiB


def main() -> None:
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    folder = str(Path(task.result).parent)
    run = by_hand if task.side == "plain" else None
    figures = run(task) if run else (on_ray if task.uses_ray else without_ray)(task, folder)
    Path(task.result).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
