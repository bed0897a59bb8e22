"""Whether nodes add up: rows that wait, as those of remote storage do, read by Ray tasks on 1, 2 and 4 emulated nodes.

Nodes of one Ray CPU each on this machine, beside a head without any, where the consumer is. A row takes a fixed time of
sleep, so that cores of the machine, which all nodes share, are not what limits; decoding would not add up here. Rows
carry the node that read them.

    python jobs/benchmarks/input_nodes.py --repeats 3
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

BATCH_SIZE = 32
RULES = """\
{steps} batches of {batch} rows of 1,024 float32, each of which takes {row_ms:g} ms of sleep to read, delivered in order
to one consumer by the tasks of `data.readers: ray` on emulated nodes of one Ray CPU each. The clock runs from before
the stream is opened to after the last batch; each number of nodes is run once before, unmeasured, and then {repeats}
times. Medians (smallest-largest). `of one node`: rows a second over those of one node. rows by node: of the last
repeat. The order was that of the plan in every run."""


class WaitingRows(torch.utils.data.Dataset):
    """Rows that come from far away: each takes `row_s` seconds, and says on which node it was read."""

    def __init__(self, num_rows: int, row_s: float) -> None:
        self.num_rows, self.row_s = num_rows, row_s

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        import ray

        time.sleep(self.row_s)
        node = int(ray.get_runtime_context().get_node_id()[:12], 16)
        return {"x": np.full(1024, index, np.float32), "row": index, "node": node}


def read(source: Any, reference: Any, cpus: float, *, num_steps: int, seed: int) -> tuple[harness.Measurement, Counter]:
    """One run: rows a second, and how many rows each node read."""
    from scaleray.config.data import DataSettings
    from scaleray.data import Input, Part, RaySources, Split, StepPlan

    plan = StepPlan(source.num_rows, BATCH_SIZE, seed=seed)
    split, part = Split.of("train", source), Part(plan, 0, 1, 0, num_steps)
    # blocks of one batch, as there are few
    settings = DataSettings(readers="ray", chunk_mib=BATCH_SIZE * source.row_bytes / 2**20)
    stored = RaySources({"train": reference}, cpus)
    # rows that tell their node differ where they are read, so none may come from the consumer itself
    stream = Input(stored, settings, True, lambda: float("inf"), harness.log)
    nodes: Counter[int] = Counter()
    started = time.perf_counter()
    for batch in stream.open(split, part):
        if not np.array_equal(batch.columns["row"], plan.global_indices(batch.step)):
            raise RuntimeError(f"step {batch.step} has other rows than the plan")
        nodes.update(batch.columns["node"].tolist())
    return {"rows_per_s": num_steps * BATCH_SIZE / (time.perf_counter() - started)}, nodes


def measure(arguments: argparse.Namespace, folder: str) -> list[harness.Measurement]:
    """All repeats on clusters that grow."""
    import ray
    from ray.cluster_utils import Cluster

    from scaleray.data import as_source

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 2**28})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
    found: list[harness.Measurement] = []
    try:
        source = as_source(WaitingRows(4096, arguments.row_ms / 1000), split="train")
        reference, present = ray.put(source), 0
        for number in arguments.nodes:
            for _ in range(number - present):
                cluster.add_node(num_cpus=1, object_store_memory=2**28)
            present = number
            cluster.wait_for_nodes()
            read(source, reference, float(number), num_steps=8 * number, seed=0)
            for repeat in range(arguments.repeats):
                figures, nodes = read(source, reference, float(number), num_steps=arguments.steps, seed=1 + repeat)
                rows_by_node = sorted(nodes.values(), reverse=True)
                found.append({"round": repeat, "side": str(number), "rows_by_node": rows_by_node, **figures})
                harness.log(f"{number} nodes: {figures['rows_per_s']:.0f} rows/s, {rows_by_node}")
    finally:
        ray.shutdown()
        cluster.shutdown()
    return found


def describe(found: list[harness.Measurement], arguments: argparse.Namespace) -> str:
    """The rules and the table."""
    rules = RULES.format(steps=arguments.steps, batch=BATCH_SIZE, row_ms=arguments.row_ms, repeats=arguments.repeats)
    rows = []
    for side in dict.fromkeys(m["side"] for m in found):
        own = [m for m in found if m["side"] == side]
        ratio = harness.ratios(found, "rows_per_s", side=side, baselines=(found[0]["side"],))
        spread = ", ".join(str(count) for count in own[-1]["rows_by_node"])
        rows.append([side, harness.show([m["rows_per_s"] for m in own]), harness.show(ratio, "{:.2f}"), spread])
    return rules + "\n\n" + harness.table(["nodes", "rows/s", "of one node", "rows by node"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--nodes", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--row-ms", type=float, default=4.0)
    parser.add_argument("--results", type=Path, default=harness.RESULTS, help="folder for the report")
    arguments = parser.parse_args()
    conditions = harness.conditions(["torch", "ray", "numpy"])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ.update(harness.ray_environment(folder))
        found = measure(arguments, folder)
    harness.write_report(
        "input_nodes",
        title="Input from several nodes",
        text=describe(found, arguments),
        record={"conditions": conditions, "settings": harness.arguments_of(arguments), "measurements": found},
        folder=arguments.results,
    )


if __name__ == "__main__":
    main()
