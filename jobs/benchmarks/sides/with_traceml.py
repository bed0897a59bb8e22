"""A training with a planted fault in a plain loop of DDP, watched by TraceML as its documentation has it.

traceml run with_traceml.py --nproc-per-node 2 --args SETTINGS     SETTINGS: see `planted.runs.cases`, as JSON

The model, the rows and all that sleeps are those that scaleray trains with (`planted/faults.py`). What comes between two
steps is outside of `trace_step`.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import traceml_ai as traceml
from planted.faults import BATCH, EVERY, LAYER_PARAMETERS, Planted, Rows, planted_around
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from scaleray.data import TRAIN
from scaleray.training.setup.rank_context import RankContext
from scaleray.training.step import micro_batches

STEPS = 60


def evaluate(planted: Planted, model: torch.nn.Module, rows: Rows) -> None:
    """A forward pass over each batch of the rows."""
    with torch.no_grad():
        for batch in DataLoader(rows, BATCH):
            planted.loss(model, batch)


def train(planted: Planted, place: RankContext) -> None:
    """The loop."""
    rows = planted.datasets()
    model = DistributedDataParallel(planted.build_model(), bucket_cap_mb=LAYER_PARAMETERS * 4 / 2**20)
    if (link := planted.link()) is not None:
        model.register_comm_hook(None, link.reduce)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    # read beside the training, a batch at a time and two ahead
    sampler = DistributedSampler(rows[TRAIN], place.world_size, place.rank)
    loader = DataLoader(rows[TRAIN], BATCH // place.world_size, sampler=sampler, num_workers=1, prefetch_factor=2)
    [callback] = planted.callbacks()
    for number, batch in enumerate(loader, 1):
        with traceml.trace_step(model):
            optimizer.zero_grad(set_to_none=True)
            batch = micro_batches.to_device(batch, place.device, None)
            total, count = planted.loss(model, batch)
            (total / count).backward()
            optimizer.step()
        callback.on_step(None)
        if "val" in rows and number % planted.evaluation_every == 0:
            evaluate(planted, model, rows["val"])
        if planted.name == "synchronous checkpoint" and number % EVERY == 0:
            torch.save(model.state_dict(), io.BytesIO())
            callback.on_checkpoint(None)
        if number == STEPS:
            break


def main() -> None:
    traceml.init(mode="auto")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = RankContext(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    planted = Planted(json.loads(sys.argv[1]), rank)
    with planted_around(planted, place):
        train(planted, place)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
