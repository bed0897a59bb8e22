"""How fast rows reach the training code: scaleray's pipeline against torch's DataLoader, over the same rows.

One epoch of shuffled batches, delivered to one consumer as torch tensors that it may write to. scaleray reads with
Ray Data tasks (one Ray CPU) from arrays in the object store or from a Parquet file; DataLoader reads a map-style
Dataset over the arrays in memory with its default collate, in 0 and in 2 worker processes.

    python jobs/benchmarks/input_pipeline.py --repeats 5
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

NUM_FEATURES = 64
DATALOADERS = ("dataloader_0", "dataloader_2")
SIDES = ("scaleray_arrays", "scaleray_parquet", *DATALOADERS)
RULES = """\
One epoch of {rows:,} rows of 64 float32 and an int64 label, shuffled, batch {batch}. The clock runs from before the
iterator is made to after the last batch; nothing is done with a batch but keeping its labels and first column. Each
side runs once before the rounds, unmeasured: processes are warm and files cached. Sides are in random order in each
round (seed {seed}), {repeats} rounds. Median (smallest-largest). The ratio is taken in each round, to the faster
DataLoader of that round. Every row arrived exactly once, with its own label, in every epoch."""

Batches = Iterator[dict[str, torch.Tensor]]


class Rows(torch.utils.data.Dataset):
    """The rows as a user's ordinary map-style Dataset."""

    def __init__(self, columns: dict[str, np.ndarray]) -> None:
        self.x, self.label = torch.from_numpy(columns["x"]), torch.from_numpy(columns["label"])

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "label": self.label[index]}


def make_columns(num_rows: int) -> dict[str, np.ndarray]:
    """Random rows; the label is the row number and so is the first feature, so that a consumer can check both."""
    x = np.random.default_rng(0).standard_normal((num_rows, NUM_FEATURES), dtype=np.float32)
    x[:, 0] = np.arange(num_rows)
    return {"x": x, "label": np.arange(num_rows)}


def write_parquet(columns: dict[str, np.ndarray], path: Path) -> None:
    """The same rows as a Parquet file with row groups of 10,000."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lists = pa.FixedSizeListArray.from_arrays(pa.array(columns["x"].reshape(-1)), NUM_FEATURES)
    pq.write_table(pa.table({"x": lists, "label": columns["label"]}), path, row_group_size=10_000)


def dataloader_batches(rows: Rows, *, batch_size: int, num_workers: int, epoch: int) -> Batches:
    """One epoch of a DataLoader as its documentation shows it."""
    order = torch.Generator().manual_seed(epoch)
    yield from torch.utils.data.DataLoader(
        rows, batch_size=batch_size, shuffle=True, num_workers=num_workers, generator=order
    )


def scaleray_batches(source: Any, source_ref: Any, *, batch_size: int, epoch: int) -> Batches:
    """One epoch as a worker of a run with one rank and the default data settings reads it."""
    from scaleray.config.data import DataSettings
    from scaleray.data import Part, StepPlan, StepStream
    from scaleray.data.local_start import Demand
    from scaleray.data.ray_blocks import ray_blocks
    from scaleray.data.source import Columns

    settings = DataSettings()
    plan = StepPlan(
        source.num_rows, batch_size, seed=epoch, group_sizes=source.group_sizes, window_rows=settings.window_rows
    )
    part = Part(plan, rank=0, world_size=1, first_step=0, last_step=plan.steps_per_epoch)
    prefetch_bytes = settings.prefetch_mib * 2**20

    def open_blocks(part: Part, demand: Demand) -> Iterator[Columns]:
        return ray_blocks(
            source_ref,
            part,
            row_bytes=source.row_bytes,
            chunk_bytes=settings.chunk_mib * 2**20,
            memory_bytes=prefetch_bytes,
            cpus=settings.reserved_cpus,
        )

    stream = StepStream(open_blocks, part, row_bytes=source.row_bytes, prefetch_bytes=prefetch_bytes)
    for batch in stream:
        yield {name: torch.from_numpy(values) for name, values in batch.columns.items()}


def consume(batches: Batches, *, num_rows: int) -> harness.Measurement:
    """Run one epoch and check that every row came exactly once, whole."""
    labels, firsts = [], []
    started = time.perf_counter()
    first_batch_s = None
    for batch in batches:
        first_batch_s = first_batch_s or time.perf_counter() - started
        labels.append(batch["label"].clone())
        firsts.append(batch["x"][:, 0].clone())
    epoch_s = time.perf_counter() - started
    arrived = torch.cat(labels)
    if not torch.equal(arrived.sort().values, torch.arange(num_rows)):
        raise RuntimeError(f"{len(arrived)} rows arrived, {len(arrived.unique())} of them different, not {num_rows}")
    if not torch.equal(torch.cat(firsts), arrived.float()):
        raise RuntimeError("features and labels of different rows were mixed")
    if torch.equal(arrived, arrived.sort().values):
        raise RuntimeError("the rows arrived in order, not shuffled")
    return {"epoch_s": epoch_s, "rows_per_s": num_rows / epoch_s, "first_batch_s": first_batch_s}


def measure(arguments: argparse.Namespace, folder: Path) -> list[harness.Measurement]:
    """All rounds of all sides, in one process with one Ray cluster."""
    import ray

    from scaleray.data import ArraySource, ParquetSource

    columns = make_columns(arguments.rows)
    write_parquet(columns, folder / "rows.parquet")
    rows, arrays, parquet = Rows(columns), ArraySource(columns), ParquetSource(folder / "rows.parquet")
    harness.start_ray(num_cpus=3)
    refs = {"scaleray_arrays": (arrays, ray.put(arrays)), "scaleray_parquet": (parquet, ray.put(parquet))}

    def run(side: str, epoch: int) -> harness.Measurement:
        if side in refs:
            batches = scaleray_batches(*refs[side], batch_size=arguments.batch_size, epoch=epoch)
        else:
            workers = int(side.rpartition("_")[2])
            batches = dataloader_batches(rows, batch_size=arguments.batch_size, num_workers=workers, epoch=epoch)
        return consume(batches, num_rows=arguments.rows)

    for side in arguments.sides:
        run(side, epoch=0)
    found = []
    for number, side in harness.interleaved(arguments.sides, repeats=arguments.repeats, seed=arguments.seed):
        found.append({"round": number, "side": side, **run(side, epoch=1 + number)})
        harness.log(f"round {number + 1}: {side:17} {found[-1]['rows_per_s']:9.0f} rows/s")
    ray.shutdown()
    return found


def describe(found: list[harness.Measurement], arguments: argparse.Namespace) -> str:
    """The rules and the table."""
    rows = []
    for side in arguments.sides:
        own = [m for m in found if m["side"] == side]
        ratio = harness.ratios(found, "rows_per_s", side=side, baselines=DATALOADERS)
        rows.append(
            [
                side,
                harness.show([m["rows_per_s"] / 1000 for m in own]),
                harness.show([m["epoch_s"] for m in own], "{:.2f}"),
                harness.show([m["first_batch_s"] for m in own], "{:.3f}"),
                harness.show(ratio, "{:.2f}"),
            ]
        )
    header = ["side", "1000 rows/s", "epoch, s", "first batch, s", "ratio to the faster DataLoader"]
    rules = RULES.format(
        rows=arguments.rows, batch=arguments.batch_size, seed=arguments.seed, repeats=arguments.repeats
    )
    return rules + "\n\n" + harness.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the sides within each round")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES), help=",".join(SIDES))
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    if unknown := set(arguments.sides) - set(SIDES):
        parser.error(f"unknown sides: {', '.join(sorted(unknown))}")
    conditions = harness.conditions(["torch", "ray", "numpy", "pyarrow"])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ.update(harness.ray_environment(folder))
        found = measure(arguments, Path(folder))
    settings = {"rows": arguments.rows, "batch_size": arguments.batch_size, "seed": arguments.seed}
    record = {"conditions": conditions, "settings": settings, "measurements": found}
    harness.write_report(
        "input_pipeline",
        title="Input pipeline",
        text=describe(found, arguments),
        record=record,
        folder=arguments.results,
    )


if __name__ == "__main__":
    main()
